"""Write report.html: one self-contained page about a run. Its policy blocks scripts of others."""

import base64
import functools
import hashlib
import logging
import math
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, Template

import nanogpt_hf
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import knob_text, source_text
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.errors import one_line
from nanogpt_hf.formatting import format_duration, format_number
from nanogpt_hf.program import program
from nanogpt_hf.reports.comparison import score_of, summarize
from nanogpt_hf.reports.curves import draw_run
from nanogpt_hf.reports.reference import find_reference, judge
from nanogpt_hf.runs.files import redact, write_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import AXES, Event, column, is_number, names, read_metrics
from nanogpt_hf.runs.provenance import read_starts, read_verifications, steps_from
from nanogpt_hf.runs.recipe import read_recipe

logger = logging.getLogger(__name__)
_VERIFIED = ("result", "time", "machine")
# The scores by which a run may choose best/, in words.
_SCORES = {
    "val/loss": "validation loss",
    "val/reward": "mean reward",
    "val/divergence": "divergence from the teacher",
}
_SECONDS_BETWEEN_PLOTS = 30.0  # the first takes about half a second
# Limit for the points of a curve, since a browser has to draw them. Longer curves are thinned out.
MAX_POINTS = 4000


def write_report(run: RunFolder, path: Path) -> None:
    """Write the report of `run`, which may still be training, to `path`, atomically.

    Raises UserError if `path` is not writable, or the recipe was edited and has mistakes.
    """
    write_whole(path, render(run, read_metrics(run)))


def render(run: RunFolder, events: list[Event]) -> str:
    """Render the report as HTML.

    Text from the run is escaped, and the content security policy allows only our script.
    """
    config = read_recipe(run)
    reference = find_reference(config)
    metric = score_of(config)
    figures = summarize(events, metric, metric)
    data = {
        "groups": _curves(events),
        "band": reference.curve if reference else None,
        "stages": [[stage.first, stage.name] for stage in stages_of(config)[1:]],
    }
    style = _asset("page.css")
    script = _asset("page.js")
    # A sample of the model, or a name in a recipe, may hold a script. Should one ever pass the
    # escaping, the browser does not run it: its hash is not in this list.
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    policy += f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    is_adapter = config.lora.rank is not None and not config.lora.merge
    verified = []
    for event in read_verifications(run):
        steps = f"{event.get('from')} to {event['step']}"
        verified.append([steps, *map(event.get, _VERIFIED)])
    return _template().render(
        name=run.path.resolve().name,
        program=program(),
        policy=policy,
        style=style,
        script=script,
        state=_state_line(run, config, figures["steps"]),
        diverged_at=figures["diverged_at"],
        # Rewards have no reference.
        verdict=judge(reference, config, events) if metric == "val/loss" else None,
        tiles=_tiles(figures, metric),
        samples=_samples(events),
        evaluations=_evaluation_table(events, figures["best_step"]),
        knobs=_knob_rows(config),
        recipe=config_to_yaml(config),
        machine=yaml.safe_dump(read_starts(run), allow_unicode=True, sort_keys=False),
        verified=verified,
        best=repr(str(run.best)) if run.best.is_dir() else "",
        path=shlex.quote(str(run.path)),
        package="peft" if is_adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM",
        version=nanogpt_hf.__version__,
        date=datetime.now().astimezone().isoformat(" ", "minutes"),
        data=data,
    )


@functools.cache  # it takes a tenth of a second to compile
def _template() -> Template:
    environment = Environment(autoescape=True, finalize=_redacted)
    # JSON's own numbers only: a page with NaN in its data would not be read by the browser.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_asset("page.html"))


def _redacted(value: Any) -> Any:
    """Remove secrets from a text of the template; markup and numbers stay as they are."""
    # `type` and not isinstance: Markup is a str, and is our own.
    return redact(value) if type(value) is str else value


def _asset(name: str) -> str:
    return files("nanogpt_hf.reports").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _curves(events: list[Event]) -> list[dict[str, Any]]:
    """Collect the curves for page.js.

    Training events and evaluation events are a group each, with an x axis of their own: {"step":
    [...], "metrics": {name: [...]}, ...}.
    """
    # Training logs more often than it evaluates, so one axis for both would be mostly empty.
    groups = []
    for is_training in (True, False):
        group = [e for e in events if ("train/loss" in e) == is_training and names([e])]
        every = math.ceil(len(group) / MAX_POINTS) or 1
        # Counted from the end, so that the last event is kept.
        group = group[::-every][::-1]
        if group:
            axes = {axis: [event.get(axis, 0) for event in group] for axis in AXES}
            metrics = {name: [event.get(name) for event in group] for name in names(group)}
            groups.append(axes | {"metrics": metrics})
    return groups


