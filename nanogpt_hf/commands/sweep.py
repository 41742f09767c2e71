"""Train a grid of runs: a knob with several values, such as --train.seed 1,2,3, is swept.

Every combination of values is an ordinary run folder below the sweep's. Run the same command again
to continue: what is done is skipped, what was interrupted resumes, what failed is tried again. A
failed run does not stop the others. At the end there are a table (sweep.json) and a plot
(sweep.png), with --depth 2,3,4 also a fitted scaling law.

Values with commas are quoted as in YAML: --data.text_column '"a,b", c'. A list is one value.
"""

import argparse
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import (
    add_flags,
    add_json_argument,
    add_knobs,
    add_option,
    add_recipe_argument,
    list_knobs,
)
from nanogpt_hf.console import show
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser)
    add_knobs(parser, "depth")
    add_option(parser, "--sweep-dir DIR", "folder of the runs (default runs/<recipe name>-<knobs>)")
    machine = "an accelerate config, with which `launch` starts each run (default: one process)"
    add_option(parser, "--config_file F", machine)
    flags = {
        "--overwrite": "remove the runs that are in the folder, and start again",
        "--dry-run": "list the runs with their sizes, and stop",
    }
    add_flags(parser, flags)
    add_json_argument(parser, "the table")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from nanogpt_hf.training import sweep as grid

    machine, runs = arguments.config_file, grid.build_grid(arguments.recipe, overrides)
    knobs = "-".join(key.rpartition(".")[2] for key in runs[0].values)
    folder = Path(arguments.sweep_dir or Path("runs") / f"{runs[0].config.name}-{knobs}")
    launcher = ("launch", "--config_file", machine) if machine else ()
    options = {"overwrite": arguments.overwrite, "log_level": arguments.log_level}
    sweep, exit_status = grid.Sweep(arguments.recipe, runs, folder, launcher, **options), 0
    if arguments.dry_run:
        rows = sweep.planned()
        tree: dict[str, Any] = {"sweep": str(folder), "runs": rows}
        lines = [f"{plural(len(runs), 'run')} below {folder}", "", grid.table(rows)]
        lines += ["", "nothing was started"]
    else:
        with grid.locked(sweep):
            statuses, exit_status = grid.train_runs(sweep)
            tree = grid.write_results(sweep, statuses)
        lines = [grid.table(tree["runs"]), "", *tree["seed_means"]]
        if law := tree["fit"]:
            lines.append(
                f"scaling over depths: loss = {law['coefficient']:.4g} × "
                f"FLOPs^{law['exponent']:.4f} ± {law['standard_error']:.4f}"
            )
        lines.append(f"{folder}: sweep.png, sweep.json")
    show("\n".join(lines))
    if arguments.json:
        write_json(arguments.json, tree)
    return exit_status
