"""The table of commands, the parsing of a command line, and the exit status of an error."""

import atexit
import contextlib
import gc
import importlib
import inspect
import os
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nanogpt_hf import __version__, console
from nanogpt_hf.commands.arguments import add_help, add_logging_options, output_file
from nanogpt_hf.config.aliases import suggestion
from nanogpt_hf.config.stated import Overrides
from nanogpt_hf.cpu import limit_spinning
from nanogpt_hf.distributed.environment import check_environment
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import (
    EXIT_LOST,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    LostProcess,
    NotEnoughMemoryError,
    Stopped,
    UserError,
    encoding_problem,
    explain,
)
from nanogpt_hf.program import as_started, program
from nanogpt_hf.runs.files import STDOUT
from nanogpt_hf.runs.folder import RunFolder


class Command(NamedTuple):
    """A row of the table: its file, its summary in `--help`, and whether a launch may start
    it in several processes. Others would write or print the same once per process.
    """

    file: str
    summary: str
    several: bool = False


# The file of a command NAME has `add_NAME_arguments(parser)` and `run_NAME(arguments)`, or
# `run_NAME(arguments, overrides)` if it reads knobs, whose docstring is the help text. `run_NAME`
# may return an exit status. Only `launch` gets its words unparsed.
COMMANDS = {
    "prepare": Command("train", "tokenize a text into shards of tokens", True),
    "pretrain": Command("train", "train a model from scratch", True),
    "sweep": Command(
        "sweep", "train a grid of runs: learning rates, depths, seeds; one table and plot"
    ),
    "finetune": Command("train", "train a model further on your text or conversations", True),
    "rl": Command("train", "train a model further by rewards of its answers to questions", True),
    "align": Command("train", "train a model further on pairs of answers, by DPO", True),
    "resume": Command("train", "continue a run by its own recipe", True),
    "sample": Command("generate", "generate text with a model", True),
    "chat": Command("chat", "chat with a model"),
    "serve": Command("generate", "serve a model as OpenAI's API does, with a chat page"),
    "evaluate": Command(
        "measure", "measure loss and perplexity on a text, and tasks by lm-eval", True
    ),
    "compare": Command("measure", "compare runs with each other and with their recipe's reference"),
    "report": Command("measure", "write a run's report.html"),
    "verify": Command(
        "replay", "repeat steps of a run, and compare them with what it recorded", True
    ),
    "branch": Command("replay", "start a new run from a checkpoint of another, with other knobs"),
    "inspect": Command(
        "replay", "show the text that a step saw, with its losses; find the steps of a text"
    ),
    "export": Command("convert", "convert a model to plain safetensors, GGUF or ONNX"),
    "import-nanogpt": Command("convert", "convert a checkpoint or data of nanoGPT"),
    "push": Command("convert", "push a model to the Hub, with its card, recipe, metrics and curve"),
    "estimate": Command("plan", "estimate memory, time, tokens and disk of a run"),
    "bench": Command(
        "plan", "measure speed, MFU and the parts of a step; compare with baselines", True
    ),
    "knobs": Command("plan", "list every knob of a recipe"),
    "doctor": Command("plan", "find faults of this machine and its network", True),
    "launch": Command(
        "launch", "run one of these on the machine that an accelerate config describes"
    ),
}

_SECONDS_TO_PRINT = 3.0
_EXIT_NOBODY_READS = 141  # a shell's exit status of a program that SIGPIPE ended


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def _overview() -> str:
    rows = [f"  {name:<14} {command.summary}" for name, command in COMMANDS.items()]
    usage = f"usage: {program()} COMMAND ..."
    several = f"in several processes: {program()} launch [--config_file F] COMMAND ..."
    more = f"{program()} COMMAND --help lists a command's options and its knobs by section."
    return "\n".join([usage, several, "", *rows, "", more])


def functions_of(name: str) -> tuple[Callable[..., None], Callable[..., int | None]]:
    """Find the two functions of a command: one adds its arguments, the other runs it."""
    module = importlib.import_module(f"nanogpt_hf.commands.{COMMANDS[name].file}")
    own = name.replace("-", "_")
    return getattr(module, f"add_{own}_arguments"), getattr(module, f"run_{own}")


