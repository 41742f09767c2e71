"""Write the model card (README.md of a model folder): training, evaluation, limits, recipe.

No text of a run becomes markup in it.
"""

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import has_conversations, is_mixture, source_text, sources_of
from nanogpt_hf.data.blocks import Interleave
from nanogpt_hf.data.files import BUILT_IN
from nanogpt_hf.data.manifest import Manifest, MixedManifest, PreparedSource
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.runs.machine import code_version, versions
from nanogpt_hf.runs.redact import redact
from nanogpt_hf.runs.state import TrainState

PLACEHOLDER = "path/to/this/folder"  # in the example; a push replaces it by the repository
_TEMPLATE = Path(__file__).with_name("card.md")


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

    `state` is the training state when it was saved, `machine` one line about the hardware,
    `base_model` the Hub id or name of the model that fine-tuning started from.
    """
    results = _eval_results(config, manifest, state)
    sources = _sources(config, manifest)
    metadata = ModelCardData(
        license=config.hub.license,
        base_model=base_model,
        datasets=[s.data.one_source for s in sources if _is_on_hub(s.data, s.manifest)] or None,
        model_name=config.name if results else None,
        eval_results=results or None,
    )
    start = f"fine-tuned from {_code(base_model)}" if base_model else "trained from scratch"
    answers = "answers in the style of its training conversations"
    return _render(
        config.name,
        model_config,
        f"{start} on {_code(source_text(config.data))} with nanogpt_hf",
        metadata,
        config.lora.rank if adapter else None,
        training=_training(config, manifest, sources, state, machine),
        evaluation=_evaluation(config, manifest, state),
        does=answers if has_conversations(config.data) else "continues text like its training text",
        recipe=_fenced(config_to_yaml(config).rstrip(), "yaml"),
    )


def plain_card(
    name: str, model_config: PreTrainedConfig, origin: str, facts: dict[str, str] | None = None
) -> str:
    """The card of a model without a recipe: `origin` in words, and `facts` about its training."""
    return _render(name, model_config, origin, ModelCardData(), training=facts)


def _render(
    name: str,
    model_config: PreTrainedConfig,
    origin: str,
    metadata: ModelCardData,
    adapter_rank: int | None = None,
    **values: Any,
) -> str:
    architecture, context = architecture_of(model_config), model_config.max_position_embeddings
    what = (
        f"{architecture.title} with {count_parameters(model_config):,} parameters "
        f"({model_config.num_hidden_layers} layers, {model_config.num_attention_heads} heads, "
        f"{model_config.hidden_size} wide, {context} positions)"
    )
    how = f"A standard {architecture.title} checkpoint; transformers loads it without other code."
    metadata.library_name, loader, tag = "transformers", "AutoModelForCausalLM", architecture.name
    if adapter_rank:
        what = f"LoRA adapter of rank {adapter_rank} for a {what}"
        how = "An adapter in the format of peft, which also loads the base model."
        metadata.library_name, loader, tag = "peft", "AutoPeftModelForCausalLM", "lora"
    metadata.tags, metadata.pipeline_tag = [tag, "nanogpt_hf"], "text-generation"
    values |= {"what": f"A {what}", "how": how, "loader": loader, "placeholder": PLACEHOLDER}
    values |= {"name": name, "origin": origin, "context": context}
    values |= {"escape": escape, "table": _table, "code": _code}
    card = ModelCard.from_template(metadata, template_path=str(_TEMPLATE), **values)
    return redact(f"{card}\n")


def _sources(config: Config, manifest: Manifest) -> tuple[PreparedSource, ...]:
    """The sources of a mixture, or the only one."""
    if isinstance(manifest, MixedManifest):
        return manifest.sources
    return tuple(PreparedSource(*source, manifest) for source in sources_of(config.data))


def _is_on_hub(data: DataSection, manifest: Manifest) -> bool:
    """Whether the text is a data set on the Hub.

    The revision of files and downloads is a checksum.
    """
    is_local = data.source in BUILT_IN or manifest.revision.startswith("sha256:")
    return not is_mixture(data) and not is_local


def _eval_results(config: Config, manifest: Manifest, state: TrainState) -> list[EvalResult]:
    """The validation loss for the Hub's model-index; empty if there is no finite loss."""
    if state.evaluation is None or not math.isfinite(state.evaluation.loss):
        return []
    source, data = source_text(config.data), config.data
    facts: dict[str, Any] = {"dataset_split": "held out"}
    if _is_on_hub(data, manifest):
        facts = {
            "dataset_config": data.config,
            "dataset_split": data.validation_split or f"held out of {data.split}",
            "dataset_revision": manifest.revision if manifest.revision != "unknown" else None,
        }
    values = {
        ("loss", "validation loss, nats per token"): state.evaluation.loss,
        ("perplexity", "validation perplexity, per token"): state.evaluation.perplexity,
        ("bits_per_byte", "validation bits per byte"): state.evaluation.bits_per_byte,
    }
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=source,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 4),
            **facts,
        )
        for (kind, name), value in values.items()
    ]


