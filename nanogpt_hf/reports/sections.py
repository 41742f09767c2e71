"""What the sections of report.html show; the template redacts and escapes it."""

import math
from datetime import datetime
from typing import Any

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import knob_text, source_text
from nanogpt_hf.formatting import format_duration, format_number
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, is_number, names


def state_line(run: RunFolder, config: Config | None, events: list[Event]) -> str:
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
    )


def summary_tiles(events: list[Event]) -> list[tuple[str, str, str]]:
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

    per_token = {"val/perplexity": ("perplexity", 2), "val/bits_per_byte": ("bits per byte", 3)}
    add_best("val/loss", "validation loss", "nats per token, ", per_token)
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


def samples(events: list[Event]) -> list[tuple[str, list[dict[str, str]]]]:
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


def evaluation_table(events: list[Event]) -> dict[str, list]:
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


def knob_rows(config: Config) -> list[list[str]]:
    """The knobs that differ from the defaults."""
    return [
        [key, knob_text(config, key), str(knob.default), knob.meaning]
        for key, knob in KNOBS.items()
        if get_value(config, key) != knob.default
    ]


def machine_rows(starts: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for start in starts:
        rows.append(["start", f"from step {start.get('step')}, {start.get('time')}"])
        for name in ("machine", "processes", "device", "precision", "code", "command"):
            if start.get(name) is not None:
                rows.append([name, str(start[name])])
        packages = start.get("versions", {}).items()
        rows.append(["versions", ", ".join(f"{name} {version}" for name, version in packages)])
    return rows
