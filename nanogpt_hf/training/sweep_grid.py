"""The grid of a sweep: every combination of the values of its knobs, as the recipe of a run."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.load import check_knobs, unread_overrides
from nanogpt_hf.config.methods import NEXT_TOKEN, recipe_method_of
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import knob_text, sources_of
from nanogpt_hf.config.stated import Overrides, stated_knobs
from nanogpt_hf.config.values import convert, parse_flow_list
from nanogpt_hf.data.manifest import DECIDING_KNOBS
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.resolve import Resolved, defaults_of, resolve
from nanogpt_hf.program import program
from nanogpt_hf.runs.metrics import Score

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PREPARED_BY = tuple(f"data.{name}" for name in (*DECIDING_KNOBS, "sha256"))
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class GridRun:
    """One run of a grid: its folder's name, its values of the swept knobs, its knobs as texts, and
    its recipe as the command that trains it resolves it.
    """

    name: str
    values: Row
    overrides: Overrides
    command: str
    config: Config
    # The configuration of the model to start from; None from scratch.
    base: "PreTrainedConfig | None" = None


@dataclass(frozen=True)
class Sweep:
    """Runs of a grid over a recipe, below a folder."""

    recipe: str | None
    runs: list[GridRun]
    folder: Path
    machine: str | None = None  # an accelerate config, with which `launch` starts each run
    overwrite: bool = False
    log_level: str | None = None  # the runs' own

    @property
    def score(self) -> Score:
        """By what its runs are ranked."""
        return _score_of(self.runs)


def build_grid(recipe: str | None, overrides: Overrides) -> list[GridRun]:
    """Return the runs of all combinations of values, the last knob varying fastest. Raises
    UserError.
    """
    # One list of values per knob; a knob with one value is an axis of length 1.
    axes = {key: _values(key, text) for key, text in dict(overrides).items()}
    swept = [key for key, texts in axes.items() if len(texts) > 1]
    if not swept:
        raise UserError(
            f"{program()} sweep: no knob has several values: --optim.learning_rate 1e-3,3e-3"
        )
    # The name of a run is its folder, so two values that give one name are refused.
    runs: dict[str, GridRun] = {}
    for texts in _combinations(recipe, axes):
        run = _grid_run(recipe, texts, [key for key in swept if key in texts])
        if run.config.hub.push:
            raise UserError(f"{program()} sweep: leave out hub.push")
        if run.name in runs:
            raise UserError(f"{program()} sweep: two runs named {run.name}; give different values")
        runs[run.name] = run
    if len(commands := dict.fromkeys(f"`{run.command}`" for run in runs.values())) > 1:
        raise UserError(
            f"{program()} sweep: its runs are of {' and '.join(commands)}, whose results do not "
            "compare; sweep each by itself"
        )
    # It raises if they have no score in common.
    _score_of([*runs.values()])
    return list(runs.values())


def _score_of(runs: Sequence[GridRun]) -> Score:
    """The score by which runs are ranked: their method's, or another one if they differ in what
    that measures. Raises UserError if there is none for all.
    """
    # It imports torch, for which mistakes in the grid should not wait.
    from nanogpt_hf.methods.table import method_of

    methods = [method_of(run.config) for run in runs]
    texts = ({knob_text(run.config, key) for run in runs} for key in methods[0].scored_by)
    scores = {method.score for method in methods}
    if len(scores) > 1 or any(len(found) > 1 for found in texts):
        scores = {method.score_across or method.score for method in methods}
    if len(scores) > 1:
        labels = " and ".join(sorted(score.label for score in scores))
        raise UserError(
            f"{program()} sweep: its runs do not compare: they have {labels}; sweep each by itself"
        )
    return scores.pop()


def _combinations(recipe: str | None, axes: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination of values, as the text of each knob.

    A knob that only some combinations read, such as `optim.muon_momentum` next to `optim.name
    adamw,muon`, is left out of the others, which then make one run instead of several.
    """
    combinations = [
        dict(zip(axes, texts, strict=True)) for texts in itertools.product(*axes.values())
    ]
    for texts in combinations:
        # All wrong values are found before a model is looked up, which may take long.
        check_knobs(recipe, [*texts.items()])
    unread: list[set[str]] = []
    for texts in combinations:
        pairs = [*texts.items()]
        unread.append(unread_overrides(recipe, pairs, defaults_of(recipe, pairs)))
    # A knob that no run reads is a mistake, which load_config reports.
    never_read = set.intersection(*unread)
    found: list[dict[str, str]] = []
    for texts, keys in zip(combinations, unread, strict=True):
        left_out = keys - never_read
        kept = {key: text for key, text in texts.items() if key not in left_out}
        if not (left_out and kept in found):
            found.append(kept)
    return found


def _values(key: str, text: str) -> list[str]:
    """`1e-3,3e-3` -> its values as the texts that an override has. A list or a mapping is one."""
    if text.startswith(("[", "{")) or not re.search(r"[,'\"]", text):
        return [text]
    try:
        return ["null" if value is None else str(value) for value in parse_flow_list(text)]
    except ValueError as error:
        raise UserError(f"--{key}: expected values with commas between them: {error}") from None


def _grid_run(recipe: str | None, texts: dict[str, str], swept: list[str]) -> GridRun:
    overrides = list(texts.items())
    resolved = resolve(recipe, overrides)
    config = resolved.config
    values = {}
    # A key is a knob, or one field of a mapping such as `optim.rates.mlp_in`.
    for key in swept:
        knob, _, name = key.rpartition(".")
        is_knob = key in KNOBS
        values[key] = convert(KNOBS[key], texts[key]) if is_knob else get_value(config, knob)[name]
    # Runs on text with other tokens need prepared data of their own.
    is_text = recipe_method_of(partial(get_value, config)) is NEXT_TOKEN
    tokens = [key for key in swept if key in _PREPARED_BY]
    # A folder that is not stated is named after the model's tokenizer.
    stated = stated_knobs(recipe, overrides)
    if "finetune.model" in swept and "data.dir" in stated and "data.tokenizer" not in stated:
        tokens.append("finetune.model")
    if is_text and tokens and "data.dir" not in swept:
        overrides += [("data.dir", f"{config.data.dir}-{_label(values, tokens)}")]
        resolved = resolve(recipe, overrides)
    _check_model(recipe, stated, resolved)
    return GridRun(_label(values, swept), values, overrides, *resolved)


def _check_model(recipe: str | None, stated: Row, resolved: Resolved) -> None:
    """Raises UserError for a run on conversations that would train the default model from
    scratch: its recipe leaves the model to the command line.
    """
    if resolved.base is not None:
        return
    sources = sources_of(resolved.config.data)
    chats = any(FORMATS[source.data.format].chats for source in sources)
    if chats and not any(key.startswith("model.") for key in stated):
        raise UserError(
            f"{program()} sweep: {recipe}: trains on conversations and states no model; give the "
            "one to start from: --from gpt2, a model folder or a run folder; or the sizes of one "
            "to train from scratch, such as --model.n_layer 4"
        )


def _label(values: Row, keys: list[str]) -> str:
    """`depth=2_seed=1`: a name for a folder."""
    # `seed` for `train.seed`, unless two of the knobs end alike.
    last = [key.rpartition(".")[2] for key in keys]
    names = last if len(set(last)) == len(keys) else keys
    text = "_".join(f"{name}={values[key]}" for name, key in zip(names, keys, strict=True))
    return re.sub(r"[^\w.+=-]+", "-", text)[:120].strip("-")
