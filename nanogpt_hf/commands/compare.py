"""Compare runs: a table, differences between the recipes, a plot of the losses, and whether each loss is normal.

A loss is normal inside the band of the recipe's reference, which comes from several seeds: recipes/reference/, or
--reference FILE. Runs may still be training.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.commands.console import show
from nanogpt_hf.config.sources import source_text
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import output_file, output_target
from nanogpt_hf.runs.find import find_run

if TYPE_CHECKING:
    from nanogpt_hf.config.schema import Config
    from nanogpt_hf.runs.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--by", choices=("step", "tokens", "time"), default="step", help="x axis; default %(default)s")
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, help="the plot, - is stdout (default compare.png)"
    )
    parser.add_argument("--reference", metavar="FILE", type=Path, help="another reference to compare with")
    parser.add_argument(
        "--make-reference",
        metavar="FILE",
        type=output_file,
        help="write a reference from these runs, which may differ only in their seed, and exit",
    )


def run(arguments: argparse.Namespace) -> None:
    folders = [find_run(name) for name in dict.fromkeys(arguments.runs)]

    from nanogpt_hf.config.load import load_config
    from nanogpt_hf.reports.comparison import compare_recipes, compare_runs
    from nanogpt_hf.reports.curves import draw_comparison
    from nanogpt_hf.reports.reference import find_reference, make_reference, read_reference, write_reference
    from nanogpt_hf.reports.verdict import judge
    from nanogpt_hf.runs.metrics import read_metrics

    if arguments.make_reference:
        reference = make_reference(folders, arguments.make_reference.stem)
        with output_target(arguments.make_reference) as target:
            write_reference(reference, target)
        curve = reference.curves["val/loss"]
        show(f"{arguments.make_reference}: {len(folders)} seeds; at step {curve.step[-1]:,} the validation loss is")
        show(f"{curve.mean[-1]:.4f} on average, and the band {curve.low[-1]:.4f} to {curve.high[-1]:.4f}")
        return
    given = arguments.reference and read_reference(arguments.reference)
    configs, events = {}, {}
    for name, folder in _names(folders).items():
        configs[name], events[name] = load_config(folder.recipe), read_metrics(folder)
        if not events[name]:
            raise UserError(f"{folder.path}: metrics.jsonl holds no event yet; wait for the first evaluation")
    metric = "val/loss" if _same_tokens(configs) else "val/bits_per_byte"
    show(compare_runs(events, metric))
    if metric != "val/loss":
        show("\nthe tokenizers differ, so the runs are compared by bits per byte instead of loss per token")
    if len({(source_text(c.data), c.data.format, c.data.validation_split) for c in configs.values()}) > 1:
        show("\nthe validation texts differ, so the losses are of different texts")
    if len(folders) > 1:
        show(f"\n{compare_recipes(configs)}")
    references = {name: given or find_reference(config) for name, config in configs.items()}
    show("\nis the loss normal?")
    for name, config in configs.items():
        verdict = judge(references[name], config, events[name])
        show(f"  {name}: {verdict.sentence}")
        for number, cause in enumerate(verdict.causes, 1):
            show(f"    check {number}: {cause}")
    by = "seconds" if arguments.by == "time" else arguments.by
    same_reference = len({reference and reference.name for reference in references.values()}) == 1
    band = next(iter(references.values())) if same_reference else None
    output = arguments.output or Path("compare.png")
    with output_target(output) as target:
        drawn = draw_comparison(events, metric, by, target, band)
    if drawn:
        show(f"\nplot: {output}")


def _names(folders: list["RunFolder"]) -> dict[str, "RunFolder"]:
    """Names of runs for the table: of their folders, or whole paths if two folders have one name."""
    short = [folder.path.resolve().name for folder in folders]
    return dict(zip(short if len(set(short)) == len(short) else [str(f.path) for f in folders], folders, strict=True))


def _same_tokens(configs: dict[str, "Config"]) -> bool:
    """Whether all runs predict tokens of one tokenizer: `char` and `bpe` differ with the text."""
    from nanogpt_hf.reports.reference import text_facts

    facts = [text_facts(config) for config in configs.values()]
    if all(facts):
        return len({fact["tokenizer_hash"] for fact in facts if fact}) == 1
    kinds = {
        (data.tokenizer, data.vocab_size, source_text(data) if data.tokenizer in ("char", "bpe") else "")
        for data in (config.data for config in configs.values())
    }
    return len(kinds) == 1
