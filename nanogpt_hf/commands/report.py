"""Write a run's report.html: summary, curves, samples, evaluations, recipe and machine on one page.

Training writes it at the end of every run. The page needs no network. RUN may still be training.
"""

import argparse

from nanogpt_hf.commands.console import show
from nanogpt_hf.runs.files import output_file, output_target
from nanogpt_hf.runs.find import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, help="where to, - is stdout (default RUN/report.html)"
    )


def run(arguments: argparse.Namespace) -> None:
    folder = find_run(arguments.run)

    from nanogpt_hf.reports.page import write_report

    if arguments.output:
        with output_target(arguments.output) as target:
            write_report(folder, target)
    else:
        write_report(folder, folder.report)
    show(arguments.output or folder.report)
