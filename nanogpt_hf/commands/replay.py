"""The commands that need a run's steps again: verify, inspect and branch."""

import contextlib
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from typing import Any

from nanogpt_hf.commands.arguments import (
    add_option,
    add_output,
    check_steps_known,
    list_knobs,
)
from nanogpt_hf.config.schema import KNOBS, Config, replace_knobs
from nanogpt_hf.config.stated import Overrides, as_overrides, stated_knobs
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, RunFolderError, UserError
from nanogpt_hf.formatting import format_duration, plural
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.find import find_checkpoint, find_run
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.recipe import read_recipe, read_recipe_to_train, recipe_differences
from nanogpt_hf.runs.state import KnobChange, is_fixed, knobs_at

_SHOWN = 60  # characters of a text; --json has all
# Knobs that may not change while a run is resumed, but may in a branch.
_FREE = ("data.", "train.")


def add_verify_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    steps = "repeat the steps from A to B; both have checkpoints, or A is 0"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A:B", help=steps, type=_steps)
    sample = "repeat the steps between N pairs of checkpoints, the same pairs each time"
    which.add_argument("--sample", metavar="N", help=sample, type=bounded(int, 1))


def _steps(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise ArgumentTypeError(f"expected two steps, A:B, got {text!r}") from None
    return first, last


def run_verify(arguments: Namespace) -> int:
    """Repeat steps of a run on this machine, and compare each logged loss and gradient norm and the
    sha256 of each kept checkpoint's tensors with what the run recorded. verified.jsonl and
    report.html of the run record the result; nothing else of it is written.

    Without --steps and --sample, all steps from the oldest to the newest kept checkpoint are
    repeated. The exit status is 1 if a step differs. A run with train.gradient_groups is repeated
    on any number of processes that divides the groups, another run on as many processes as it was
    trained on: nanogpt-hf launch --config_file F verify RUN.
    """
    folder = find_run(arguments.run)
    mesh = arguments.mesh
    folder.check_unlocked()

    from nanogpt_hf.checkpoint.reader import OtherFormatError
    from nanogpt_hf.data.prepared import check_prepared, require_prepared
    from nanogpt_hf.replay import repeatable, verify
    from nanogpt_hf.runs.provenance import record_verification

    config = verify.recipe_of(folder)
    segments = repeatable.segments_to_verify(folder, arguments.steps, arguments.sample)
    repeatable.check_repeatable(folder, config, mesh, segments)
    # Verifying must not prepare the data again: it would no longer be the data of the run.
    require_prepared(config.data)
    texts = [f"{first:,} to {last:,}" for first, last in segments]
    # If nothing can be repeated at all, the record is about all steps that were asked for.
    first = segments[0][0]
    last = segments[-1][1]
    differs = ""
    # All processes repeat the steps, and one of them reports.
    say = show if mesh.is_main else lambda *_: None
    record = partial(record_verification, folder) if mesh.is_main else lambda *_: None
    try:
        seconds = repeatable.seconds_to_repeat(folder, segments, mesh)
        about = f"about {format_duration(seconds)} at the run's speed per process"
        say(f"repeating steps {', '.join(texts)}: {about}")
        check_prepared(config.data)
        for (first, last), text in zip(segments, texts, strict=True):
            bound, found = _repeat_segment(folder, first, last, mesh)
            if found:
                step, lines = found
                differs = "\n  ".join([f"step {step:,}: differs", *lines])
                break
            result, why = _equality(bound)
            say(f"steps {text}: {result}{why}")
            record(first, last, result)
    except OtherFormatError:
        # A checkpoint of another version says nothing about the run.
        raise
    except (DataError, RunFolderError) as error:
        # Another text or a damaged file is a result, too: the run cannot be had again from them.
        differs = f"differs: {error}"
    if differs:
        say(differs)
        record(first, last, differs)
    if mesh.is_main:
        _write_report(folder)
    return 1 if differs else 0


def _equality(bound: float) -> tuple[str, str]:
    """State how equal repeated numbers are, and the reason if not bit for bit."""
    if not bound:
        return "equal", ""
    result = f"equal to rounding, within {bound:.1g} of each number"
    return result, ", since the run was trained without train.deterministic"


def _write_report(folder: RunFolder) -> None:
    """Write report.html again, with the result of `verify`."""
    from nanogpt_hf.reports.page import write_report

    # A run of another user may be verified, but its report cannot be written.
    with contextlib.suppress(UserError, OSError):
        write_report(folder, folder.report)


def _repeat_segment(
    folder: RunFolder, first: int, last: int, mesh: Mesh
) -> tuple[float, tuple[int, list[str]] | None]:
    """Repeat the steps after `first` up to `last`. Return the limit within which numbers count as
    equal, and the first step that differs, with its differences, if there is one.
    """
    from nanogpt_hf.replay import repeatable, verify

    # Knobs may have changed at a resume: the segment begins with the ones of its first step.
    held = verify.recipe_of(folder, first + 1)
    with verify.run_at(folder, held, first, mesh) as repeated:
        bound = repeatable.rounding_bound(folder, repeated)
        return bound, verify.first_difference(repeated, folder, last, bound)


def add_inspect_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--step", metavar="N", type=bounded(int, 1), help="show this step; 1 is the first"
    )
    asked.add_argument("--find", metavar="TEXT", help="list the steps that saw this text")
    add_output(parser, "--json", "also write the sequences or the steps, with whole texts, to FILE")


