"""The command that trains a grid of runs: sweep."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import (
    add_flag,
    add_knobs,
    add_option,
    add_output,
    add_recipe_argument,
)
from nanogpt_hf.config.stated import Overrides
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.training.sweep_grid import Sweep, build_grid


def add_sweep_arguments(parser: ArgumentParser) -> None:
    add_recipe_argument(parser, "a recipe, for example recipes/quickstart.yaml", nargs="?")
    add_knobs(parser, "depth", "from", "data", "lora", "loss", "task", "reward")
    add_option(parser, "--sweep-dir DIR", "folder of the runs (default runs/<recipe name>-<knobs>)")
    machine = "an accelerate config, with which `launch` starts each run (default: one process)"
    add_option(parser, "--config_file F", machine)
    add_flag(parser, "--overwrite", "remove the runs that are in the folder, and start again")
    add_flag(parser, "--dry-run", "list the runs with their sizes, and stop")
    add_output(parser, "--json", "also write the table to FILE")


def run_sweep(arguments: Namespace, overrides: Overrides) -> int:
    """Train a grid of runs: a knob with several values, such as --train.seed 1,2,3, is swept.

    The recipe and its knobs decide which command trains each run: pretrain, finetune, align or rl.
    From a model no recipe is needed: nanogpt-hf sweep --from gpt2 --data my.txt --lora 4,8

    Every combination of values is an ordinary run folder below the sweep's. The same command again
    skips what is done, resumes what was interrupted and repeats what failed. A failed run does not
    stop the others. At the end there are a table (sweep.json), the curves (sweep.png) and the score
    over each knob (settings.png): means over train.seed, and for --depth 2,3,4 a scaling law.

    Values with commas are quoted as in YAML: --data.text_column '"a,b", c'. A list is one value.
    """
    if not arguments.recipe and "finetune.model" not in dict(overrides):
        raise UserError(
            f"{program()} sweep: needs a recipe, or a model to start from: --from gpt2, a model "
            "folder or a run folder"
        )

    # The knobs with several values name the folder: another grid gets another one.
    runs = build_grid(arguments.recipe, overrides)
    # The imports take seconds; mistakes above should not wait for them.
    from nanogpt_hf.training import sweep as sweeps
    from nanogpt_hf.training.sweep_results import planned, table, write_results
    from nanogpt_hf.training.sweep_steps import with_steps

    swept = dict.fromkeys(key for run in runs for key in run.values)
    knobs = "-".join(key.rpartition(".")[2] for key in swept)
    # Without a recipe, the name of a run has its model and its text, which may be swept.
    names = {run.config.name for run in runs}
    name = names.pop() if len(names) == 1 else runs[0].command
    folder = Path(arguments.sweep_dir or Path("runs") / f"{name}-{knobs}")
    sweep = Sweep(
        arguments.recipe,
        runs,
        folder,
        arguments.config_file,
        overwrite=arguments.overwrite,
        log_level=arguments.log_level,
    )
    exit_status = 0
    # All runs are checked before the first one is trained, which may take hours.
    sweeps.check_runs(sweep)
    sweep = with_steps(sweep)
    if arguments.dry_run:
        rows = planned(sweep)
        tree: dict[str, Any] = {"sweep": str(folder), "runs": rows}
        lines = [f"{plural(len(runs), 'run')} below {folder}", "", table(rows, sweep.score)]
        lines += ["", *_unknown_steps(sweep), "nothing was started"]
    else:
        with sweeps.locked(sweep):
            statuses, exit_status = sweeps.train_runs(sweep)
            tree = write_results(sweep, statuses)
        lines = _results(sweep, tree)
    show("\n".join(lines))
    write_json(arguments.json, tree)
    return exit_status


def _unknown_steps(sweep: Sweep) -> list[str]:
    """Lines on the knobs from which runs find their steps when they start."""
    found = {
        "train.epochs": "counted after `prepare`",
        "train.budget": "timed when the run starts",
    }
    knobs = {run.config.train.steps_from for run in sweep.runs}
    return [f"steps of {knob}: {how}" for knob, how in found.items() if knob in knobs]


def _results(sweep: Sweep, tree: dict[str, Any]) -> list[str]:
    """Lines about the runs of a sweep: table, scaling law, means over seeds, best runs, files."""
    from nanogpt_hf.reports.settings import settings_table
    from nanogpt_hf.training.sweep_results import best_lines, table

    lines = [table(tree["runs"], sweep.score), ""]
    if law := tree["fit"]:
        lines.append(
            f"scaling over depths: loss = {law['coefficient']:.4g} × "
            f"FLOPs^{law['exponent']:.4f} ± {law['standard_error']:.4f}"
        )
    if len(tree["settings"]) < len(sweep.runs):
        lines += [
            "means over the seeds, best first:",
            settings_table(tree["settings"], sweep.score),
            "",
        ]
    lines += best_lines(tree, sweep.score)
    # No run may have been evaluated, and no knob may have two numbers.
    written = ("sweep.png", "settings.png", "sweep.json")
    names = ", ".join(name for name in written if (sweep.folder / name).is_file())
    lines.append(f"{sweep.folder}: {names}")
    return lines
