"""Write the model card (README.md of a model folder): training, evaluation, limits, licence, recipe."""

import math
from datetime import timedelta

from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedConfig

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config, DataSection, OptimSection
from nanogpt_hf.config.sources import has_conversations, is_mixture, source_text, sources_of
from nanogpt_hf.data.bpe import TRAINING_BYTES
from nanogpt_hf.data.interleave import Interleave
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.data.mixed_manifest import MixedManifest, PreparedSource
from nanogpt_hf.data.source import BUILT_IN
from nanogpt_hf.export.markdown import escape, fact_table, fenced, inline_code
from nanogpt_hf.export.staging import PATH_PLACEHOLDER
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.runs.machine import code_version, versions
from nanogpt_hf.runs.redact import redact
from nanogpt_hf.runs.state import TrainState


def model_card(
    config: Config,
    model_config: PreTrainedConfig,
    manifest: Manifest,
    state: TrainState,
    machine: str,
    base_model: str | None = None,
    adapter: bool = False,
) -> str:
    """The card of a trained model, or of a LoRA adapter, with the metadata that the Hub reads.

    `state` is the training state when it was saved, `machine` one line about the hardware, `base_model` the Hub id or
    name of the model that fine-tuning started from.
    """
    source, results = source_text(config.data), _eval_results(config, manifest, state)
    sources = _prepared_sources(config, manifest)
    metadata = ModelCardData(
        license=config.hub.license,
        base_model=base_model,
        datasets=[part.data.one_source for part in sources if _is_on_hub(part.data, part.manifest)] or None,
        model_name=config.name if results else None,
        eval_results=results or None,
    )
    start = f"fine-tuned from {inline_code(base_model)}" if base_model else "trained from scratch"
    origin = f"{start} on {inline_code(source)} with nanogpt_hf"
    sections = [
        ("Training", fact_table(_training(config, manifest, state, machine))),
        ("Evaluation", _evaluation(config, manifest, state)),
        ("Limits", _limits(config, model_config)),
        ("Licence", _licence(config.hub.license, base_model)),
        ("Recipe", fenced(config_to_yaml(config).rstrip(), "yaml")),
    ]
    return _card(config.name, model_config, origin, metadata, sections, config.lora.rank if adapter else None)


def imported_card(name: str, model_config: PreTrainedConfig, facts: dict[str, str]) -> str:
    """The card of a model that nanoGPT trained, which has no recipe."""
    origin = "trained by nanoGPT and imported with nanogpt_hf"
    sections = [("Training", fact_table(facts)), ("Licence", _licence(None, None))]
    return _card(name, model_config, origin, ModelCardData(), sections)


def minimal_card(name: str, model_config: PreTrainedConfig) -> str:
    """The card of a model whose training is unknown."""
    sections = [("Licence", _licence(None, None))]
    return _card(name, model_config, "whose training is not recorded here", ModelCardData(), sections)


def _prepared_sources(config: Config, manifest: Manifest) -> tuple[PreparedSource, ...]:
    """The sources of a mixture, or the only one."""
    if isinstance(manifest, MixedManifest):
        return manifest.sources
    return tuple(PreparedSource(*source, manifest) for source in sources_of(config.data))


def _is_on_hub(data: DataSection, manifest: Manifest) -> bool:
    """Whether the text is a data set on the Hub. The revision of files and downloads is a checksum."""
    return not is_mixture(data) and data.source not in BUILT_IN and not manifest.revision.startswith("sha256:")


def _eval_results(config: Config, manifest: Manifest, state: TrainState) -> list[EvalResult]:
    """The validation loss in the format of the Hub's model-index; empty if there is no finite loss."""
    if state.evaluation is None or not math.isfinite(state.evaluation.loss):
        return []
    source = source_text(config.data)
    values = {
        ("loss", "validation loss, nats per token"): state.evaluation.loss,
        ("perplexity", "validation perplexity, per token"): state.evaluation.perplexity,
        ("bits_per_byte", "validation bits per byte"): state.evaluation.bits_per_byte,
    }
    on_hub = _is_on_hub(config.data, manifest)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=source,
            dataset_config=config.data.config if on_hub else None,
            dataset_split=config.data.validation_split or f"held out of {config.data.split}" if on_hub else "held out",
            dataset_revision=manifest.revision if on_hub and manifest.revision != "unknown" else None,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 4),
        )
        for (kind, name), value in values.items()
    ]