def _take_overrides(prog: str, words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """`x --a.b 1 --c.d=2 --e` -> [("a.b", "1"), ("c.d", "2")] and [x, --e]: the knobs, and the
    words for argparse.
    """
    overrides = []
    others = []
    left = iter(words)
    for word in left:
        # No option of a command has a dot in its name, and every knob has one. So argparse need not
        # know the knobs, whose mistakes are reported by the recipe, all at once.
        key, equals, value = word.partition("=")
        if not (key.startswith("--") and "." in key):
            others.append(word)
            continue
        value = value if equals else next(left, None)
        if value is None:
            raise UserError(f"{prog}: {key}: expected a value after it")
        overrides.append((key.removeprefix("--"), value))
    return overrides, others


def _refuse(parser: ArgumentParser, word: str, reads_knobs: bool) -> NoReturn:
    """Raise UserError for a word that is no argument, with the nearest option or knob."""
    from nanogpt_hf.config.schema import KNOBS

    key = word.partition("=")[0]
    if key == "--config_file":
        parser.error(f"{key} is an option of launch: {program()} launch {key} F COMMAND ...")
    if key == "--config" and reads_knobs:
        parser.error(f"{key}: unknown argument; a recipe has no flag: {parser.prog} RECIPE ...")
    options = [option for action in parser._actions for option in action.option_strings]
    if key in options:
        parser.error(f"{key}: is not read after --, which ends the options; give it before")
    knobs = [f"--{knob}" for knob in KNOBS] if reads_knobs else []
    parser.error(f"{key}: unknown argument{suggestion(key, [*options, *knobs])}")


def _parse(name: str, words: list[str]) -> tuple[Callable[[], int | None], Namespace]:
    """A call of the command, and its arguments."""
    add_arguments, run = functions_of(name)
    # Abbreviations are not allowed, since `--re` would change its meaning with a new option.
    # argparse's own --help takes no section: `list_knobs` and `add_help` add one.
    parser = _Parser(
        prog=f"{program()} {name}",
        description=as_started(inspect.getdoc(run)),
        allow_abbrev=False,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    add_logging_options(parser)
    add_help(parser)
    overrides, words = _take_overrides(parser.prog, words)
    reads_knobs = len(inspect.signature(run).parameters) > 1
    if overrides and not reads_knobs:
        parser.error(f"--{overrides[0][0]}: this command reads no recipe and has no knobs")
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(parser, unknown[0], reads_knobs)
    _check_outputs(parser, parsed, overrides)
    if not reads_knobs:
        return lambda: run(parsed), parsed
    # Flags such as --depth are short names of knobs (arguments.py). They come first: a knob that is
    # also given by its full name overrides its short name.
    short = [
        (key, value) for key, value in vars(parsed).items() if "." in key and value is not None
    ]
    return lambda: run(parsed, short + overrides), parsed


def _check_outputs(parser: ArgumentParser, parsed: Namespace, overrides: Overrides) -> None:
    """Raises UserError if two outputs are one file, or one would replace a file that the command
    reads, or what a run has recorded.
    """
    read: dict[str, Any] = {f"--{key}": value for key, value in overrides}
    files: dict[str, str] = {}
    for action in parser._actions:
        name = action.option_strings[0] if action.option_strings else str(action.metavar)
        value = getattr(parsed, action.dest, None)
        if action.type is not output_file:
            read[name] = value
        # A device such as /dev/null may get several outputs.
        elif value and (value == STDOUT or value.is_file() or not value.exists()):
            file = str(value) if value == STDOUT else os.path.realpath(value)
            if other := files.get(file):
                parser.error(f"{other} and {name}: both write {value}; name two files")
            files[file] = name
            run = RunFolder(Path(file).parent)
            if run.metrics.is_file() and Path(file) in run.records:
                parser.error(
                    f"{name} {value}: is a record of the run {run.path}; name another file"
                )
    for name, value in read.items():
        for word in value if isinstance(value, list) else [value]:
            is_file = isinstance(word, str | Path) and os.path.isfile(word)
            if is_file and (output := files.get(os.path.realpath(word))):
                parser.error(f"{output} {word}: would replace the file of {name}; name another")


def _show_error(message: str, mesh: Mesh, on_all_processes: bool) -> None:
    """Print an error of this process; one that all processes have is printed by the first of
    each machine.
    """
    if not on_all_processes:
        rank = f"[rank {mesh.rank}] " if mesh.rank else ""
        console.show_end(f"{rank}{message}", sys.stderr)
    elif not mesh.local_rank:
        console.show_end(message, sys.stderr)
    else:
        # the launcher ends all processes when one has ended, and the first may not have printed
        # this yet
        time.sleep(_SECONDS_TO_PRINT)


def main(arguments: list[str]) -> int:
    """Run a command line; return its exit status.

    0: done. 1: another process of the run was lost, `doctor` found a fault, `verify` a difference,
    or a run of a sweep failed. 2: an error of the user or the machine. 75: stopped by a signal,
    after saving. Any other exception is a bug, and is raised.
    """
    log_level = None
    mesh = Mesh()
    try:
        check_environment()
        mesh = Mesh.from_environment()
        if arguments in ([], ["help"]) or arguments[0] in ("-h", "--help", "--version"):
            is_version = arguments[:1] == ["--version"]
            console.show(f"nanogpt_hf {__version__}" if is_version else _overview())
            return 0
        for word in arguments:
            if problem := encoding_problem(word):
                raise UserError(problem)
        name, *words = arguments
        if name == "help":
            name = words[0]
            words = ["--help"]
        if name not in COMMANDS:
            raise UserError(
                f"{program()} {name}: no such command{suggestion(name, COMMANDS)}; "
                f"see {program()} --help"
            )
        try:
            os.getcwd()
        except FileNotFoundError:
            # oneMKL would end the process.
            raise UserError("the current folder was removed; change to another one: cd") from None
        if not COMMANDS[name].several and "LOCAL_RANK" in os.environ and mesh.world_size > 1:
            raise UserError(
                f"{name} runs in one process, and a launch has started {mesh.world_size}; without "
                f"it: {program()} {name}"
            )
        if name == "launch":
            from nanogpt_hf.commands import launch

            return launch.run(words, COMMANDS)
        run, parsed = _parse(name, words)
        parsed.mesh = mesh
        log_level = parsed.log_level
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(console.configure_logging(log_level, mesh.rank))
            if STDOUT in vars(parsed).values():
                # The standard output is for that result alone, so all lines go to the other stream.
                contexts.enter_context(contextlib.redirect_stdout(sys.stderr))
            return run() or 0
    except (Stopped, LostProcess) as ended:
        lost = isinstance(ended, LostProcess)
        if not mesh.local_rank:
            # Once per machine.
            console.show_end(ended, sys.stderr if lost else None)
        return EXIT_LOST if lost else EXIT_STOPPED
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        if log_level == "debug":
            traceback.print_exception(error)
        is_common = isinstance(error, UserError) and not isinstance(error, NotEnoughMemoryError)
        _show_error(message, mesh, is_common)
        return EXIT_USER_ERROR


def _leave_out_last_collection() -> None:
    """Freeze all objects at the end of the program, since Python's last collection takes long and
    frees nothing but memory; unfreeze them if triton is imported.
    """
    # triton 3.9 prints each of its types and functions that is not collected as a leak.
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def entry_point() -> int | str | None:
    """Run the command line of this process; return its exit status, or None for 0.

    Raises KeyboardInterrupt at Ctrl-C.
    """
    # The libraries create 400,000 permanent objects. The garbage collector would scan them
    # repeatedly during the imports and once at the end, which takes 1.4 s.
    limit_spinning()
    gc.set_threshold(10_000)
    atexit.register(_leave_out_last_collection)
    console.survive_closed_streams()
    try:
        status = main(sys.argv[1:])
    except SystemExit as ended:
        # argparse ends the program after it has printed --help.
        return ended.code
    except BrokenPipeError:
        # The reader of a result is gone, as with `| head`.
        return _EXIT_NOBODY_READS
    distributed = sys.modules.get("torch.distributed")
    if not status and distributed and distributed.is_initialized():
        # without it, gloo sometimes aborts the process at its end
        distributed.destroy_process_group()
    return status