def _state_line(run: RunFolder, config: Config, step: int) -> str:
    """State in a line how far the run is, and what is trained on what."""
    model = config.model
    data = config.data
    train = config.train
    state = f"step {step:,} of {train.max_steps:,}, not finished"
    if run.final.is_dir():
        state = f"done: {step:,} steps"
    if knob := steps_from(run, train.max_steps):
        state += f"; train.max_steps {train.max_steps:,} follows from {knob}"
    start = f"from {config.finetune.model}" if config.finetune.model else "from scratch"
    return (
        f"{state}. {model.n_layer} layers, {model.n_head} heads, "
        f"{model.n_embd} wide, {data.block_size:,} tokens of context; {start} on "
        f"{source_text(data)}, {train.tokens_per_step:,} tokens per step"
    )


def _tiles(figures: dict[str, Any], metric: str) -> list[tuple[str, str, str]]:
    """Title, value and note of each figure at the top."""
    tiles = [
        ("tokens seen", f"{figures['tokens']:,}", ""),
        ("time", format_duration(figures["seconds"]), "training and evaluation"),
    ]
    # The best value is shown first, before tokens and time, or that the run has diverged.
    if figures["diverged_at"] is not None:
        at = f"at step {figures['diverged_at']:,}: not finite"
        tiles.insert(0, (f"last {_SCORES[metric]}", "nan", at))
    if figures["best"] is not None:
        at = f"at step {figures['best_step']:,}"
        if figures["beats_start"] is False:
            at += ": no evaluation was better than that of the start"
        tiles.insert(0, (f"best {_SCORES[metric]}", format_number(figures["best"], 4), at))
    if figures["tokens_per_second"]:
        speed = f"{figures['tokens_per_second']:,.0f}"
        tiles.append(("tokens per second", speed, "median of the reports"))
    return tiles


def _samples(events: list[Event]) -> list[tuple[str, list[dict[str, str]]]]:
    """The samples of each evaluation, under a title."""
    losses = dict(zip(*column(events, "val/loss"), strict=True))
    found = []
    for event in events:
        if "samples" in event:
            step = event["step"]
            title = f"step {step:,}"
            # A loss that is not finite is not in the column.
            if step in losses:
                title += f", validation loss {losses[step]:.3f}"
            found.append((title, event["samples"]))
    return found


def _evaluation_table(events: list[Event], best_step: int | None) -> dict[str, list]:
    """Head, rows and their classes."""
    evaluated = [event for event in events if "val/loss" in event or "val/reward" in event]
    metrics = [name for name in names(evaluated) if not name.endswith("_stderr")]
    rows = []
    for event in evaluated:
        counts = [f"{event.get(count, 0):,}" for count in ("step", "tokens")]
        # An evaluation may lack a metric: the samples and tasks of a run may change at a resume.
        values = (event.get(name) for name in metrics)
        cells = [f"{value:.4f}" if is_number(value) else "–" for value in values]
        rows.append([*counts, format_duration(event.get("seconds", 0)), *cells])
    classes = ["best" if event["step"] == best_step else "" for event in evaluated]
    return {"head": ["step", "tokens", "time", *metrics], "rows": rows, "classes": classes}


def _knob_rows(config: Config) -> list[list[str]]:
    """The knobs that the run reads and that differ from the defaults."""
    read = read_knobs(config)
    return [
        [key, knob_text(config, key), str(knob.default), knob.meaning]
        for key, knob in KNOBS.items()
        if key in read and get_value(config, key) != knob.default
    ]


class LiveReports:
    """Draws loss.png every 30 seconds or more while a run trains, and both files at its end.

    Only the main process draws.
    """

    def __init__(self, folder: RunFolder, config: Config, *, is_main: bool):
        self.folder = folder
        self.config = config
        self.is_main = is_main
        # A run of less than 30 seconds draws its only plot at its end.
        self._last_plot = time.perf_counter()

    def plot(self, events: list[Event]) -> None:
        """Draw the loss plot unless the last one is less than 30 seconds old."""
        if self.is_main and time.perf_counter() - self._last_plot >= _SECONDS_BETWEEN_PLOTS:
            self._last_plot = time.perf_counter()
            _try(draw_run, self.folder, self.config, events)

    def finish(self, events: list[Event]) -> None:
        """Draw the plot and write the report, as complete as the metrics."""
        # If the folder is gone, this is why the run ended, and a new one would hide it.
        if self.is_main and self.folder.path.is_dir():
            _try(draw_run, self.folder, self.config, events)
            _try(write_report, self.folder, self.folder.report)


def _try(function: Callable[..., None], *arguments: Any) -> None:
    """Call it; an error, such as a full disk, does not end a run."""
    try:
        function(*arguments)
    except Exception as error:
        logger.warning(f"no plot or report: {one_line(error)}")