def _describe_source(data: DataSection, manifest: Manifest) -> str:
    source = source_text(data)
    if _is_on_hub(data, manifest):
        if data.config:
            source += f", configuration {data.config}"
        source += f", split {data.split}"
    return source


def _training(config: Config, manifest: Manifest, state: TrainState, machine: str) -> dict[str, str]:
    data, optim, train = config.data, config.optim, config.train
    packages = {name: version for name, version in versions().items() if name != "nanogpt_hf"}
    if config.rl.task:
        split = f"{manifest.train.documents:,} questions of the task {config.rl.task}"
        seen = f"{state.tokens:,} positions, padding included; {config.rl.samples} completions per question"
    elif manifest.train.assistant_tokens:
        split = f"{manifest.train.tokens:,} tokens in {manifest.train.documents:,} conversations, "
        split += f"{manifest.train.assistant_tokens:,} in answers"
        seen = f"{state.tokens:,} positions ({data.packing}), padding included"
    else:
        split = f"{manifest.train.tokens:,} tokens in {manifest.train.documents:,} documents"
        seen = f"{state.tokens:,} ({state.tokens / manifest.train.tokens:.2f} times the training split)"
    sources = {"data": _describe_source(data, manifest), "data revision": manifest.revision}
    if isinstance(manifest, MixedManifest):
        samples = state.tokens // data.block_size
        counts = Interleave([part.weight for part in manifest.sources]).counts(samples).tolist()
        sources = {
            f"data: {part.name}": f"{_describe_source(part.data, part.manifest)}; {count / max(1, samples):.2%} of the "
            f"sequences; {part.manifest.train.tokens:,} tokens; revision {part.manifest.revision}"
            for part, count in zip(manifest.sources, counts, strict=True)
        }
    optimizer, rate = _optimizer(optim)
    return {
        **sources,
        "tokenizer": f"{data.tokenizer}, {manifest.vocab_size:,} tokens{_tokenizer_training(config)}",
        "training split": split,
        "tokens seen": seen,
        "steps": f"{state.step:,} of {train.max_steps:,}",
        "tokens per step": f"{train.tokens_per_step:,}, in sequences of {data.block_size:,}",
        "optimizer": optimizer,
        "learning rate": f"{rate}, after {optim.warmup_steps:,} steps of warm-up",
        "gradient clipping": f"norm {optim.max_grad_norm:g}" if optim.max_grad_norm else "none",
        "dropout": f"{config.model.dropout:g}",
        "seed": str(train.seed),
        "trained on": f"{machine} (when this was saved; a run can change machines)",
        "software": ", ".join([f"nanogpt_hf {code_version()}", *(f"{name} {v}" for name, v in packages.items())]),
        "time": f"{timedelta(seconds=round(state.seconds))} (h:mm:ss) of training and evaluation",
    }


def _optimizer(optim: OptimSection) -> tuple[str, str]:
    """The optimizer and its learning rates."""
    rate = f"{optim.learning_rate:g}, {optim.schedule}"
    if optim.schedule != "constant":
        rate += f" to {optim.min_learning_rate:g}"
    return kind_of(optim).describe(optim), rate


def _tokenizer_training(config: Config) -> str:
    if config.data.tokenizer != "bpe":
        return ""
    pattern = {"gpt2": "GPT-2's", "gpt4": "GPT-4's"}[config.data.bpe_pattern]
    limit = f"evenly spaced pieces of at most {TRAINING_BYTES // 10**6} MB of it"
    return f": byte-level BPE trained on the training split ({limit}), which was split by {pattern} pattern"


