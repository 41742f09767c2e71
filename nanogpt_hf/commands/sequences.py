"""The command inspect."""

import argparse

from nanogpt_hf.commands.arguments import add_json_argument, add_option
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.values import bounded
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.find import find_run

_SHOWN = 60  # characters of a text; --json has all


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", metavar="N", type=bounded(int, 1), help="the step; 1 is the first")
    asked.add_argument("--find", metavar="TEXT", help="a text whose steps are listed")
    add_json_argument(parser, "the sequences or the steps, with whole texts")


def run_inspect(arguments: argparse.Namespace) -> None:
    """Show what a step of a run saw: each sequence with its place in the data, its text, and its
    loss under the newest checkpoint before the step, the highest loss first. Nothing is changed.

    --find TEXT lists the steps that saw a text, inside one sequence.
    """
    folder = find_run(arguments.run)

    from nanogpt_hf.runs.folder import step_of
    from nanogpt_hf.runs.metrics import read_metrics
    from nanogpt_hf.runs.provenance import branched_at
    from nanogpt_hf.training.sequences import sequences_of, steps_with
    from nanogpt_hf.training.verify import recipe_of, run_at

    config, step, text = recipe_of(folder), arguments.step, arguments.find
    kept = [step_of(path) for path in folder.checkpoint_folders()]
    last = max([0, *kept, *(event["step"] for event in read_metrics(folder))])
    last = min(last, config.train.max_steps)
    if step and step > last:
        raise UserError(f"--step {step}: the run has recorded {plural(last, 'step')}")
    begun, other = branched_at(folder)
    if step and step <= begun:
        raise UserError(f"--step {step}: was taken by {other}, of which this run is a branch")
    if text == "":
        raise UserError("--find: expected a text, got nothing")
    before = max((number for number in kept if number < (step or last + 1)), default=0)
    with run_at(folder, config, before, arguments.mesh) as run:
        if step is None:
            steps = [number for number in steps_with(run, text, last) if number > begun]
            tree = {"text": text, "steps": steps}
            show(f"{len(steps):,} of {plural(last, 'step')} saw it: {steps}")
        else:
            found = sequences_of(run, step)
            tree = {"step": step, "weights_of_step": before, "sequences": found}
            show(f"{plural(len(found), 'sequence')}; losses under the weights of step {before:,}")
            for row in found:
                place = ", ".join(f"{key} {row[key]}" for key in list(row)[1:-1])
                show(f"{row['loss']:.4f}  {place}  {row['text'][:_SHOWN]!r}")
    if arguments.json:
        write_json(arguments.json, tree)
