"""Repeat steps of a run on this machine, and compare each logged loss and gradient norm and the
sha256 of each kept checkpoint's tensors with what the run recorded. verified.jsonl and report.html
of the run record the result; nothing else of it is written.

Without --steps and --sample: from the oldest to the newest kept checkpoint. Exit status 1 if a step
differs. A run with train.gradient_groups is repeated on any number of processes that divides them,
others on as many as they were trained on: python cli.py launch --config_file F verify RUN.
"""

import argparse
import contextlib
from pathlib import Path

from nanogpt_hf.commands.arguments import add_option
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.values import bounded
from nanogpt_hf.errors import DataError, RunFolderError, UserError
from nanogpt_hf.formatting import format_duration
from nanogpt_hf.runs.find import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    steps = "from step A to step B; both have checkpoints, or A is 0"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A:B", help=steps, type=_steps)
    sample = "steps between N pairs of checkpoints, the same ones each time"
    which.add_argument("--sample", metavar="N", help=sample, type=bounded(int, 1))


def _steps(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two steps, A:B, got {text!r}") from None
    return first, last


def run(arguments: argparse.Namespace) -> int:
    folder, mesh = find_run(arguments.run), arguments.mesh
    folder.check_unlocked()

    from nanogpt_hf.config.sources import sources_of
    from nanogpt_hf.data.prepared import check_prepared, require_manifest
    from nanogpt_hf.reports.page import write_report
    from nanogpt_hf.runs.provenance import read_starts, recording_verification
    from nanogpt_hf.training import verify
    from nanogpt_hf.training.checkpoint import OtherFormatError

    config = verify.recipe_of(folder)
    verify.check_repeatable(folder, config, mesh)
    segments = verify.segments_to_verify(folder, arguments.steps, arguments.sample)
    for source in sources_of(config.data):
        require_manifest(Path(source.data.dir))
    texts = [f"{first:,} to {last:,}" for first, last in segments]
    first, last, differs = segments[0][0], segments[-1][1], ""
    say = show if mesh.is_main else lambda *_: None
    recording = recording_verification(folder) if mesh.is_main else contextlib.nullcontext(say)
    with recording as record:
        try:
            seconds = verify.seconds_to_repeat(folder, segments, mesh)
            about = f"about {format_duration(seconds)} at the run's speed per process"
            say(f"repeating steps {', '.join(texts)}: {about}")
            check_prepared(config.data)
            for (first, last), text in zip(segments, texts, strict=True):
                with verify.run_at(folder, config, first, mesh) as repeated:
                    found = verify.first_difference(repeated, folder, last)
                if found:
                    step, lines = found
                    starts = [start.get("step", 0) for start in read_starts(folder)]
                    if resumed := [at for at in starts if step <= at < last]:
                        lines.append(
                            f"the run was resumed at step {resumed[-1]:,}, and recipe.yaml is that "
                            "of its last start: knobs that changed then explain differences "
                            "before it"
                        )
                    differs = "\n  ".join([f"step {step:,}: differs", *lines])
                    break
                say(f"steps {text}: equal")
                record(first, last, "equal")
        except OtherFormatError:
            raise
        except (DataError, RunFolderError) as error:  # another text, a damaged file
            differs = f"differs: {error}"
        if differs:
            say(differs)
            record(first, last, differs)
    with contextlib.suppress(UserError, OSError):  # a folder of another user
        if mesh.is_main:
            write_report(folder, folder.report)
    return 1 if differs else 0
