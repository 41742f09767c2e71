"""Repeat steps of a run on this machine, and compare each logged loss and gradient norm and the
sha256 of each kept checkpoint's tensors with what the run recorded. The run folder is only read.

Without --steps: from the oldest to the newest kept checkpoint. Exit status 1 if a step differs.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.arguments import add_option
from nanogpt_hf.commands.console import show
from nanogpt_hf.errors import DataError, RunFolderError
from nanogpt_hf.formatting import format_duration
from nanogpt_hf.runs.find import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    steps = "from step A to step B; both have checkpoints, or A is 0"
    add_option(parser, "--steps A:B", steps, type=_steps)


def _steps(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two steps, A:B, got {text!r}") from None
    return first, last


def run(arguments: argparse.Namespace) -> int:
    folder = find_run(arguments.run)
    folder.check_unlocked()

    from nanogpt_hf.config.sources import sources_of
    from nanogpt_hf.data.prepared import check_prepared, require_manifest
    from nanogpt_hf.runs.provenance import read_starts
    from nanogpt_hf.training import verify
    from nanogpt_hf.training.checkpoint import read_checkpoint

    config = verify.recipe_of(folder)
    verify.check_repeatable(folder, config)
    first, last = verify.steps_to_verify(folder, arguments.steps)
    for source in sources_of(config.data):
        require_manifest(Path(source.data.dir))
    try:
        begun, ended = (
            read_checkpoint(folder.checkpoint(step)).state.seconds if step else 0.0
            for step in (first, last)
        )
        took = f"which took the run {format_duration(ended - begun)}"
        show(f"repeating steps {first:,} to {last:,}, {took}")
        check_prepared(config.data)
        with verify.run_at(folder, config, first) as repeated:
            found = verify.first_difference(repeated, folder, last)
    except (DataError, RunFolderError) as error:  # another text, a damaged file
        show(f"differs: {error}")
        return 1
    if found is None:
        show(f"steps {first:,} to {last:,}: equal")
        return 0
    step, lines = found
    starts = [start["step"] for start in read_starts(folder) if step <= start.get("step", 0) < last]
    if starts:
        lines.append(
            f"the run was resumed at step {starts[-1]:,}, and recipe.yaml is that of its last "
            "start: knobs that changed then explain differences before it"
        )
    show("\n  ".join([f"step {step:,}: differs", *lines]))
    return 1
