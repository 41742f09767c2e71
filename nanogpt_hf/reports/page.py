"""Write report.html: one self-contained page about a run; its policy blocks foreign scripts."""

import base64
import hashlib
import math
import shlex
from dataclasses import replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

import nanogpt_hf
from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import knob_text, source_text
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_duration, format_number
from nanogpt_hf.reports.reference import Reference, Verdict, find_reference, judge
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import AXES, Event, column, is_number, names, read_events, read_metrics
from nanogpt_hf.runs.provenance import read_starts
from nanogpt_hf.runs.redact import redact

_VERIFIED = ("result", "time", "machine")
MAX_POINTS = 4000  # per curve; longer ones are averaged, since a browser has to draw them


def write_report(run: RunFolder, path: Path, events: list[Event] | None = None) -> None:
    """Write the report of `run` to `path`, atomically.

    Works for a run that is still training, and for one with missing files, which the page names.
    Raises UserError if there is no run, or `path` is not writable.
    """
    if not (run.recipe.is_file() or run.metrics.is_file()):
        raise UserError(f"{run.path}: holds no run: it has neither recipe.yaml nor metrics.jsonl")
    page = render(run, read_metrics(run) if events is None else events)
    with written_whole(path) as partial:
        # a path may hold any byte
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")


def render(run: RunFolder, events: list[Event]) -> str:
    """The report as HTML.

    Text from the run is escaped, and the content security policy allows only our script.
    """
    missing, config = [], None
    try:
        config = load_config(run.recipe)
    except UserError as error:
        missing.append(str(error).partition("\n")[0])
    machine = read_starts(run)
    if not machine:
        missing.append("machine.json")
    if not events:
        missing.append("metrics.jsonl: no event yet")
    has_loss = not any("train/reward" in event for event in events)  # rewards have no reference
    reference = find_reference(config) if config and has_loss else None
    verdict = judge(reference, config, events) if config and has_loss else None
    data, reports_per_point = _chart_data(events, verdict, reference)
    data["stages"] = (
        [[stage.first, stage.name] for stage in stages_of(config)[1:]] if config else []
    )
    style, script = (_asset(f"page.{kind}") for kind in ("css", "js"))
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    policy += f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    is_adapter = config is not None and config.lora.rank is not None and not config.lora.merge
    png = run.loss_plot.read_bytes() if run.loss_plot.is_file() else b""
    environment = Environment(autoescape=True, finalize=_redacted)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_asset("page.html")).render(
        name=run.path.resolve().name,
        policy=policy,
        style=style,
        script=script,
        state=_state_line(run, config, events),
        verdict=verdict and replace(verdict, sentence=_capitalized(verdict.sentence)),
        missing="; ".join(missing),
        tiles=_summary_tiles(events),
        averaged=reports_per_point,
        plot=base64.b64encode(png).decode(),  # for browsers without JavaScript
        samples=_samples(events),
        evaluations=_evaluation_table(events),
        knobs=config and _knob_rows(config),
        recipe=config and config_to_yaml(config),
        machine=_machine_rows(machine),
        verified=[
            [f"{event.get('from')} to {event['step']}", *map(event.get, _VERIFIED)]
            for event in read_events(run.verified)
        ],
        best=repr(str(run.best)) if run.best.is_dir() else "",
        path=shlex.quote(str(run.path)),
        package="peft" if is_adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM",
        version=nanogpt_hf.__version__,
        date=datetime.now().astimezone().isoformat(" ", "minutes"),
        data=data,
    )


def _redacted(value: Any) -> Any:
    """A value of the template, which is escaped afterwards; markup and numbers as they are."""
    return redact(value) if type(value) is str else value


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _asset(name: str) -> str:
    return files("nanogpt_hf.reports").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _chart_data(
    events: list[Event], verdict: Verdict | None, reference: Reference | None
) -> tuple[dict, int]:
    """The data for page.js, and the number of training reports per point.

    Training events and evaluation events are a group each: {"step": [...], "metrics": {name:
    [...]}, ...}.
    """
    training = [event for event in events if "train/loss" in event]
    evaluation = [event for event in events if "train/loss" not in event and names([event])]
    reports_per_point = math.ceil(len(training) / MAX_POINTS) or 1
    groups = []
    for group, size in ((training, reports_per_point), (evaluation, 1)):
        points = [group[i : i + size] for i in range(0, len(group), size)]
        if points:
            groups.append(
                {axis: [point[-1].get(axis, 0) for point in points] for axis in AXES}
                | {
                    "metrics": {
                        name: [_mean(point, name) for point in points] for name in names(group)
                    }
                }
            )
    comparable = verdict is not None and verdict.kind not in ("other", "none")
    curve = reference.curve if reference and comparable else None
    return {"groups": groups, "band": curve and vars(curve)}, reports_per_point


