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
from nanogpt_hf.data.files import BUILT_IN
from nanogpt_hf.data.manifest import Manifest, PreparedSource
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.runs.machine import code_version, versions
from nanogpt_hf.runs.redact import redact
from nanogpt_hf.runs.state import TrainState

PLACEHOLDER = "path/to/this/folder"  # in the example; a push replaces it by the repository


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
    sources = manifest.sources or tuple(
        PreparedSource(*source, manifest) for source in sources_of(config.data)
    )
    results = _eval_results(config, manifest, state)
    metadata = ModelCardData(
        license=config.hub.license,
        base_model=base_model,
        datasets=[s.data.one_source for s in sources if _is_on_hub(s.data, s.manifest)] or None,
        model_name=config.name if results else None,
        eval_results=results or None,
    )
    start = f"fine-tuned from {_code(base_model)}" if base_model else "trained from scratch"
    origin = f"{start} on {_code(source_text(config.data))} with nanogpt_hf"
    packages = {"nanogpt_hf": code_version()} | {
        name: version for name, version in versions().items() if name != "nanogpt_hf"
    }
    return _render(
        config.name,
        model_config,
        origin,
        metadata,
        adapter=adapter,
        config=config,
        manifest=manifest,
        state=state,
        machine=machine,
        sources=[
            (
                f"data: {source.name}" if len(sources) > 1 else "data",
                f"{source_text(source.data)}, revision {source.manifest.revision}",
            )
            for source in sources
        ],
        optimizer=kind_of(config.optim).describe(config.optim),
        software=", ".join(f"{name} {version}" for name, version in packages.items()),
        time=timedelta(seconds=round(state.seconds)),
        chats=has_conversations(config.data),
        recipe=_fenced(config_to_yaml(config).rstrip(), "yaml"),
        **_sizes(config, manifest, state),
    )


def plain_card(
    name: str, model_config: PreTrainedConfig, origin: str, facts: dict[str, str] | None = None
) -> str:
    """The card of a model without a recipe: `origin` in words, and `facts` about its training."""
    return _render(name, model_config, origin, ModelCardData(), facts=facts)


def _render(
    name: str,
    model: PreTrainedConfig,
    origin: str,
    metadata: ModelCardData,
    adapter: bool = False,
    **values: Any,
) -> str:
    architecture = architecture_of(model)
    metadata.library_name = "peft" if adapter else "transformers"
    metadata.tags = ["lora" if adapter else architecture.name, "nanogpt_hf"]
    metadata.pipeline_tag = "text-generation"
    values |= {"escape": escape, "code": _code, "n": "{:,}".format, "number": format_number}
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("card.md")),
        name=name,
        model=model,
        origin=origin,
        adapter=adapter,
        title=architecture.title,
        parameters=count_parameters(model),
        placeholder=PLACEHOLDER,
        **values,
    )
    return redact(f"{card}\n")


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
    facts |= {"task_type": "text-generation", "dataset_type": source, "dataset_name": source}
    return [
        EvalResult(
            metric_type=kind,
            metric_name=f"validation {name}",
            metric_value=round(getattr(state.evaluation, kind), 4),
            **facts,
        )
        for kind, name in (
            ("loss", "loss, nats per token"),
            ("perplexity", "perplexity, per token"),
            ("bits_per_byte", "bits per byte"),
        )
    ]


def _sizes(config: Config, manifest: Manifest, state: TrainState) -> dict[str, str]:
    """What was trained and evaluated on, which depends on the kind of data."""
    train, held_out = manifest.train, manifest.validation
    if config.align.loss:
        noun = "labeled answers" if config.align.loss == "kto" else "preference pairs"
        texts = {
            "split": f"{train.documents:,} {noun}, loss {config.align.loss}",
            "seen": f"; each of the {noun} counts as {config.data.block_size:,}",
        }
        if state.best_loss is not None:
            texts["best"] = f"{state.best_loss:.4f} on held-out {noun.split()[1]}"
        return texts | {"score": "loss"}
    if not train.tokens:
        texts = {
            "split": f"{train.documents:,} questions of the task {config.rl.task}",
            "seen": f", padding included; {config.rl.samples} completions per question",
        }
        if state.best_loss is not None:
            texts["best"] = f"{-state.best_loss:.4f} on held-out questions"
        return texts | {"score": "mean reward"}
    split = f"{train.tokens:,} tokens in {train.documents:,} documents"
    seen = f" ({state.tokens / train.tokens:.2f} times the training split)"
    measured_on = f"{held_out.tokens:,} tokens"
    if train.assistant_tokens:
        split += f", {train.assistant_tokens:,} of them in answers"
        seen = f" ({config.data.packing}), padding included"
    if held_out.assistant_tokens:
        measured_on = f"{held_out.assistant_tokens:,} tokens in answers"
    where = "held out"
    if manifest.sources:
        where = "held out of the sources, weighted by their shares of the training sequences"
    elif config.data.validation_split:
        where = f"of the split {config.data.validation_split}"
    return {"split": split, "seen": seen, "measured_on": f"{measured_on} {where}"}


def escape(value: str) -> str:
    """Escape a string for one line of Markdown: no HTML, link, image or end of a table cell."""
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(value.split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _ticks(text: str, at_least: int) -> str:
    """More backticks than `text` has in a row, so that it cannot end the code between them."""
    return "`" * max(at_least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _code(value: str) -> str:
    line = " ".join(value.split())
    ticks, space = _ticks(line, 1), " " if "`" in line else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def _fenced(text: str, language: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{text}\n{ticks}"
