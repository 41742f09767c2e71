"""The sections of report.html as HTML. All text from a run is escaped here."""

import html
import math
import shlex
from datetime import datetime
from typing import Any

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import knob_text, source_text
from nanogpt_hf.formatting import format_duration, format_number
from nanogpt_hf.reports.reference import Verdict
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, is_number, names
from nanogpt_hf.runs.redact import redact


def escape(text: str) -> str:
    """Redact and escape for HTML."""
    return html.escape(redact(text))


def state_line(run: RunFolder, config: Config | None, events: list[Event]) -> str:
    step = max((event["step"] for event in events), default=0)
    if run.final.is_dir():
        state = f"done: {step:,} steps"
    else:
        state = (
            f"step {step:,}"
            + (f" of {config.train.max_steps:,}" if config else "")
            + ", not finished"
        )
        if run.metrics.is_file():
            written = datetime.fromtimestamp(run.metrics.stat().st_mtime).astimezone()
            state += f", last metrics at {written.isoformat(' ', 'minutes')}"
    if config is None:
        return state
    model, data = config.model, config.data
    shape = (
        f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
        f"{data.block_size:,} tokens of context"
    )
    start = f"from {config.finetune.model}" if config.finetune.model else "from scratch"
    training = (
        f"{start} on {source_text(data)}, tokenizer {data.tokenizer}, "
        f"{config.train.tokens_per_step:,} tokens per step"
    )
    return f"{state}. {shape}; {training}"


