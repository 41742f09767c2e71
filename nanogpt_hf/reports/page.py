"""report.html: one run on one page, which loads nothing and runs no script but its own."""

import base64
import hashlib
import json
import math
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import nanogpt_hf
from nanogpt_hf.config.load import load_config
from nanogpt_hf.errors import UserError
from nanogpt_hf.reports import sections
from nanogpt_hf.reports.reference import Reference, find_reference
from nanogpt_hf.reports.verdict import Verdict, judge
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import AXES, Event, column, names, read_metrics
from nanogpt_hf.runs.provenance import read_starts

_MOST_POINTS = 4000  # of a curve; beyond, several reports become one point: a browser has to draw them


def write_report(run: RunFolder, path: Path, events: list[Event] | None = None) -> None:
    """Write the page of `run` as it stands to `path`, whole or not at all.

    Works on a run that is still training and on one that has lost files: the page says what is missing. Raises
    UserError where there is no run, or `path` cannot be written.
    """
    if not (run.recipe.is_file() or run.metrics.is_file()):
        raise UserError(f"{run.path}: holds no run: neither recipe.yaml nor metrics.jsonl is there")
    page = render(run, read_metrics(run) if events is None else events)
    with written_whole(path) as partial:
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")  # a path may hold any byte


def render(run: RunFolder, events: list[Event]) -> str:
    """The page as HTML. What comes from the run goes in escaped, and the policy in it lets only our script run."""
    missing, config, picture = [], None, None
    try:
        config = load_config(run.recipe)
    except UserError as error:
        missing.append(str(error).partition("\n")[0])
    machine = read_starts(run)
    if not machine:
        missing.append("machine.json: not there, or not to be read (older versions wrote none)")
    if run.loss_plot.is_file():
        picture = base64.b64encode(run.loss_plot.read_bytes()).decode()
    if not events:
        missing.append("metrics.jsonl: no event yet")
    reference = find_reference(config) if config else None
    verdict = judge(reference, config, events) if config else None
    name, (data, thinned) = run.path.resolve().name, _chart_data(events, verdict, reference)
    style, script = (files("nanogpt_hf.reports").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    policy += f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return Template(files("nanogpt_hf.reports").joinpath("page.html").read_text("utf-8")).substitute(
        name=sections.escape(name),
        policy=policy,
        style=style,
        script=script,
        state=sections.escape(sections.state_line(run, config, events)),
        verdict=sections.verdict_section(verdict),
        missing=f'<p class="note">Not in this page: {sections.escape("; ".join(missing))}.</p>' if missing else "",
        figures=sections.figures_section(events),
        thinned=f"Each point of training is the mean of {thinned} reports." if thinned > 1 else "",
        picture=f'<img alt="The losses over the steps" src="data:image/png;base64,{picture}">' if picture else "",
        samples=sections.samples_section(events),
        evaluations=sections.evaluations_section(events),
        recipe=sections.recipe_section(config),
        machine=sections.machine_section(machine),
        loading=sections.loading_section(run, config),
        version=sections.escape(nanogpt_hf.__version__),
        made=sections.escape(datetime.now().astimezone().isoformat(" ", "minutes")),
        data=_json_in_html(data),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_in_html(tree: Any) -> str:
    """JSON in which no text can end the script element that it stands in."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(events: list[Event], verdict: Verdict | None, reference: Reference | None) -> tuple[dict, int]:
    """What page.js draws, and how many training reports one point stands for.

    Events that come together (training's, evaluation's) are a group: {"step": [...], "metrics": {name: [...]}, ...}.
    """
    training = [event for event in events if "train/loss" in event]
    many = -(-len(training) // _MOST_POINTS) or 1
    groups = []
    for group, size in ((training, many), ([e for e in events if "train/loss" not in e and names([e])], 1)):
        stretches = [group[i : i + size] for i in range(0, len(group), size)]
        if stretches:
            groups.append(
                {axis: [stretch[-1].get(axis, 0) for stretch in stretches] for axis in AXES}
                | {"metrics": {name: [_mean(stretch, name) for stretch in stretches] for name in names(group)}}
            )
    comparable = verdict is not None and verdict.kind not in ("other", "none")
    curve = reference.curves.get("val/loss") if reference and comparable else None
    return {"groups": groups, "band": curve and vars(curve)}, many


def _mean(stretch: list[Event], name: str) -> float | None:
    _, values = column(stretch, name)
    mean = float(f"{values.mean():.6g}") if len(values) else math.nan
    return mean if math.isfinite(mean) else None