def _mean(events: list[Event], name: str) -> float | None:
    _, values = column(events, name)
    mean = float(f"{values.mean():.6g}") if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def _state_line(run: RunFolder, config: Config | None, events: list[Event]) -> str:
    step = max((event["step"] for event in events), default=0)
    state = f"done: {step:,} steps"
    if not run.final.is_dir():
        state = f"step {step:,}{f' of {config.train.max_steps:,}' if config else ''}, not finished"
        if run.metrics.is_file():
            written = datetime.fromtimestamp(run.metrics.stat().st_mtime).astimezone()
            state += f", last metrics at {written.isoformat(' ', 'minutes')}"
    if config is None:
        return state
    model, data = config.model, config.data
    start = f"from {config.finetune.model}" if config.finetune.model else "from scratch"
    return (
        f"{state}. {model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
        f"{data.block_size:,} tokens of context; {start} on {source_text(data)}, tokenizer "
        f"{data.tokenizer}, {config.train.tokens_per_step:,} tokens per step"
        f"{', in the first stage' if config.train.stages else ''}"
    )


def _summary_tiles(events: list[Event]) -> list[tuple[str, str, str]]:
    """Title, value and note of each figure at the top."""
    tiles = []

    def add_best(metric: str, title: str, note: str, others: dict[str, tuple[str, int]]) -> None:
        """Add the best evaluation, and its other metrics: name -> title and digits."""
        evaluated = [event for event in events if is_number(event.get(metric))]
        if not evaluated:
            return
        best = min(evaluated, key=_score)
        at = f"{note}at step {best['step']:,}"
        tiles.append((f"best {title}", format_number(best[metric], 4), at))
        for name, (other, digits) in others.items():
            if is_number(best.get(name)):
                tiles.append((other, format_number(best[name], digits), "at that step"))

    others = {"val/perplexity": ("perplexity", 2), "val/bits_per_byte": ("bits per byte", 3)}
    others |= {"val/accuracy": ("accuracy", 3), "val/margin": ("margin of rewards", 3)}
    unit = "per example" if "val/margin" in names(events) else "nats per token"
    add_best("val/loss", "validation loss", f"{unit}, ", others)
    rates = [name for name in names(events) if name.startswith("val/pass@")]
    add_best("val/reward", "mean reward", "", {r: (r.removeprefix("val/"), 4) for r in rates})
    if events:
        time = format_duration(events[-1].get("seconds", 0))
        tiles.append(("tokens seen", f"{events[-1].get('tokens', 0):,}", ""))
        tiles.append(("time", time, "training and evaluation"))
    speeds = sorted(column(events, "train/tokens_per_second")[1])
    if speeds:
        median = f"{speeds[len(speeds) // 2]:,.0f}"
        tiles.append(("tokens per second", median, "median of the reports"))
    return tiles


def _samples(events: list[Event]) -> list[tuple[str, list[dict[str, str]]]]:
    """The samples of each evaluation, under a title."""
    losses = {
        event["step"]: f", validation loss {event['val/loss']:.3f}"
        for event in events
        if is_number(event.get("val/loss"))
    }
    return [
        (f"step {event['step']:,}{losses.get(event['step'], '')}", event["samples"])
        for event in events
        if "samples" in event
    ]


def _score(event: Event) -> float:
    """Of an evaluation; the lowest is the best."""
    if is_number(event.get("val/reward")):
        return -event["val/reward"]
    return event["val/loss"] if is_number(event.get("val/loss")) else math.inf


def _evaluation_table(events: list[Event]) -> dict[str, list]:
    """Head, rows and their classes."""
    evaluated = [event for event in events if "val/loss" in event or "val/reward" in event]
    metrics = [name for name in names(evaluated) if not name.endswith("_stderr")]
    best = min(map(_score, evaluated), default=math.inf)
    rows = []
    for event in evaluated:
        counts = [f"{event.get(count, 0):,}" for count in ("step", "tokens")]
        values = (event.get(name) for name in metrics)
        cells = [f"{value:.4f}" if is_number(value) else "–" for value in values]
        rows.append([*counts, format_duration(event.get("seconds", 0)), *cells])
    classes = ["best" if _score(event) == best < math.inf else "" for event in evaluated]
    return {"head": ["step", "tokens", "time", *metrics], "rows": rows, "classes": classes}


def _knob_rows(config: Config) -> list[list[str]]:
    """The knobs that differ from the defaults."""
    return [
        [key, knob_text(config, key), str(knob.default), knob.meaning]
        for key, knob in KNOBS.items()
        if get_value(config, key) != knob.default
    ]


def _machine_rows(starts: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for start in starts:
        rows.append(["start", f"from step {start.get('step')}, {start.get('time')}"])
        names = ("branch_of", "machine", "processes", "device", "precision", "code", "command")
        for name in names:
            if start.get(name) is not None:
                rows.append([name, str(start[name])])
        for name in ("versions", "fingerprint"):
            parts = start.get(name, {}).items()
            rows.append([name, ", ".join(f"{part} {value}" for part, value in parts)])
    return rows
