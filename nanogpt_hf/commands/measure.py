"""The commands that measure models and show runs: evaluate, compare and report."""

import os
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import (
    Found,
    add_model_argument,
    add_option,
    add_output,
    found_model,
)
from nanogpt_hf.config.names import MADE_TOKENIZERS
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import source_text
from nanogpt_hf.config.stated import Overrides
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation import table
from nanogpt_hf.evaluation.base import Evaluation, Loaded, Request, Subject
from nanogpt_hf.formatting import align, shows_bars
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import STDOUT, output_target, write_json
from nanogpt_hf.runs.find import find_run
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe

if TYPE_CHECKING:
    from nanogpt_hf.reports.reference import Reference, Verdict
    from nanogpt_hf.runs.metrics import Event

_DEFAULT_PLOT = Path("compare.png")
# How often a model that a run replaces meanwhile is read.
_READS = 3


def add_compare_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "runs RUN", "run folders", nargs="+")
    add_option(
        parser, "--by", "x axis of the plot", choices=("step", "tokens", "time"), default="step"
    )
    add_output(parser, "--output", f"write the plot to FILE (default {_DEFAULT_PLOT})")
    made = "write a reference from these runs, which may differ only in their seed, and exit"
    add_output(parser, "--make-reference", made)
    add_output(parser, "--json", "also write the tables and the verdicts to FILE")


def run_compare(arguments: Namespace) -> None:
    """Compare runs: a table, differences between the recipes, a plot of the losses, and whether
    each loss is normal.

    A loss is normal inside the band of the recipe's reference in recipes/reference/, which comes
    from several seeds. Runs may still be training.
    """
    # A run that is named twice is one run.
    folders = [find_run(name) for name in dict.fromkeys(arguments.runs)]

    from nanogpt_hf.reports.comparison import (
        REWARD,
        compare_recipes,
        compare_runs,
        score_of,
        summarize,
    )
    from nanogpt_hf.reports.curves import draw_curves
    from nanogpt_hf.reports.reference import find_reference
    from nanogpt_hf.runs.metrics import read_metrics
    from nanogpt_hf.runs.provenance import steps_from

    if arguments.make_reference:
        _make_reference(folders, arguments.make_reference)
        return
    output = arguments.output or _default_plot()
    # By the folder's path as it was typed: the names in the tables and in the plot.
    configs = {}
    events = {}
    for folder in folders:
        name = str(folder.path)
        configs[name] = read_recipe(folder)
        events[name] = read_metrics(folder)
        if not events[name]:
            raise UserError(
                f"{name}: metrics.jsonl holds no event yet; wait for the first evaluation"
            )
    metric = _common_metric(configs)
    runs = {
        name: summarize(events[name], metric, score_of(config)) for name, config in configs.items()
    }
    show(compare_runs(runs, metric))
    knobs = compare_recipes(configs)
    if len(folders) > 1:
        rows = [["knob", *configs], *([key, *values.values()] for key, values in knobs.items())]
        show("\nthe recipes differ in\n" + align(rows) if knobs else "\nthe recipes are equal")
    for folder in folders:
        name = str(folder.path)
        max_steps = configs[name].train.max_steps
        if knob := steps_from(folder, max_steps):
            runs[name]["steps_from"] = knob
            show(f"{name}: train.max_steps {max_steps:,} follows from {knob}")
    references = {name: find_reference(config) for name, config in configs.items()}
    show("\nis the loss normal?")
    for name, config in configs.items():
        verdict = _verdict(references[name], config, events[name])
        runs[name] |= {"verdict": verdict.kind, "reason": verdict.sentence}
        show(f"  {name}: {verdict.sentence}")
        for number, cause in enumerate(verdict.causes, 1):
            show(f"    check {number}: {cause}")
    write_json(arguments.json, {"metric": metric, "runs": runs, "knobs": knobs})
    # One band fits the plot only if all runs are of the same experiment.
    names = {reference and reference.name for reference in references.values()}
    band = next(iter(references.values())) if len(names) == 1 else None
    by = "seconds" if arguments.by == "time" else arguments.by
    with output_target(output) as target:
        # Held-out pass@1 fits on the axis of training's rewards, both are from 0 to 1.
        shown = "val/pass@1" if metric == REWARD else metric
        drawn = draw_curves(events, target, shown, by, band)
    if drawn and output != STDOUT:
        show(f"\nplot: {output}")


def _default_plot() -> Path:
    """The plot of a call without --output. Raises UserError if it cannot be written, or would
    replace a file of another program, which the command did not ask for.
    """
    from nanogpt_hf.reports.plot_file import is_own_plot

    if _DEFAULT_PLOT.exists() and not is_own_plot(_DEFAULT_PLOT):
        raise UserError(
            f"{_DEFAULT_PLOT}: exists, and has no mark of a plot of {program()}; choose the file "
            "of the plot: --output FILE"
        )
    if not os.access(_DEFAULT_PLOT if _DEFAULT_PLOT.exists() else ".", os.W_OK):
        raise UserError(
            f"{_DEFAULT_PLOT}: cannot be written in this folder; choose the file of the plot: "
            "--output FILE"
        )
    return _DEFAULT_PLOT


def _make_reference(folders: list[RunFolder], output: Path) -> None:
    """Write a reference of runs that differ only in their seed."""
    from nanogpt_hf.reports.reference import make_reference

    reference = make_reference(folders, output.stem)
    write_json(output, {key: value for key, value in asdict(reference).items() if value})
    low = reference.curve["low"][-1]
    high = reference.curve["high"][-1]
    show(f"{output}: {len(folders)} seeds; the band ends at {low:.4f} to {high:.4f}")