def verdict_section(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    causes = "".join(f"<li>{escape(cause)}</li>" for cause in verdict.causes)
    check = f"<p>Check first:</p><ol>{causes}</ol>" if causes else ""
    sentence = escape(verdict.sentence[:1].upper() + verdict.sentence[1:])
    return f'<section class="verdict {verdict.kind}"><p>{sentence}.</p>{check}</section>'


def summary_section(events: list[Event]) -> str:
    tiles = []
    evaluated = [event for event in events if is_number(event.get("val/loss"))]
    if evaluated:
        best = min(evaluated, key=lambda event: event["val/loss"])
        tiles.append(
            (
                "best validation loss",
                format_number(best["val/loss"], 4),
                f"nats per token, at step {best['step']:,}",
            )
        )
        for metric, title, digits in (
            ("val/perplexity", "perplexity", 2),
            ("val/bits_per_byte", "bits per byte", 3),
        ):
            if is_number(best.get(metric)):
                tiles.append((title, format_number(best[metric], digits), "at that step"))
    answered = [event for event in events if is_number(event.get("val/reward"))]
    if answered:
        best = min(answered, key=_score)
        tiles.append(
            ("best mean reward", format_number(best["val/reward"], 4), f"at step {best['step']:,}")
        )
        for name in names(answered):
            if name.startswith("val/pass@"):
                tiles.append(
                    (name.removeprefix("val/"), format_number(best[name], 4), "at that step")
                )
    if events:
        tiles.append(("tokens seen", f"{events[-1].get('tokens', 0):,}", ""))
        tiles.append(
            ("time", format_duration(events[-1].get("seconds", 0)), "training and evaluation")
        )
    _, rates = column(events, "train/tokens_per_second")
    if len(rates):
        tiles.append(
            ("tokens per second", f"{sorted(rates)[len(rates) // 2]:,.0f}", "median of the reports")
        )
    return "".join(
        f"<div><dt>{title}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for title, value, note in tiles
    )


def samples_section(events: list[Event]) -> str:
    sampled = [event for event in events if isinstance(event.get("samples"), list)]
    if not sampled:
        return ""
    losses = {
        event["step"]: event["val/loss"] for event in events if is_number(event.get("val/loss"))
    }
    articles = []
    for event in sampled:
        name = f"step {event['step']:,}"
        if event["step"] in losses:
            name += f", validation loss {losses[event['step']]:.3f}"
        texts = "".join(
            f"<pre><b>{escape(str(sample.get('prompt')))}</b>{_answer(sample)}</pre>"
            for sample in event["samples"]
        )
        articles.append(
            '<article class="sample" '
            f'data-name="{escape(name)}"><h3>{escape(name)}</h3>{texts}</article>'
        )
    return (
        "<section><h2>Samples during training</h2>"
        '<p id="sample-control" hidden><label>evaluation, first to last '
        '<input id="step-of-sample" type="range" min="0" value="0"></label></p>'
        f'{"".join(articles)}<p class="note">Prompts are colored.</p></section>'
    )


def _answer(sample: dict[str, str]) -> str:
    """A continuation, or an answer to a question with its reward."""
    text = escape(str(sample.get("text")))
    return f"\n{text}\n<i>reward {escape(sample['reward'])}</i>" if "reward" in sample else text


def table(
    head: list[str], rows: list[list[str]], classes: list[str] | None = None, first_number: int = 0
) -> str:
    """An HTML table; columns from `first_number` on are right-aligned numbers.

    Cells are escaped here.
    """

    def cells(kind: str, row: list[str]) -> str:
        return "".join(
            f"<{kind}{' class=number' if i >= first_number else ''}>{escape(cell)}</{kind}>"
            for i, cell in enumerate(row)
        )

    body = "".join(
        f'<tr class="{name}">{cells("td", row)}</tr>'
        for row, name in zip(rows, classes or [""] * len(rows), strict=True)
    )
    header = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{header}<tbody>{body}</tbody></table></div>'


def _score(event: Event) -> float:
    """Of an evaluation; the lowest is the best."""
    if is_number(event.get("val/reward")):
        return -event["val/reward"]
    return event["val/loss"] if is_number(event.get("val/loss")) else math.inf


def evaluations_section(events: list[Event]) -> str:
    evaluated = [event for event in events if "val/loss" in event or "val/reward" in event]
    if not evaluated:
        return "<p>None yet.</p>"
    metrics = [name for name in names(evaluated) if not name.endswith("_stderr")]
    best = min(map(_score, evaluated))
    rows = [
        [
            f"{event['step']:,}",
            f"{event.get('tokens', 0):,}",
            format_duration(event.get("seconds", 0)),
        ]
        + [f"{event[name]:.4f}" if is_number(event.get(name)) else "–" for name in metrics]
        for event in evaluated
    ]
    classes = ["best" if _score(event) == best < math.inf else "" for event in evaluated]
    return table(["step", "tokens", "time", *metrics], rows, classes)


def recipe_section(config: Config | None) -> str:
    if config is None:
        return "<p>recipe.yaml could not be read.</p>"
    rows = [
        [key, knob_text(config, key), str(knob.default), knob.meaning]
        for key, knob in KNOBS.items()
        if get_value(config, key) != knob.default
    ]
    recipe = escape(config_to_yaml(config))
    return (
        "<p>Knobs that differ from the defaults:</p>"
        + table(["knob", "value", "default", "meaning"], rows, first_number=len(KNOBS))
        + f"<details><summary>The whole recipe</summary><pre>{recipe}</pre></details>"
    )


def machine_section(starts: list[dict[str, Any]] | None) -> str:
    if not starts:
        return "<p>Not recorded: the run folder has no machine.json.</p>"
    names_of = ("machine", "processes", "device", "precision", "code", "command")
    rows = []
    for start in starts:
        versions = start.get("versions")
        versions = (
            ", ".join(f"{k} {v}" for k, v in versions.items())
            if isinstance(versions, dict)
            else str(versions)
        )
        facts = [(name, str(start.get(name))) for name in names_of if start.get(name) is not None]
        rows += [
            ["start", f"from step {start.get('step')}, {start.get('time')}"],
            *map(list, facts),
        ]
        rows.append(["versions", versions])
    return table([], rows, first_number=2)


def loading_section(run: RunFolder, config: Config | None) -> str:
    path, best = str(run.path), str(run.best)
    if not run.best.is_dir():
        return "<p>No model yet: the first is saved at the first evaluation after step 0.</p>"
    adapter = config is not None and config.lora.rank is not None and not config.lora.merge
    package, loader = (
        ("peft", "AutoPeftModelForCausalLM")
        if adapter
        else ("transformers", "AutoModelForCausalLM")
    )
    code = (
        f"from {package} import {loader}\nfrom transformers import AutoTokenizer\n\n"
        f"model = {loader}.from_pretrained({best!r})\ntokenizer = "
        f"AutoTokenizer.from_pretrained({best!r})"
    )
    return (
        f"<pre>{escape(code)}</pre><p>or <code>python cli.py sample "
        f"{escape(shlex.quote(path))}</code></p>"
    )
