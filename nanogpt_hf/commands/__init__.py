"""The table of commands, and the one place where an error becomes a line and an exit status."""

import argparse
import atexit
import gc
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

from nanogpt_hf.commands import console
from nanogpt_hf.cpu import limit_spinning
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import (
    EXIT_LOST,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    LostProcess,
    NotEnoughMemoryError,
    Stopped,
    UserError,
    did_you_mean,
    explain,
)
from nanogpt_hf.runs.files import stdout_for_outputs


class Command(NamedTuple):
    """A row of the table: what `cli.py --help` says of it, and whether it reads knobs (--train.seed 7)."""

    summary: str
    knobs: bool = False


# The module of the same name (with _ for -) has `add_arguments(parser)` and `run(arguments)`, or `run(arguments,
# overrides)` if it reads knobs. `run` may return an exit status. Only `launch` gets its words unparsed.
COMMANDS = {
    "prepare": Command("tokenize a text into shards of tokens", knobs=True),
    "pretrain": Command("train a GPT from scratch", knobs=True),
    "sweep": Command("train a grid of runs: learning rates, depths, seeds; one table and plot", knobs=True),
    "finetune": Command("train a GPT-2 further on your text", knobs=True),
    "sample": Command("generate text with a model"),
    "chat": Command("chat with a model"),
    "evaluate": Command("measure loss and perplexity on a text, and tasks by lm-eval", knobs=True),
    "compare": Command("compare runs with each other and with their recipe's reference"),
    "report": Command("write a run's report.html"),
    "export": Command("convert a model to plain GPT-2, GGUF or ONNX"),
    "import-nanogpt": Command("convert a checkpoint or data of nanoGPT"),
    "push": Command("push a model to the Hub, with its card, recipe, metrics and curve"),
    "estimate": Command("estimate memory, time, tokens and disk of a run", knobs=True),
    "bench": Command("measure speed, MFU and the parts of a step; compare with baselines", knobs=True),
    "doctor": Command("find faults of this machine and its network", knobs=True),
    "launch": Command("run one of these as an accelerate config says"),
}

_LINE = 2000  # characters of a message's line that are printed: names and values in it may be of any length
_PATHS = ("CKPT", "DIR", "F", "FILE", "MODEL", "OUT", "PATH", "RECIPE", "RUN")  # metavars of files and folders
_USAGE = "usage: cli.py COMMAND ...   (under accelerate: cli.py launch [--config_file F] COMMAND ...)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def _overview() -> str:
    rows = [f"  {name:<14} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([_USAGE, "", *rows, "", "cli.py COMMAND --help lists a command's options and every knob."])


def _take_overrides(prog: str, words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """`x --a.b 1 --c.d=2 --e` -> [("a.b", "1"), ("c.d", "2")] and [x, --e]: knobs, and what is left for argparse."""
    overrides, left, words = [], [], list(words)
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if not (key.startswith("--") and "." in key):
            left.append(word)
            continue
        if not equals:
            if not words:
                raise UserError(f"{prog}: {key}: expected a value after it")
            value = words.pop(0)
        overrides.append((key.removeprefix("--"), value))
    return overrides, left


def _expand_paths(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """`~/x` -> the home folder's x for every option whose metavar says that it is a path; an empty one is an error."""

    def expand(action: argparse.Action, value: str | Path) -> str | Path:
        if value in ("", Path()):
            name = "/".join(action.option_strings) or action.metavar
            raise UserError(f"{parser.prog}: {name}: expected a path or a name, got nothing")
        return type(value)(os.path.expanduser(value))

    for action in parser._actions:
        value = getattr(parsed, action.dest, None)
        if action.metavar in _PATHS and value is not None:
            whole = [expand(action, one) for one in value] if isinstance(value, list) else expand(action, value)
            setattr(parsed, action.dest, whole)


def _refuse(parser: argparse.ArgumentParser, word: str) -> None:
    if not word.startswith("--"):
        raise UserError(f"{parser.prog}: {word!r} is one argument too many; see {parser.prog} --help")
    from nanogpt_hf.config.schema import KNOBS

    key = word.partition("=")[0]
    options = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    near = did_you_mean(key.removeprefix("--"), options + list(KNOBS))
    raise UserError(f"{parser.prog}: {key}: unknown option{near.replace('mean ', 'mean --')}")


def main(arguments: list[str]) -> int:
    """Run a command line; return its exit status.

    It is 0 done, 2 the user's mistake or the machine's failure, 75 stopped by a signal after saving, 1 lost another
    process of the run (or what `doctor` found is a fault). Any other failure is a bug, and is raised.
    """
    log_level = None
    first_here = Mesh.from_environment().local_rank == 0  # what all processes print is printed once per machine
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            console.show(_overview())
            return 0
        for word in arguments:
            if not word.isascii() and word != word.encode(errors="replace").decode():
                raise UserError(f"cli.py: {word!r:.200}: not UTF-8, which files of a run could not hold")
        name, *rest = arguments
        if name not in COMMANDS:
            raise UserError(f"cli.py: {name}: no such command{did_you_mean(name, COMMANDS)}; see cli.py --help")
        module = importlib.import_module(f"nanogpt_hf.commands.{name.replace('-', '_')}")
        if name == "launch":
            return module.run(rest, COMMANDS)
        parser = _Parser(
            prog=f"cli.py {name}",
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        console.add_arguments(parser)
        overrides, rest = _take_overrides(parser.prog, rest)
        if overrides and not COMMANDS[name].knobs:
            raise UserError(f"{parser.prog}: --{overrides[0][0]}: this command reads no recipe and has no knobs")
        parsed, unknown = parser.parse_known_args(rest)
        if unknown:
            _refuse(parser, unknown[0])
        _expand_paths(parser, parsed)
        log_level = parsed.log_level
        with console.configure_logging(log_level), stdout_for_outputs(*vars(parsed).values()):
            return (module.run(parsed, overrides) if COMMANDS[name].knobs else module.run(parsed)) or 0
    except Stopped as stopped:
        if first_here:
            console.last_words(stopped)
        return EXIT_STOPPED
    except LostProcess as lost:
        if first_here:
            console.last_words(lost, sys.stderr)
        return EXIT_LOST
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        message = "\n".join(line if len(line) <= _LINE else f"{line[:_LINE]} …" for line in message.splitlines())
        if log_level == "debug":
            traceback.print_exception(error)
        if isinstance(error, UserError) and not isinstance(error, NotEnoughMemoryError):
            if first_here:
                console.last_words(message, sys.stderr)
        else:  # the others may be well, and know nothing of it
            rank = Mesh.from_environment().rank
            console.last_words(f"[rank {rank}] {message}" if rank else message, sys.stderr)
        return EXIT_USER_ERROR


def entry_point() -> None:
    """The `nanogpt-hf` program, and `python cli.py`."""
    # The libraries make 400,000 objects that stay. Python's collector would look through them again and again while
    # they are imported, and once more at the end: 1.4 s of a command.
    limit_spinning()
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    console.print_any_character()
    console.outlive_readers()
    try:
        status = main(sys.argv[1:])
        distributed = sys.modules.get("torch.distributed")
        if not status and distributed and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()  # gloo now and then aborts a process that ends without
    except SystemExit as ended:  # --help
        status = ended.code
    except KeyboardInterrupt:
        status = 130
    except console.OutputLost as lost:
        status = console.status_of(lost)
    sys.exit(status or console.flush())