def _common_metric(configs: dict[str, Config]) -> str:
    """Choose the metric by which runs can be compared."""
    from nanogpt_hf.reports.comparison import REWARD

    if all(config.rl.task for config in configs.values()):
        return REWARD
    # Losses per token of different tokenizers say nothing about each other.
    same_tokens = len({_tokens_of(config) for config in configs.values()}) == 1
    return "val/loss" if same_tokens else "val/bits_per_byte"


def _verdict(reference: "Reference | None", config: Config, events: "list[Event]") -> "Verdict":
    """Judge the loss of a run against its reference."""
    from nanogpt_hf.reports.reference import Verdict, judge

    if config.rl.task:
        return Verdict("none", "rewards have no reference")
    return judge(reference, config, events)


def _tokens_of(config: Config) -> object:
    """A value that is equal for runs with the same tokenizer."""
    data = config.data
    # These tokenizers are made from the text.
    made_from = source_text(data) if data.tokenizer in MADE_TOKENIZERS else ""
    return data.tokenizer, data.vocab_size, made_from


def add_report_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    add_output(parser, "--output", "write the report to FILE (default RUN/report.html)")


def run_report(arguments: Namespace) -> None:
    """Write a run's report.html: summary, curves, samples, evaluations, recipe, machine.

    Training writes it at the end of every run. The page needs no network. RUN may still be
    training.
    """
    folder = find_run(arguments.run)
    # Written by a rename: the folder decides.
    if not (arguments.output or os.access(folder.path, os.W_OK)):
        raise UserError(f"{folder.report}: cannot be written; choose its file: --output FILE")

    from nanogpt_hf.reports.page import write_report

    # In the run folder a link is not followed: it may lead to the report of another run.
    named = arguments.output
    with output_target(named) if named else nullcontext(folder.report) as target:
        write_report(folder, target)
    if named != STDOUT:
        show(named or folder.report)


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    table.add_options(parser)
    texts = "texts in one forward pass"
    add_option(parser, "--batch-size N", texts, type=bounded(int, 1), default=8)
    add_output(parser, "--json --output", "also write all figures and the protocol to FILE")


def run_evaluate(arguments: Namespace, overrides: Overrides) -> None:
    """Measure a model: loss on a text, lm-eval's tasks, pass@k of its answers, the CORE score.

    Several processes (nanogpt-hf launch ... evaluate ...) share the work; their number changes the
    results by rounding only.
    """
    wanted, knobs = table.asked_for(arguments, overrides)

    import datasets
    from transformers.utils import logging

    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator, describe_machine
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.runs.provenance import versions

    # Libraries would show bars of their own, for every file that they read.
    logging.disable_progress_bar()
    datasets.disable_progress_bars()

    # Every process loads the model and the data, and all compare the facts of what they have read,
    # before any of them waits for another in a forward pass.
    load = partial(_load_evaluations, arguments, knobs, wanted)
    (request, loaded), facts = prepare_on_all_ranks(arguments.mesh, load)
    with one_line_for_a_lost_process():
        accelerator = build_evaluation_accelerator(arguments.mesh)
        is_main = accelerator.is_main_process
        subject = Subject(
            name=facts["model"]["name"],
            model=request.model.to(accelerator.device),
            tokenizer=request.tokenizer.hf,
            accelerator=accelerator,
            batch_size=arguments.batch_size,
            shows_bars=is_main and shows_bars(),
        )
        machine = describe_machine(accelerator)
        results = {"model": facts["model"], "machine": machine, "versions": versions()}
        for evaluation in loaded:
            for found in evaluation.measure(subject):
                # A part is printed as soon as it is measured.
                results |= found.figures
                if is_main and found.lines:
                    show(*found.lines, sep="\n")
    # All processes have the same results.
    if is_main:
        write_json(arguments.json, results)


def _load_evaluations(
    arguments: Namespace, knobs: dict[str, Any], wanted: list[Evaluation]
) -> tuple[tuple[Request, list[Loaded]], dict[str, Any]]:
    """Load a model and what its evaluations need; return them, and facts that all processes must
    share.
    """
    with found_model(arguments.model, arguments.step) as found:
        model, tokenizer, digest = _read_model(found)
    request = Request(arguments, knobs, model, tokenizer)
    facts: dict[str, Any] = {"model": {"name": found.name, "sha256": digest}}
    loaded = [evaluation.load(request) for evaluation in wanted]
    for evaluation in loaded:
        facts |= evaluation.facts
    return (request, loaded), facts


def _read_model(found: Found) -> tuple[Any, Any, str | None]:
    """Load a model and its tokenizer; return them, and the digest of these weights, which a model
    on the Hub has not.

    Again if its run has replaced them meanwhile. Raises UserError if it does so each time.
    """
    from nanogpt_hf.data.hf_tokenizer import check_vocabulary
    from nanogpt_hf.data.manifest import file_digest, file_state
    from nanogpt_hf.data.tokenizer import build_tokenizer
    from nanogpt_hf.model.load import load_model

    for _ in range(_READS):
        weights = sorted(Path(found.folder).glob("model*.safetensors"))
        before = file_state(weights)
        model = load_model(found.folder)
        tokenizer = build_tokenizer(found.folder, (), knob="")
        digest = file_digest(weights) if weights else None
        if file_state(weights) == before:
            check_vocabulary(found.name, tokenizer.vocab_size, model.config.vocab_size)
            return model, tokenizer, digest
    raise UserError(
        f"{found.name}: was replaced whenever it was read; evaluate it when its run does not train"
    )
