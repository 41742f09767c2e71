"""Train a grid of runs: a knob with several values, such as --optim.learning_rate 1e-3,3e-3, is swept.

Every combination of values is an ordinary run folder below the sweep's. Run the same command again to continue: what is
done is skipped, what was interrupted resumes, what failed is tried again. A failed run does not stop the others. At
the end there are a table (sweep.csv, sweep.json) and a plot (sweep.png), with --depth 2,3,4 also a fitted scaling law.

Values with commas, and lists, are quoted as in YAML: --eval.samples '["Once, ", "The "], []'.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.arguments import list_knobs
from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import DEPTH, add_flags
from nanogpt_hf.config.grid import build_grid, sweep_name
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.formatting import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/quickstart.yaml")
    add_flags(parser, DEPTH)
    parser.add_argument("--sweep-dir", metavar="DIR", help="folder of the runs (default runs/<recipe name>-<knobs>)")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the runs that are in the folder, and start again"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their sizes, and stop")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    runs = build_grid(arguments.recipe, overrides)
    folder = Path(arguments.sweep_dir or Path("runs") / sweep_name(runs))

    from nanogpt_hf.training.sweep import Sweep, locked, planned_rows, train_runs, write_report

    sweep = Sweep(arguments.recipe, runs, folder, overwrite=arguments.overwrite, log_level=arguments.log_level)
    if arguments.dry_run:
        from nanogpt_hf.reports.sweep import sweep_table

        show(f"{plural(len(runs), 'run')} below {folder}\n\n{sweep_table(planned_rows(runs))}\n\nnothing was started")
        return 0
    with locked(sweep):
        statuses, exit_status = train_runs(sweep)
        if Mesh.from_environment().is_main:
            show(write_report(sweep, statuses))
    return exit_status