def run_inspect(arguments: Namespace) -> None:
    """Show the sequences that a step of a run saw: the place of each in the data, its text, and its
    loss under the newest checkpoint before the step, the highest loss first. Nothing is changed.

    --find TEXT lists the steps that saw a text, inside one sequence.
    """
    folder = find_run(arguments.run)

    from nanogpt_hf.data.prepared import require_prepared
    from nanogpt_hf.replay.sequences import sequences_of, steps_with
    from nanogpt_hf.replay.verify import recipe_of, run_at
    from nanogpt_hf.runs.metrics import read_metrics
    from nanogpt_hf.runs.provenance import branched_at

    step = arguments.step
    text = arguments.find
    # Every sequence contains the empty text.
    if text == "":
        raise UserError("--find: expected a text, got nothing")
    # The metrics go beyond the newest checkpoint, unless they are logged rarely.
    kept = [step_of(path) for path in folder.checkpoint_folders()]
    last = max([0, *kept, *(event["step"] for event in read_metrics(folder))])
    config = recipe_of(folder, step or last)
    last = min(last, config.train.max_steps)
    if step and step > last:
        raise UserError(f"--step {step}: the run has recorded {plural(last, 'step')}")
    # A branch has the metrics of the other run, but not its data.
    begun, other = branched_at(folder)
    if step and step <= begun:
        raise UserError(f"--step {step}: was taken by {other}, of which this run is a branch")
    # Data that is prepared now would not be what the run has read.
    require_prepared(config.data)
    # The weights that took the step are gone, unless a checkpoint was just before it.
    before = max((number for number in kept if number < (step or last + 1)), default=0)
    with run_at(folder, config, before, arguments.mesh) as run:
        if step is None:
            # The run sees what a run of its recipe sees, also in the steps that the other run took.
            steps = [number for number in steps_with(run, text, last) if number > begun]
            tree = {"text": text, "steps": steps}
            show(f"{len(steps):,} of {plural(last, 'step')} saw it: {steps}")
        else:
            found = sequences_of(run, step)
            tree = {"step": step, "weights_of_step": before, "sequences": found}
            show(f"{plural(len(found), 'sequence')}; losses under the weights of step {before:,}")
            # Between the loss and the text, a row has the place: source, documents, tokens.
            for row in found:
                place = ", ".join(f"{key} {row[key]}" for key in list(row)[1:-1])
                show(f"{row['loss']:.4f}  {place}  {row['text'][:_SHOWN]!r}")
    write_json(arguments.json, tree)


def _read_at(config: Config, history: list[KnobChange], step: int) -> dict[str, Any]:
    """The knobs that held after `step` steps of a run, without those that nothing read, which no
    command line may state: fine-tuning gives some of them other defaults.
    """
    held = knobs_at(history, step)
    read = read_knobs(replace_knobs(config, held))
    return {k: value for k, value in held.items() if k in read or value == KNOBS[k].default}


def add_branch_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    add_option(
        parser,
        "--at STEP",
        "the step to start from, which has a checkpoint",
        type=int,
        required=True,
    )
    add_option(parser, "--run-dir DIR", "the new run's folder", required=True)
    list_knobs(parser)


def run_branch(arguments: Namespace, overrides: Overrides) -> None:
    """Start a new run from a checkpoint of another, with its optimizer state and with other knobs:
    a decay of the learning rate, another text or mixture, more steps. The other run is only read.

    The new run folder gets the checkpoint and the metrics up to its step, and the knobs that held
    when the step was taken; the command that trains it is printed. From that step on it sees what
    a run of its recipe would see.
    """
    check_steps_known("branch", stated_knobs(None, overrides))
    step = arguments.at
    old, folder = find_checkpoint(arguments.run, step, "--at")
    new = RunFolder(arguments.run_dir)

    from nanogpt_hf.checkpoint.reader import read_checkpoint
    from nanogpt_hf.replay.branch import make_branch

    # The branch has the knobs with which the step was taken, then the ones on the command line.
    checkpoint = read_checkpoint(folder)
    held = as_overrides(_read_at(read_recipe(old), checkpoint.state.history, step - 1))
    config = read_recipe_to_train(old, [*held, *overrides])
    changes = recipe_differences(read_recipe(old, held), config)
    if other := [line for line in changes if is_fixed(line) and not line.startswith(_FREE)]:
        raise UserError(
            f"{old.path}: a branch keeps the model and the kind of training: {'; '.join(other)}"
        )
    # A stage that has begun overrides the knobs of the recipe, so changing these has no effect.
    begun = {key for stage in config.train.stages or () if stage["at"] <= step for key in stage}
    begun |= {"data.source"} if "weights" in begun else set()
    if hidden := [line for line in changes if line.partition(":")[0] in begun]:
        raise UserError(
            f"--{hidden[0]}: a stage has set it before step {step}; change it in --train.stages"
        )
    # --overwrite of the old run would delete the branch.
    if new.path.resolve().is_relative_to(old.path.resolve()):
        raise UserError(f"--run-dir {new.path}: is inside {old.path}; choose another")
    if step >= config.train.max_steps:
        raise UserError(
            f"--train.max_steps {config.train.max_steps}: is not past step {step}; give more steps"
        )
    make_branch(old, checkpoint, new, config)
    for change in changes:
        show(f"changed: {change}")
    command = "finetune" if config.finetune.model else "pretrain"
    show(f"{new.path}: a branch of {old.path} at step {step:,}; train it with")
    words = [command, str(new.recipe), "--run-dir", str(new.path), "--resume"]
    show(f"  {program()} {shlex.join(words)}")
