"""The model card: what a model is, how it was made and measured, how to open it, what it is not."""

import math
import re
from datetime import timedelta

from huggingface_hub import EvalResult, ModelCardData

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.data.source import PYTHON_DOCS
from nanogpt_hf.export.hub import PATH_PLACEHOLDER
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.runs.machine import code_version, versions
from nanogpt_hf.runs.redact import redact
from nanogpt_hf.runs.state import TrainState


def model_card(
    config: Config,
    model_config: GPTConfig,
    manifest: Manifest,
    state: TrainState,
    machine: str,
    base_model: str | None = None,
    adapter: bool = False,
) -> str:
    """README.md of a model folder, or of a LoRA adapter's, with the front matter that the Hub reads.

    `state` is where the training stood, `machine` one line about where it ran, `base_model` the Hub id or name of the
    model that it began from, if any.
    """
    source, results = config.data.source, _eval_results(config, manifest, state)
    metadata = ModelCardData(
        license=config.hub.license,
        base_model=base_model,
        datasets=[config.data.source] if _is_on_hub(config, manifest) else None,
        model_name=config.name if results else None,
        eval_results=results or None,
    )
    began = f"fine-tuned from {_code(base_model)}" if base_model else "trained from scratch"
    origin = f"{began} on {_code(source)} with nanogpt_hf"
    sections = [
        ("Training", _table(_training(config, manifest, state, machine))),
        ("Evaluation", _evaluation(config, manifest, state)),
        ("Limits", _limits(config, model_config)),
        ("Licence", _licence(config.hub.license, base_model)),
        ("Recipe", _fenced(config_to_yaml(config).rstrip(), "yaml")),
    ]
    return _card(config.name, model_config, origin, metadata, sections, config.lora.rank if adapter else None)


def imported_card(name: str, model_config: GPTConfig, facts: dict[str, str]) -> str:
    """README.md of a model that nanoGPT trained: there is no recipe of ours to show."""
    origin = "trained by nanoGPT and imported with nanogpt_hf"
    sections = [("Training", _table(facts)), ("Licence", _licence(None, None))]
    return _card(name, model_config, origin, ModelCardData(), sections)


def minimal_card(name: str, model_config: GPTConfig) -> str:
    """README.md of a model of which nothing is known but what it is."""
    sections = [("Licence", _licence(None, None))]
    return _card(name, model_config, "whose training is not recorded here", ModelCardData(), sections)


def _is_on_hub(config: Config, manifest: Manifest) -> bool:
    """Whether the text is a data set on the Hub; of files and downloads the revision is a checksum."""
    return config.data.source != PYTHON_DOCS and not manifest.revision.startswith("sha256:")


def _eval_results(config: Config, manifest: Manifest, state: TrainState) -> list[EvalResult]:
    """The validation loss as the Hub's model-index wants it; none where there is no finite one."""
    if state.evaluation is None or not math.isfinite(state.evaluation.loss):
        return []
    source = config.data.source
    values = {
        ("loss", "validation loss, nats a token"): state.evaluation.loss,
        ("perplexity", "validation perplexity, a token"): state.evaluation.perplexity,
        ("bits_per_byte", "validation bits a byte"): state.evaluation.bits_per_byte,
    }
    on_hub = _is_on_hub(config, manifest)
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


def _training(config: Config, manifest: Manifest, state: TrainState, machine: str) -> dict[str, str]:
    data, optim, train = config.data, config.optim, config.train
    packages = {name: version for name, version in versions().items() if name != "nanogpt_hf"}
    split = f"{manifest.train.tokens:,} tokens in {manifest.train.documents:,} documents"
    seen = f"{state.tokens:,} ({state.tokens / manifest.train.tokens:.2f} times the training split)"
    if data.format == "chat":
        answered = f"{manifest.train.answered:,}"
        split = f"{manifest.train.tokens:,} tokens in {manifest.train.documents:,} conversations, {answered} in answers"
        seen = f"{state.tokens:,} positions ({data.packing}), those that nothing fills included"
    splits = f", configuration {data.config}" * bool(data.config) + f", split {data.split}"
    rate = f"{optim.learning_rate:g}, {optim.schedule}"
    if optim.schedule != "constant":
        rate += f" to {optim.min_learning_rate:g}"
    return {
        "data": data.source + (splits if _is_on_hub(config, manifest) else ""),
        "data revision": manifest.revision,
        "tokenizer": f"{data.tokenizer}, {manifest.vocab_size:,} tokens",
        "training split": split,
        "tokens seen": seen,
        "steps": f"{state.step:,} of {train.max_steps:,}",
        "tokens a step": f"{train.tokens_per_step:,}, in sequences of {data.block_size:,}",
        "optimizer": f"AdamW, betas {optim.beta1:g} and {optim.beta2:g}, weight decay {optim.weight_decay:g}"
        + ", 8-bit state (torchao)" * (optim.state == "8bit"),
        "learning rate": f"{rate}, after {optim.warmup_steps:,} steps of warm-up",
        "gradient clipping": f"norm {optim.max_grad_norm:g}" if optim.max_grad_norm else "none",
        "dropout": f"{config.model.dropout:g}",
        "seed": str(train.seed),
        "trained on": f"{machine} (where this was saved; a run may move)",
        "software": ", ".join([f"nanogpt_hf {code_version()}", *(f"{name} {v}" for name, v in packages.items())]),
        "time": f"{timedelta(seconds=round(state.seconds))} (h:mm:ss) of training and evaluation",
    }


