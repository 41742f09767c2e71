"""Write report.html of a run: what was run, its curves, samples, evaluations, recipe and machine, on one page.

Training writes it at the end of every run. The page needs no network; RUN may still be training.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.compare import find_run
from nanogpt_hf.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to (default RUN/report.html)")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    if overrides:
        raise UserError(f"cli.py report: --{overrides[0][0]}: a report has no recipe to set knobs of")
    folder = find_run(arguments.run)

    from nanogpt_hf.reports.page import write_report

    path = arguments.output or folder.report
    write_report(folder, path)
    print(path)