def _training(
    config: Config,
    manifest: Manifest,
    sources: tuple[PreparedSource, ...],
    state: TrainState,
    machine: str,
) -> dict[str, str]:
    data, optim, split = config.data, config.optim, manifest.train
    samples = state.tokens // data.block_size
    counts = Interleave([s.weight for s in sources]).counts(samples).tolist()
    facts = {}
    for source, count in zip(sources, counts, strict=True):
        text = f"{source_text(source.data)}, revision {source.manifest.revision}"
        if len(sources) > 1:
            text += f"; {count / max(1, samples):.2%} of the sequences"
        facts[f"data: {source.name}" if len(sources) > 1 else "data"] = text
    size, seen = f"{split.tokens:,} tokens in {split.documents:,} documents", f"{state.tokens:,}"
    if not split.tokens:
        size = f"{split.documents:,} questions of the task {config.rl.task}"
        seen += f", padding included; {config.rl.samples} completions per question"
    elif split.assistant_tokens:
        size += f", {split.assistant_tokens:,} of them in answers"
        seen += f" ({data.packing}), padding included"
    else:
        seen += f" ({state.tokens / split.tokens:.2f} times the training split)"
    end = "" if optim.schedule == "constant" else f" to {optim.min_learning_rate:g}"
    packages = {name: version for name, version in versions().items() if name != "nanogpt_hf"}
    return facts | {
        "tokenizer": f"{data.tokenizer}, {manifest.vocab_size:,} tokens",
        "training split": size,
        "tokens seen": seen,
        "steps": f"{state.step:,} of {config.train.max_steps:,}",
        "optimizer": kind_of(optim).describe(optim),
        "learning rate": f"{optim.learning_rate:g}, {optim.schedule}{end}",
        "trained on": f"{machine} (when this was saved; a run can change machines)",
        "software": ", ".join(
            [f"nanogpt_hf {code_version()}", *(f"{name} {v}" for name, v in packages.items())]
        ),
        "time": f"{timedelta(seconds=round(state.seconds))} (h:mm:ss) of training and evaluation",
    }


def _evaluation(config: Config, manifest: Manifest, state: TrainState) -> dict[str, str]:
    if not manifest.train.tokens and state.best_loss is not None:
        questions = min(config.rl.eval_questions, manifest.validation.documents)
        reward = f"{-state.best_loss:.4f} on {questions:,} held-out questions"
        return {"mean reward": f"{reward} (step {state.best_step:,})"}
    if state.evaluation is None:
        return {}
    result, split = state.evaluation, config.data.validation_split
    kind = " in answers" if manifest.validation.assistant_tokens else ""
    total = manifest.validation.assistant_tokens or manifest.validation.tokens
    where = f"of the split {split}" if split else "held out"
    if isinstance(manifest, MixedManifest):
        where = "held out of the sources, weighted by their shares of the training sequences"
    return {
        "validation loss": f"{format_number(result.loss, 4)} nats per token",
        "perplexity": f"{format_number(result.perplexity, 2)} per token",
        "bits per byte": format_number(result.bits_per_byte, 4),
        "measured at step": f"{state.evaluated_step:,}",
        "measured on": f"{result.tokens:,} of the {total:,} tokens{kind} {where}",
        "context window": f"{config.data.block_size:,} tokens",
    }


def escape(value: str) -> str:
    """Escape a string for one line of Markdown: no HTML, link, image or end of a table cell."""
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(value.split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _table(facts: dict[str, str]) -> str:
    rows = [f"| {escape(name)} | {escape(value)} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _ticks(text: str, at_least: int) -> str:
    """More backticks than `text` has in a row, so that it cannot end the code between them."""
    return "`" * max(at_least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _code(value: str) -> str:
    line = " ".join(value.split())
    ticks = _ticks(line, 1)
    return f"{ticks} {line} {ticks}" if "`" in line else f"{ticks}{line}{ticks}"


def _fenced(text: str, language: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{text}\n{ticks}"