def _evaluation(config: Config, manifest: Manifest, state: TrainState) -> str:
    if state.evaluation is None:
        return "Not measured."
    result = state.evaluation
    table = _table(
        {
            "validation loss": f"{format_number(result.loss, 4)} nats a token",
            "perplexity": f"{format_number(result.perplexity, 2)} a token",
            "bits per byte": format_number(result.bits_per_byte, 4),
        }
    )
    if config.data.validation_split:
        split = f"The validation split is {_code(config.data.validation_split)} of the data set."
    elif "validation_fraction" in manifest.recipe:
        split = (
            f"The validation split is {config.data.validation_fraction:.4g} of the text, held out before training: a "
            "lone document's tail, else whole documents drawn by a seed."
        )
    else:  # tokens made by nanoGPT
        split = "The validation split came with the data."
    if config.data.format == "chat":
        return f"""{table}

Measured at step {state.evaluated_step:,}, over {result.tokens:,} of the {manifest.validation.answered:,} tokens in
answers of the validation split, conversations cut at {config.data.block_size:,} tokens; none sees another. The loss is
the mean cross-entropy of the answers' tokens, perplexity its exponential; bits per byte divide by the answers' bytes.

{split.replace("of the text", "of the conversations")}"""
    return f"""{table}

Measured at step {state.evaluated_step:,}, over {result.tokens:,} of the {manifest.validation.tokens:,} tokens of the
validation split, in windows of {config.data.block_size:,} tokens that lie end to end; every token counts once and sees
only its own window. The loss is the mean cross-entropy, perplexity its exponential; bits per byte divide by the bytes
of the text, and so compare across tokenizers.

{split}"""


def _limits(config: Config, model_config: GPTConfig) -> str:
    does = "answers as its training conversations do" if config.data.format == "chat" else None
    lines = [
        f"It {does or 'continues text as its training text does'}: what it writes need not be true, kind or safe to "
        "follow.",
        f"It sees {model_config.n_positions:,} tokens at most.",
        "It was measured on text of the same source as it was trained on, and on nothing else.",
    ]
    if config.data.tokenizer == "char":
        lines.append("Its tokenizer knows the characters of its training text and no others.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(licence: str | None, base_model: str | None) -> str:
    said = f"{_code(licence)}, as stated by who trained it." if licence else "Not stated by who trained it."
    base = f" The terms of {_code(base_model)} apply as well." if base_model else ""
    return f"{said}{base} The terms of the training text are not recorded here."


def _table(facts: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {_text(name)} | {_text(value)} |" for name, value in facts.items())])


def _text(value: str) -> str:
    """A string of the recipe or machine as one line of plain text in Markdown: no HTML, link, image or cell ends."""
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(value.split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(value: str) -> str:
    """A string as code within a line. More backticks around it than are in it, so it cannot end the code."""
    line = " ".join(value.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " * ("`" in line)
    return f"{ticks}{space}{line}{space}{ticks}"


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


def _card(
    name: str,
    model_config: GPTConfig,
    origin: str,
    metadata: ModelCardData,
    sections: list[tuple[str, str]],
    adapter_rank: int | None = None,
) -> str:
    sizes = (
        f"GPT-2 with {count_parameters(model_config):,} parameters ({model_config.n_layer} layers, "
        f"{model_config.n_head} heads,\n{model_config.n_embd} wide, {model_config.n_positions} positions)"
    )
    if adapter_rank:
        what, kind = f"A LoRA adapter of rank {adapter_rank} for a {sizes}", "lora"
        opens = "It is an adapter in peft's format: peft opens it, and with it the model that it was trained on."
        library, loader = "peft", "AutoPeftModelForCausalLM"
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    else:
        what, kind = f"A {sizes}", "gpt2"
        opens = "It is a plain GPT-2 checkpoint: transformers opens it without any other code."
        library, loader = "transformers", "AutoModelForCausalLM"
        imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    metadata.library_name, metadata.tags = library, [kind, "nanogpt_hf"]
    metadata.pipeline_tag = "text-generation"
    rest = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)
    return redact(f"""---
{metadata.to_yaml()}
---

# {_text(name)}

{what}, {origin}.

## How to load

{opens}

```python
{imports}

model = {loader}.from_pretrained("{PATH_PLACEHOLDER}")
tokenizer = AutoTokenizer.from_pretrained("{PATH_PLACEHOLDER}")
```

{rest}
""")
