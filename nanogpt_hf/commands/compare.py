"""The commands that show runs: compare and report."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import add_json_argument, add_option
from nanogpt_hf.config.sources import source_text
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import align
from nanogpt_hf.runs.files import output_file, output_target, write_json
from nanogpt_hf.runs.find import find_run

if TYPE_CHECKING:
    from nanogpt_hf.config.schema import Config
    from nanogpt_hf.runs.folder import RunFolder


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "runs RUN", "run folders", nargs="+")
    add_option(parser, "--by", "x axis", choices=("step", "tokens", "time"), default="step")
    plot = "the plot, - is stdout (default compare.png)"
    add_option(parser, "--output FILE", plot, type=output_file)
    add_option(parser, "--reference FILE", "another reference to compare with", type=Path)
    made = "write a reference from these runs, which may differ only in their seed, and exit"
    add_option(parser, "--make-reference FILE", made, type=output_file)
    add_json_argument(parser, "the tables and the verdicts")


def run_compare(arguments: argparse.Namespace) -> None:
    """Compare runs: a table, differences between the recipes, a plot of the losses, and whether
    each loss is normal.

    A loss is normal inside the band of the recipe's reference, which comes from several seeds:
    recipes/reference/, or --reference FILE. Runs may still be training.
    """
    folders = [find_run(name) for name in dict.fromkeys(arguments.runs)]

    from nanogpt_hf.config.load import load_config
    from nanogpt_hf.reports.comparison import compare_recipes, compare_runs, summarize
    from nanogpt_hf.reports.curves import draw_curves
    from nanogpt_hf.reports.reference import find_reference, judge, read_reference
    from nanogpt_hf.runs.metrics import read_metrics

    if arguments.make_reference:
        _make_reference(folders, arguments.make_reference)
        return
    given = arguments.reference and read_reference(arguments.reference)
    configs, events = {}, {}
    for name, folder in _names(folders).items():
        configs[name], events[name] = load_config(folder.recipe), read_metrics(folder)
        if not events[name]:
            raise UserError(
                f"{folder.path}: metrics.jsonl holds no event yet; wait for the first evaluation"
            )
    metric = "val/loss" if _same_tokens(configs) else "val/bits_per_byte"
    runs = {name: summarize(run_events, metric) for name, run_events in events.items()}
    show(compare_runs(runs, metric))
    if metric != "val/loss":
        show(
            "\nthe tokenizers differ, so the runs are compared by bits per byte instead of loss "
            "per token"
        )
    texts = [
        (source_text(config.data), config.data.format, config.data.validation_split)
        for config in configs.values()
    ]
    if len(set(texts)) > 1:
        show("\nthe validation texts differ, so the losses are of different texts")
    knobs = compare_recipes(configs)
    if len(folders) > 1 and knobs:
        rows = [[key, *values.values()] for key, values in knobs.items()]
        show("\nthe recipes differ in\n" + align([["knob", *configs], *rows]))
    elif len(folders) > 1:
        show("\nthe recipes are equal")
    references = {name: given or find_reference(config) for name, config in configs.items()}
    show("\nis the loss normal?")
    for name, config in configs.items():
        verdict = judge(references[name], config, events[name])
        runs[name] |= {"verdict": verdict.kind, "reason": verdict.sentence}
        show(f"  {name}: {verdict.sentence}")
        for number, cause in enumerate(verdict.causes, 1):
            show(f"    check {number}: {cause}")
    if arguments.json:
        write_json(arguments.json, {"metric": metric, "runs": runs, "knobs": knobs})
    by = "seconds" if arguments.by == "time" else arguments.by
    same_reference = len({reference and reference.name for reference in references.values()}) == 1
    band = next(iter(references.values())) if same_reference else None
    output = arguments.output or Path("compare.png")
    with output_target(output) as target:
        drawn = draw_curves(events, target, metric, by, band)
    if drawn:
        show(f"\nplot: {output}")


def _make_reference(folders: list["RunFolder"], output: Path) -> None:
    from nanogpt_hf.reports.reference import make_reference, write_reference

    reference = make_reference(folders, output.stem)
    with output_target(output) as target:
        write_reference(reference, target)
    step, mean, low, high = (reference.curve[side][-1] for side in ("step", "mean", "low", "high"))
    show(
        f"{output}: {len(folders)} seeds; at step {step:,} the validation loss is {mean:.4f} on "
        f"average, and the band {low:.4f} to {high:.4f}"
    )


def _names(folders: list["RunFolder"]) -> dict[str, "RunFolder"]:
    """Names of runs for the table: of their folders, or their paths if two are equal."""
    short = [folder.path.resolve().name for folder in folders]
    return dict(
        zip(
            short if len(set(short)) == len(short) else [str(f.path) for f in folders],
            folders,
            strict=True,
        )
    )


def _same_tokens(configs: dict[str, "Config"]) -> bool:
    """Whether all runs predict tokens of one tokenizer: `char` and `bpe` differ with the text."""
    from nanogpt_hf.reports.reference import text_facts

    facts = [text_facts(config) for config in configs.values()]
    if all(facts):
        return len({fact["tokenizer_hash"] for fact in facts if fact}) == 1
    kinds = {
        (
            data.tokenizer,
            data.vocab_size,
            source_text(data) if data.tokenizer in ("char", "bpe") else "",
        )
        for data in (config.data for config in configs.values())
    }
    return len(kinds) == 1


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    place = "where to, - is stdout (default RUN/report.html)"
    add_option(parser, "--output FILE", place, type=output_file)


def run_report(arguments: argparse.Namespace) -> None:
    """Write a run's report.html: summary, curves, samples, evaluations, recipe, machine.

    Training writes it at the end of every run. The page needs no network. RUN may still be
    training.
    """
    folder = find_run(arguments.run)

    from nanogpt_hf.reports.page import write_report

    if arguments.output:
        with output_target(arguments.output) as target:
            write_report(folder, target)
    else:
        write_report(folder, folder.report)
    show(arguments.output or folder.report)
