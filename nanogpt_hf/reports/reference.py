"""Reference curves: the loss band of a recipe over several seeds, or published losses, stored as JSON.

References of our recipes ship in recipes/reference/; `compare RUN RUN RUN --make-reference FILE` writes a new one.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.shipped import shipped_folder
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import column, is_number, read_metrics

SHIPPED = shipped_folder("recipes/reference")
BAND = (
    "99 % prediction interval of one more seed: mean ± t(0.995, n − 1) · s · sqrt(1 + 1/n), where n is the number of "
    "seeds and s² the mean of their variances at a step and the steps before and after it"
)
_T995 = {2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250}  # Student's t by n - 1
_WINDOWS = 40  # of the training losses; each is averaged

# Runs that differ in one of these cannot be compared. Prepared tokens, if there are any, decide about the text.
_TEXT = ("data.source", "data.config", "data.split", "data.validation_split", "data.revision", "data.text_column")
_TEXT += ("data.validation_fraction", "data.validation_seed", "data.tokenizer", "data.vocab_size")
_MODEL_KNOBS = ("architecture", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "n_positions", "extra")
_MODEL_KNOBS += ("bias", "activation_function")
_DEFINING = (*(f"model.{name}" for name in _MODEL_KNOBS), "data.format", "data.block_size", "data.packing")
_DEFINING += tuple(key for key in KNOBS if key.startswith(("finetune.", "lora.")) and key != "lora.merge") + _TEXT
# Runs that differ only in these can be compared, and these are the first suspects if the losses differ.
_MOVING = ("optim.name", "optim.muon_learning_rate", "optim.muon_momentum", "optim.muon_scale", "model.init")
_MOVING += ("optim.learning_rate", "optim.min_learning_rate", "optim.schedule", "optim.warmup_steps")
_MOVING += ("optim.decay_fraction", "train.tokens_per_step", "train.max_steps", "data.order", "model.dropout")
_MOVING += ("optim.weight_decay", "optim.beta1", "optim.beta2", "optim.max_grad_norm", "eval.tokens")
_USUALLY_DEFAULT = ("data.vocab_size", "finetune.", "lora.", "optim.name", "optim.muon_", "model.init")
_USUALLY_DEFAULT += ("model.architecture", "model.n_kv_head", "model.n_inner", "model.extra")


@dataclass(frozen=True)
class Curve:
    """The mean of a loss by step, and the band around it (`BAND`)."""

    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Point:
    """A published loss and its source."""

    loss: float
    what: str
    source: str
    step: int | None = None  # None if the model was not trained by a run like this
    tolerance: float = 0.0  # a loss at most this much higher still counts as reached


@dataclass(frozen=True)
class Reference:
    name: str  # of the recipe
    experiment: dict[str, Any]  # the knobs that affect the loss
    text: dict[str, Any] | None = None  # facts about the tokens; see `text_facts`
    seeds: list[int] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)  # date and versions
    band: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)  # val/loss, train/loss
    points: list[Point] = field(default_factory=list)


def read_reference(path: Path) -> Reference:
    """Read a reference. Raises UserError if `path` is missing or no reference."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree["curves"] = {name: Curve(**curve) for name, curve in tree.get("curves", {}).items()}
        tree["points"] = [Point(**point) for point in tree.get("points", [])]
        reference = Reference(**tree)
        rows = [dataclasses.astuple(curve) for curve in reference.curves.values()]
        numbers = [number for row in rows for values in row for number in values]
        numbers += [number for point in reference.points for number in (point.loss, point.step or 0, point.tolerance)]
        if any(len(set(map(len, row))) > 1 for row in rows) or not all(map(is_number, numbers)):
            raise ValueError("its curves must be lists of numbers of one length, and its points numbers")
        if not (isinstance(reference.name, str) and isinstance(reference.experiment, dict)):
            raise ValueError("its name must be a string, and its experiment a mapping of knobs")
        return reference
    except FileNotFoundError:
        raise UserError(f"{path}: no such reference") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a reference curve: {error}") from None


def text_facts(config: Config) -> dict[str, Any] | None:
    """Facts that identify the prepared tokens of a recipe; None if they are not on this machine."""
    from nanogpt_hf.data.mixed_manifest import find_manifest  # imports datasets, which is slow

    manifest = find_manifest(config.data)
    return manifest and {
        "revision": manifest.revision,
        "tokenizer_hash": manifest.tokenizer_hash,
        "vocab_size": manifest.vocab_size,
        "train_tokens": manifest.train.tokens,
        "validation_tokens": manifest.validation.tokens,
    }


def experiment_of(config: Config) -> dict[str, Any]:
    """The knobs that affect the loss. The path of a local text is omitted: it is private."""
    keys = [key for key in KNOBS if key in _DEFINING + _MOVING]
    experiment = {key: get_value(config, key) for key in keys}
    for key in keys:
        usual = "gpt2" if key == "model.init" else KNOBS[key].default  # GPT-2's own init is `gpt2`
        if key.startswith(_USUALLY_DEFAULT) and experiment[key] == usual:
            del experiment[key]  # the defaults mean pretraining with AdamW; older references lack these knobs
    if not is_mixture(config.data):
        source = Path(config.data.one_source).expanduser()
        if source.is_absolute() or source.exists():
            experiment["data.source"] = None
    return experiment


