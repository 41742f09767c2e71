"""The table of evaluations that `evaluate` and training measure, and the options of `evaluate`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import learns_parts
from nanogpt_hf.config.stated import Overrides
from nanogpt_hf.config.values import convert
from nanogpt_hf.data.manifest import Manifest, read_manifest
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import Evaluation, Measure, Option
from nanogpt_hf.evaluation.core import CoreScore
from nanogpt_hf.evaluation.metrics import AnswerMetrics
from nanogpt_hf.evaluation.questions import QuestionAnswers
from nanogpt_hf.evaluation.samples import Samples
from nanogpt_hf.evaluation.tasks import LmEvalTasks
from nanogpt_hf.evaluation.text import TextLoss
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In the order in which their results are printed.
EVALUATIONS: tuple[Evaluation, ...] = (
    TextLoss(),
    LmEvalTasks(),
    QuestionAnswers(),
    AnswerMetrics(),
    CoreScore(),
    Samples(),
)
# Knobs that the source of a text or of questions may need, with their meaning.
_SOURCE_KNOBS = {
    f"data.{name}": KNOBS[f"data.{name}"].meaning
    for name in ("config", "split", "revision", "text_column", "sha256", "max_bad_rows")
}
_SOURCE_KNOBS["data.split"] = (
    "split of a Hub data set, which must be named, or of prepared data (default there: validation)"
)


def load_training_evaluations(
    config: Config, tokenizer: "PreTrainedTokenizerBase"
) -> list[Measure]:
    """Load what every evaluation of a run measures, in addition to the validation loss."""
    return [
        evaluation.load_for_training(config, tokenizer)
        for evaluation in EVALUATIONS
        if evaluation.knob and get_value(config, evaluation.knob)
    ]


def _options() -> list[Option]:
    """The options of all evaluations, each once: two evaluations may share one."""
    return list(dict.fromkeys(option for row in EVALUATIONS for option in row.options))


def add_options(parser: ArgumentParser) -> None:
    """Add the options of all evaluations, and a help text on the knobs of a source."""
    for option in _options():
        metavar = option.usage.partition(" ")[2]
        parser.add_argument(option.flag, metavar=metavar, type=option.kind, help=option.meaning)
    lines = (f"  --{name:<20} {meaning}" for name, meaning in _SOURCE_KNOBS.items())
    parser.epilog = "Options of the text:\n\n" + "\n".join(lines)


def asked_for(
    arguments: Namespace, overrides: Overrides
) -> tuple[list[Evaluation], dict[str, Any]]:
    """The evaluations that the options ask for, and the knobs of their source.

    Without any, a run that has learned texts is measured on its own validation split. Raises
    UserError for options that do not fit, before anything is loaded.
    """
    if not any(evaluation.wanted(arguments) for evaluation in EVALUATIONS):
        arguments.data = _own_text(arguments.model)
    wanted = [evaluation for evaluation in EVALUATIONS if evaluation.wanted(arguments)]
    if not wanted:
        ways = ", ".join(row.asked_by for row in EVALUATIONS if row.options)
        raise UserError(
            f"{program()} evaluate: {_without_own_text(arguments.model)}; give something to "
            f"measure: {ways}"
        )
    # An option of an evaluation that was not asked for would have no effect.
    for option in _options():
        rows = [row for row in EVALUATIONS if option in row.options]
        if option.given(arguments) is not None and not set(rows) & set(wanted):
            ways = " or ".join(row.asked_by for row in rows)
            raise UserError(f"{option.flag}: only with {ways}")
    for key, _ in overrides:
        if key not in _SOURCE_KNOBS:
            known = ", ".join(f"--{name}" for name in _SOURCE_KNOBS)
            raise UserError(
                f"{program()} evaluate: --{key}: not a knob of `evaluate`; it has {known}"
            )
    # The knobs describe one source. With two of them, it would be open which one is meant.
    sources = [option for option in _options() if option.names_source]
    named = [option for option in sources if option.given(arguments)]
    if overrides and len(named) != 1:
        flags = " or ".join(option.flag for option in sources)
        raise UserError(f"--{overrides[0][0]}: describes one source; give {flags}")
    # The values are text from the command line, and get the types of their knobs here.
    knobs = {}
    for key, value in overrides:
        try:
            knobs[key.removeprefix("data.")] = convert(KNOBS[key], value)
        except ValueError as error:
            raise UserError(f"--{key}: {error}") from None
    return wanted, knobs


def _own_text(model: str) -> str | None:
    """Return the folder of the prepared text that a run has learned; None for other models."""
    run = RunFolder(model)
    if not run.recipe.is_file():
        return None
    data = read_recipe(run).data
    manifest = read_manifest(Path(data.dir))
    if manifest is None or learns_parts(data):
        return None
    _check_own(run, manifest, data.dir)
    return data.dir


def _without_own_text(model: str) -> str:
    """Why a model is not measured on its own text."""
    run = RunFolder(model)
    if not run.path.exists():
        return f"{model}: no such folder here"
    if not run.recipe.is_file():
        return f"{model}: no run folder, and only a run knows its text"
    data = read_recipe(run).data
    if learns_parts(data):
        return f"{model}: learned a part of its data only, such as answers, so it has no text"
    return f"{model}: {data.dir} holds no text of its recipe"


def _check_own(run: RunFolder, manifest: Manifest, folder: str) -> None:
    """Raises UserError if prepared data is not what the run has learned: its validation split may
    hold what the run was trained on.
    """
    from nanogpt_hf.runs.provenance import read_starts

    recorded = [start["data"] for start in read_starts(run) if isinstance(start.get("data"), dict)]
    learned = recorded[-1] if recorded else {}
    now = manifest.content()
    # Tokens that other programs made have no digest; their revision identifies the files.
    keys = ("tokenizer_hash", "validation tokens", "validation sha256", "train sha256")
    keys += () if now["train sha256"] else ("revision",)
    changed = [key for key in keys if key in learned and learned[key] != now[key]]
    if changed:
        raise UserError(
            f"{run.path}: {folder} was prepared again since the run has learned it: another "
            f"{', '.join(changed)}; name a text by --data, or prepare the run's own in another "
            "folder, and name that by --data"
        )