def _evaluation(config: Config, manifest: Manifest, state: TrainState) -> str:
    if config.rl.task and state.best_loss is not None:
        questions = min(config.rl.eval_questions, manifest.validation.documents)
        return f"Mean reward on {questions:,} held-out questions: {-state.best_loss:.4f} (step {state.best_step:,})."
    if state.evaluation is None:
        return "Not measured."
    result = state.evaluation
    table = fact_table(
        {
            "validation loss": f"{format_number(result.loss, 4)} nats per token",
            "perplexity": f"{format_number(result.perplexity, 2)} per token",
            "bits per byte": format_number(result.bits_per_byte, 4),
        }
    )
    if isinstance(manifest, MixedManifest):
        split = (
            "Each source has its own validation split. The loss is the mean of the sources' losses, weighted by their "
            "shares of the training sequences; bytes per token are weighted alike."
        )
    elif config.data.validation_split:
        split = f"The validation split is {inline_code(config.data.validation_split)} of the data set."
    elif "validation_fraction" in manifest.recipe:
        split = (
            f"The validation split is {config.data.validation_fraction:.4g} of the text, held out before training: "
            "the end of a single document, or whole documents drawn with a seed."
        )
    else:  # prepared by nanoGPT
        split = "The validation split is part of the data."
    if manifest.validation.assistant_tokens:
        return f"""{table}

Measured at step {state.evaluated_step:,}, over {result.tokens:,} of the {manifest.validation.assistant_tokens:,} tokens
in answers of the validation split. Conversations are cut at {config.data.block_size:,} tokens and do not see each
other.
The loss is the mean cross-entropy of the answers' tokens and perplexity its exponential; bits per byte divide by the
answers' bytes.

{split.replace("of the text", "of the conversations")}"""
    return f"""{table}

Measured at step {state.evaluated_step:,}, over {result.tokens:,} of the {manifest.validation.tokens:,} tokens of the
validation split, in consecutive windows of {config.data.block_size:,} tokens. Every token counts once and sees only its
window. The loss is the mean cross-entropy and perplexity its exponential; bits per byte divide by the bytes of the
text, which makes tokenizers comparable.

{split}"""


def _limits(config: Config, model_config: PreTrainedConfig) -> str:
    answers = has_conversations(config.data)
    purpose = (
        "answers in the style of its training conversations" if answers else "continues text like its training text"
    )
    lines = [
        f"The model {purpose}. Its output can be false, offensive or unsafe.",
        f"Its context is {model_config.max_position_embeddings:,} tokens.",
        "It was evaluated only on text from the source of its training text.",
    ]
    if config.data.tokenizer == "char":
        lines.append("Its tokenizer has only the characters of its training text.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(licence: str | None, base_model: str | None) -> str:
    sentences = [f"{inline_code(licence)}, as stated by the author of the run." if licence else "Not stated."]
    if base_model:
        sentences.append(f"The terms of {inline_code(base_model)} apply as well.")
    return " ".join([*sentences, "The terms of the training text are not recorded here."])


def _card(
    name: str,
    model_config: PreTrainedConfig,
    origin: str,
    metadata: ModelCardData,
    sections: list[tuple[str, str]],
    adapter_rank: int | None = None,
) -> str:
    architecture = architecture_of(model_config)
    sizes = (
        f"{architecture.title} with {count_parameters(model_config):,} parameters ({model_config.num_hidden_layers} "
        f"layers, {model_config.num_attention_heads} heads,\n{model_config.hidden_size} wide, "
        f"{model_config.max_position_embeddings} positions)"
    )
    if adapter_rank:
        what, kind = f"A LoRA adapter of rank {adapter_rank} for a {sizes}", "lora"
        format_note = "An adapter in the format of peft, which also loads the base model."
        library, loader = "peft", "AutoPeftModelForCausalLM"
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    else:
        what, kind = f"A {sizes}", architecture.name
        format_note = f"A standard {architecture.title} checkpoint; transformers loads it without other code."
        library, loader = "transformers", "AutoModelForCausalLM"
        imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    metadata.library_name, metadata.tags = library, [kind, "nanogpt_hf"]
    metadata.pipeline_tag = "text-generation"
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)
    return redact(f"""---
{metadata.to_yaml()}
---

# {escape(name)}

{what}, {origin}.

## How to load

{format_note}

```python
{imports}

model = {loader}.from_pretrained("{PATH_PLACEHOLDER}")
tokenizer = AutoTokenizer.from_pretrained("{PATH_PLACEHOLDER}")
```

{body}
""")
