"""Write the model card (README.md of a model folder): training, evaluation, limits, recipe.

No text of a run becomes markup in it.
"""

import functools
import html
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Template
from transformers import PreTrainedConfig

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import chats, source_text, sources_of
from nanogpt_hf.data.built_in import BUILT_IN
from nanogpt_hf.data.manifest import Manifest, PreparedSource
from nanogpt_hf.formatting import format_number
from nanogpt_hf.methods.method import VALIDATION_LOSS
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.runs.files import redact
from nanogpt_hf.runs.provenance import code_version, versions
from nanogpt_hf.runs.state import TrainState

# Figures of `evaluate` that the Hub shows, and their names there.
_TEXT_FIGURES = {"loss": "Loss", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
# The model's place in the examples of a card; a push replaces it by the repository.
PLACEHOLDER = "path/to/this/folder"


def model_card(
    config: Config,
    model_config: PreTrainedConfig,
    manifest: Manifest,
    state: TrainState,
    machine: str,
    base_model: str | None = None,
    adapter: bool = False,
    name: str | None = None,
) -> str:
    """Card of a trained model, or of a LoRA adapter, with the metadata that the Hub reads. Its
    title is `name`, by default the recipe's.

    `state` is the training state when it was saved, `machine` one line about the hardware,
    `base_model` the Hub id or name of the model that fine-tuning started from.
    """
    sources = manifest.sources or tuple(
        PreparedSource(*source, manifest) for source in sources_of(config.data)
    )
    start = f"fine-tuned from {base_model}" if base_model else "trained from scratch"
    versioned = versions() | {"nanogpt_hf": code_version()}
    architecture = architecture_of(model_config)
    metadata = ModelCardData(
        license=config.hub.license,
        base_model=base_model,
        datasets=_datasets_on_hub(sources) or None,
        library_name="peft" if adapter else "transformers",
        tags=["lora" if adapter else architecture.name, "nanogpt_hf"],
        pipeline_tag="text-generation",
    )
    text = _template().render(
        card_data=metadata.to_yaml(),
        **metadata.to_dict(),
        placeholder=PLACEHOLDER,
        escape=escape,
        n="{:,}".format,
        number=format_number,
        name=name or config.name,
        title=architecture.title,
        is_standard=architecture.is_standard(model_config),
        origin=f"{start} on {source_text(config.data)} with nanogpt_hf",
        model=model_config,
        parameters=count_parameters(model_config),
        adapter=adapter,
        config=config,
        manifest=manifest,
        state=state,
        machine=machine,
        sources=sources,
        source_text=source_text,
        optimizer=kind_of(config.optim).describe(config.optim),
        schedule_ends=SCHEDULES[config.optim.schedule].ends,
        software=", ".join(f"{name} {version}" for name, version in versioned.items()),
        time=timedelta(seconds=round(state.seconds)),
        chats=chats(config.data),
        recipe=_fenced(config_to_yaml(config)),
        **_score(config, state),
    )
    return redact(f"{ModelCard(text)}\n")


@functools.cache  # it takes a tenth of a second to compile
def _template() -> Template:
    return Template(Path(__file__).with_name("card.md").read_text("utf-8"))


def _datasets_on_hub(sources: tuple[PreparedSource, ...]) -> list[str]:
    """Ids of sources that are datasets of the Hub, which links them to the model."""
    found = []
    for source in sources:
        # The revision of files is a checksum, the revision of a dataset a commit.
        is_file = source.manifest.revision.startswith("sha256:")
        if not is_file and source.data.source not in BUILT_IN:
            found.append(source.data.one_source)
    return found


_PYTHON = """```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```"""
# Library that opens a model folder -> how.
_HOW_TO_LOAD = {
    "transformers": _PYTHON.format(
        library="transformers", loader="AutoModelForCausalLM", place=PLACEHOLDER
    ),
    "peft": _PYTHON.format(library="peft", loader="AutoPeftModelForCausalLM", place=PLACEHOLDER),
    "gguf": "`model.gguf` is for llama.cpp and what is built on it: `llama-cli -m model.gguf`.",
    "onnx": "`model.onnx` takes `input_ids` (batch, sequence) and gives `logits`, for onnxruntime.",
}


def card_without_run(config: PreTrainedConfig | None, origin: str, library: str) -> str:
    """Card of a model or adapter whose training is not known. `origin` states where it is
    from, `library` is what opens it.
    """
    title = "Language model"
    name = None
    sizes = ""
    if config is not None:
        architecture = architecture_of(config)
        title = architecture.title
        name = architecture.name
        sizes = (
            f" with {count_parameters(config):,} parameters ({config.num_hidden_layers} layers, "
            f"{config.hidden_size} wide, {config.max_position_embeddings:,} positions, "
            f"{config.vocab_size:,} tokens)"
        )
    metadata = ModelCardData(
        library_name=library,
        tags=[tag for tag in (name, "nanogpt_hf") if tag],
        pipeline_tag="text-generation",
    )
    kind = "An adapter for a language model" if library == "peft" else f"A {title}{sizes}"
    return redact(
        f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\n{kind}, {escape(origin)}.\n\n"
        f"## How to load\n\n{_HOW_TO_LOAD[library]}\n\n## License\n\nNot stated. How it was "
        "trained is not recorded here, and the terms of what it was made from apply.\n"
    )


def card_of_export(card: str, library: str) -> str:
    """Turn the `card` of a model into the card of its export, which `library` opens and which has
    any adapter merged in.
    """
    before = "peft" if "\nlibrary_name: peft\n" in card else "transformers"
    if before == library:
        return card
    card = card.replace(f"\nlibrary_name: {before}\n", f"\nlibrary_name: {library}\n")
    card = re.sub(
        r"(?m)^A LoRA adapter of rank (\d+) for a ",
        r"Merged with a LoRA adapter of rank \1: a ",
        card,
    )
    # The card's own section, up to the end of its example, is replaced.
    section = f"## How to load\n\n{_HOW_TO_LOAD[library]}\n"
    changed, count = re.subn(r"(?s)## How to load\n.*?\n```\n", lambda _: section, card, count=1)
    return changed if count else f"{card.rstrip()}\n\n{section}"


def card_of_step(card: str, config: Config, state: TrainState) -> str:
    """Turn the card of a run's best or last model into the card of its model at the step of
    `state`.
    """
    rows = {
        "tokens seen": _tokens_seen(card, state),
        "steps": f"{state.step:,} of {config.train.max_steps:,}",
        "time": f"{timedelta(seconds=round(state.seconds))} (h:mm:ss) of training and evaluation",
    }
    # An evaluation of an earlier step says nothing about these weights.
    is_measured = state.evaluated_step == state.step
    score = _score(config, state)
    if is_measured and score["value"] is not None:
        rows[score["score"]] = (
            f"{format_number(score['value'], 4)} on held-out {score['noun']} (step {state.step:,})"
        )
    elif is_measured and (loss := state.evaluation):
        rows |= {
            "validation loss": f"{format_number(loss.loss, 4)} nats per token",
            "perplexity": f"{format_number(loss.perplexity, 2)} per token",
            "bits per byte": format_number(loss.bits_per_byte, 4),
            "measured at step": f"{state.step:,}",
        }
        card = re.sub(r"(?m)^\| measured on \| [\d,]+", f"| measured on | {loss.tokens:,}", card)
    for name, value in rows.items():
        line = f"| {name} | {value} |"
        card = re.sub(rf"(?m)^\| {name} \| .*$", lambda _, line=line: line, card, count=1)
    head, title, rest = card.partition("\n## Evaluation\n\n")
    section, limits, rest = rest.partition("\n## Limits\n")
    # Sentences before the table are about other weights.
    table = "Not measured.\n"
    if is_measured and "| | |" in section:
        table = section[section.find("| | |") :]
    return f"{head}{title}{table}{limits}{rest}" if limits else card


def _tokens_seen(card: str, state: TrainState) -> str:
    """The row of a card with the tokens that were seen, as the card has it."""
    seen = f"{state.tokens:,}"
    if re.search(r"(?m)^\| tokens seen \| [\d,]+, padding included \|$", card):
        return f"{seen}, padding included"
    if split := re.search(r"(?m)^\| training split \| .* ([\d,]+) tokens \|$", card):
        times = state.tokens / max(1, int(split[1].replace(",", "")))
        return f"{seen} ({format_number(times, 2)} times the training split)"
    return seen


def _score(config: Config, state: TrainState) -> dict[str, Any]:
    """Name the documents of a method, and give the score of the weights. For text the card has the
    evaluation instead.
    """
    score = method_of(config).score
    if score is VALIDATION_LOSS:
        return {"noun": "documents", "value": None}
    # Such as `mean reward on held-out questions`.
    name, _, noun = score.label.partition(" on held-out ")
    if config.align.loss:
        name = f"{config.align.loss} {name}"
    value = state.last_score
    if value is not None and score.is_rising:
        # The lowest score is the best.
        value = -value
    return {"noun": noun or "documents", "score": name, "value": value}


def escape(value: str) -> str:
    """Escape a string for one line of Markdown: no HTML, link, image or end of a table cell."""
    # White space first, so that no line break ends a table or a heading.
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(value.split()))
    return html.escape(line, quote=False)