def differences(reference: Reference, config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Messages by knob (or `text`): differences that make losses incomparable, and those that only shift them."""
    ours, theirs = _with_defaults(experiment_of(config)), _with_defaults(reference.experiment)
    keys = [key for key in KNOBS if ours[key] != theirs[key]]
    incomparable = {}
    text, reference_text = text_facts(config), reference.text
    if text and reference_text:
        keys = [key for key in keys if key not in _TEXT]
        if any(text[name] != reference_text[name] for name in reference_text if name != "revision"):
            with_revision = text["revision"] != reference_text["revision"]
            incomparable["text"] = (
                f"the text is {_describe_text(text, with_revision)} here, "
                f"{_describe_text(reference_text, with_revision)} in the reference"
            )
    elif None in (ours["data.source"], theirs["data.source"]):
        keys = [key for key in keys if key != "data.source"]
    messages = {key: f"{key} is {_plain(ours[key])} here, {_plain(theirs[key])} in the reference" for key in keys}
    incomparable |= {key: message for key, message in messages.items() if key in _DEFINING}
    return incomparable, {key: messages[key] for key in _MOVING if key in messages}


def _with_defaults(experiment: dict[str, Any]) -> dict[str, Any]:
    return {key: experiment.get(key, knob.default) for key, knob in KNOBS.items()}


def _describe_text(facts: dict[str, Any], with_revision: bool) -> str:
    size = f"{facts['train_tokens']:,} + {facts['validation_tokens']:,} tokens"
    return f"{size} ({facts['revision']})" if with_revision else size


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def find_reference(config: Config, folder: Path = SHIPPED) -> Reference | None:
    """The reference in `folder` for this experiment, or the nearest with at most two incomparable knobs, or None."""
    ranked = []
    for path in sorted(folder.glob("*.json")):
        reference = read_reference(path)
        incomparable, shifting = differences(reference, config)
        ranked.append((len(incomparable), len(shifting), reference.name, reference))
    nearest = min(ranked, key=lambda row: row[:3], default=None)
    return nearest[3] if nearest and nearest[0] <= 2 else None


def make_reference(runs: list[RunFolder], name: str) -> Reference:
    """Make a reference of finished runs that differ only in their seed.

    Raises UserError if they are fewer than three, not finished, or differ in another knob.
    """
    configs = [load_config(run.recipe) for run in runs]
    experiments = [experiment_of(config) for config in configs]
    for run, config, experiment in zip(runs, configs, experiments, strict=True):
        different = [key for key in KNOBS if experiment.get(key) != experiments[0].get(key)]
        if different:
            raise UserError(
                f"{run.path}: differs from {runs[0].path} in {', '.join(different)}; only the seed may differ"
            )
        last = max((event["step"] for event in read_metrics(run) if "val/loss" in event), default=0)
        if last != config.train.max_steps:
            raise UserError(f"{run.path}: not finished: evaluated at step {last:,} of {config.train.max_steps:,}")
    seeds = [config.train.seed for config in configs]
    if len(set(seeds)) < max(3, len(seeds)):
        raise UserError(f"a reference needs at least three runs with different seeds; these have {seeds}")
    curves = {}
    for metric, rows in (
        ("val/loss", [column(read_metrics(run), "val/loss") for run in runs]),
        ("train/loss", [window_means(run, configs[0].train.max_steps) for run in runs]),
    ):
        if any(not np.array_equal(steps, rows[0][0]) for steps, _ in rows):
            raise UserError(f"{metric}: the runs report it at different steps, or a value is not finite")
        curves[metric] = band_of(rows[0][0], np.array([values for _, values in rows]))
    made = {"date": date.today().isoformat()}
    made |= {package: version(package) for package in ("nanogpt_hf", "torch", "transformers", "accelerate")}
    return Reference(name, experiments[0], text_facts(configs[0]), seeds, made, BAND, curves)


def window_means(run: RunFolder, max_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Training losses averaged over `_WINDOWS` equal windows of the run, each at its last step."""
    steps, losses = column(read_metrics(run), "train/loss")
    ends = np.unique(np.linspace(0, max_steps, _WINDOWS + 1).round())[1:]
    window = np.searchsorted(ends, steps)
    filled = [i for i in range(len(ends)) if (window == i).any()]
    return ends[filled], np.array([losses[window == i].mean() for i in filled])


def band_of(steps: np.ndarray, losses: np.ndarray) -> Curve:
    """The mean over seeds and the interval defined by `BAND`, for `losses` of shape (seeds, steps)."""
    n = len(losses)
    variances = np.pad(losses.var(axis=0, ddof=1), 1, mode="edge")
    deviation = np.sqrt((variances[:-2] + variances[1:-1] + variances[2:]) / 3)
    reach = _T995[min(n - 1, max(_T995))] * deviation * np.sqrt(1 + 1 / n)
    mean = losses.mean(axis=0)
    columns = ([round(float(value), 4) for value in values] for values in (mean, mean - reach, mean + reach))
    return Curve([int(step) for step in steps], *columns)


def write_reference(reference: Reference, path: Path) -> None:
    """Write a reference atomically. Raises UserError if `path` is not writable."""
    tree = {key: value for key, value in dataclasses.asdict(reference).items() if value}
    text = json.dumps(tree, indent=2, ensure_ascii=False)
    text = re.sub(
        r"\[[^\[\]{}\"]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text
    )  # one line per list
    with written_whole(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