def _fenced(text: str) -> str:
    """A block of YAML, with more backticks than the text has in a row."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}yaml\n{text}{ticks}"


def card_with_results(card: str, name: str, results: dict[str, Any]) -> str:
    """A card with the figures of `evaluate --json` as its model-index, which the Hub shows.

    `name` is the model's. The entries have the form that `evaluate.push_to_hub` writes. Raises
    ValueError if `results` has no figures of a text or of metrics.
    """
    found: list[EvalResult] = []

    def add(figures: dict[str, Any], data: str, names: dict[str, str]) -> None:
        for key, title in names.items():
            value = figures.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=data,
                        dataset_name=data,
                        dataset_revision=figures.get("data_revision") or figures.get("revision"),
                        metric_type=key,
                        metric_name=title,
                        metric_value=value,
                    )
                )

    if text := results.get("text"):
        # A path of this machine says nothing to others, its last part does.
        add(text, Path(redact(text["data"])).name, _TEXT_FIGURES)
    if metrics := results.get("metrics"):
        figures = metrics["figures"]
        names = {key: key for key in figures}
        add(figures | {"revision": metrics["revision"]}, Path(redact(metrics["data"])).name, names)
    if not found:
        raise ValueError("it has no figures of a text or of metrics; write it by evaluate --json")
    page = ModelCard(card)
    data: Any = page.data
    data.model_name = name
    data.eval_results = found
    return str(page)
