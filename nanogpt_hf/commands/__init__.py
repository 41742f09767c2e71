"""The table of commands, the parsing of a command line, and the exit status of an error."""

import argparse
import atexit
import gc
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from nanogpt_hf import console
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
    did_you_mean,
    explain,
)
from nanogpt_hf.runs.files import stdout_for_outputs


class Command(NamedTuple):
    """A row of the table: its summary in `cli.py --help`, and whether it reads knobs (--train.seed
    7).

    A command that `writes_alone` would write its output once per process, and is refused in
    several.
    """

    summary: str
    file: str = ""  # with several commands; "" is one of the command's own name
    knobs: bool = False
    writes_alone: bool = False


# A file of one command has `add_arguments(parser)` and `run(arguments)`, or
# `run(arguments, overrides)` if it reads knobs, and its docstring is the help text. A file of
# several has `add_NAME_arguments` and `run_NAME`, whose docstring is the help text. `run` may
# return an exit status. Only `launch` gets its words unparsed.
COMMANDS = {
    "prepare": Command("tokenize a text into shards of tokens", knobs=True),
    "pretrain": Command("train a model from scratch", "train", knobs=True),
    "sweep": Command(
        "train a grid of runs: learning rates, depths, seeds; one table and plot",
        knobs=True,
        writes_alone=True,
    ),
    "finetune": Command("train a model further on your text or conversations", "train", knobs=True),
    "rl": Command(
        "train a model further by rewards of its answers to questions", "train", knobs=True
    ),
    "align": Command("train a model further on pairs of answers, by DPO", "train", knobs=True),
    "sample": Command("generate text with a model", "generate"),
    "chat": Command("chat with a model", "generate"),
    "serve": Command("serve a model as OpenAI's API does, with a chat page", "generate"),
    "evaluate": Command("measure loss and perplexity on a text, and tasks by lm-eval", knobs=True),
    "compare": Command(
        "compare runs with each other and with their recipe's reference",
        "compare",
        writes_alone=True,
    ),
    "report": Command("write a run's report.html", "compare", writes_alone=True),
    "verify": Command("repeat steps of a run, and compare them with what it recorded", "replay"),
    "branch": Command(
        "start a new run from a checkpoint of another, with other knobs",
        "replay",
        knobs=True,
        writes_alone=True,
    ),
    "inspect": Command(
        "show the text that a step saw, with its losses; find the steps of a text",
        "replay",
        writes_alone=True,
    ),
    "export": Command(
        "convert a model to plain safetensors, GGUF or ONNX", "convert", writes_alone=True
    ),
    "import-nanogpt": Command(
        "convert a checkpoint or data of nanoGPT", "convert", writes_alone=True
    ),
    "push": Command(
        "push a model to the Hub, with its card, recipe, metrics and curve", writes_alone=True
    ),
    "estimate": Command(
        "estimate memory, time, tokens and disk of a run", knobs=True, writes_alone=True
    ),
    "bench": Command(
        "measure speed, MFU and the parts of a step; compare with baselines", knobs=True
    ),
    "knobs": Command("list every knob of a recipe", writes_alone=True),
    "doctor": Command("find faults of this machine and its network", knobs=True),
    "launch": Command("run one of these on the machine that an accelerate config describes"),
}

_MAX_LINE = 2000  # characters; names and values in a message may have any length
_SECONDS_TO_PRINT = 3.0
# metavars of files and folders
_PATHS = ("CKPT", "DIR", "F", "FILE", "MODEL", "OUT", "PATH", "RECIPE", "RUN")
_USAGE = (
    "usage: cli.py COMMAND ...   (under accelerate: cli.py launch [--config_file F] COMMAND ...)"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def _overview() -> str:
    rows = [f"  {name:<14} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [_USAGE, "", *rows, "", "cli.py COMMAND --help lists a command's options and every knob."]
    )


def functions_of(name: str) -> tuple[Callable[..., None], Callable[..., int | None], str | None]:
    """What adds the arguments of a command, what runs it, and the text of its help."""
    own = name.replace("-", "_")
    if file := COMMANDS[name].file:
        module = importlib.import_module(f"nanogpt_hf.commands.{file}")
        run = getattr(module, f"run_{own}")
        return getattr(module, f"add_{own}_arguments"), run, inspect.getdoc(run)
    module = importlib.import_module(f"nanogpt_hf.commands.{own}")
    return module.add_arguments, module.run, module.__doc__


def _take_overrides(prog: str, words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """`x --a.b 1 --c.d=2 --e` -> [("a.b", "1"), ("c.d", "2")] and [x, --e]: the knobs, and the
    words for argparse.
    """
    overrides, others, words = [], [], list(words)
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if not (key.startswith("--") and "." in key):
            others.append(word)
            continue
        if not equals:
            if not words:
                raise UserError(f"{prog}: {key}: expected a value after it")
            value = words.pop(0)
        overrides.append((key.removeprefix("--"), value))
    return overrides, others


def _expand_paths(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Replace ~ in every argument whose metavar is that of a path.

    Raises UserError for an empty path.
    """
    for action in parser._actions:
        value = getattr(parsed, action.dest, None)
        if action.metavar not in _PATHS or value is None:
            continue
        paths = value if isinstance(value, list) else [value]
        if any(path in ("", Path()) for path in paths):
            name = "/".join(action.option_strings) or action.metavar
            raise UserError(f"{parser.prog}: {name}: expected a path or a name, got nothing")
        paths = [type(path)(os.path.expanduser(path)) for path in paths]
        setattr(parsed, action.dest, paths if isinstance(value, list) else paths[0])


def _refuse(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    """Raise UserError for a word that is no argument, with the nearest option or knob."""
    if not word.startswith("--"):
        parser.error(f"{word!r} is an unexpected argument")
    from nanogpt_hf.config.schema import KNOBS

    key = word.partition("=")[0]
    if key == "--config_file":
        raise UserError(
            f"{parser.prog}: {key} is an option of launch: python cli.py launch {key} F COMMAND ..."
        )
    options = [
        option.removeprefix("--") for action in parser._actions for option in action.option_strings
    ]
    near = did_you_mean(key.removeprefix("--"), options + list(KNOBS))
    raise UserError(f"{parser.prog}: {key}: unknown option{near.replace('mean ', 'mean --')}")


def _show_error(message: str, mesh: Mesh, on_all_processes: bool) -> None:
    """Print an error of this process; one that all processes have is printed by the first of
    each machine.
    """
    message = "\n".join(
        line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} …" for line in message.splitlines()
    )
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

    0: done. 1: another process of the run was lost, or `doctor` found a fault. 2: an error of
    the user or the machine. 75: stopped by a signal, after saving. Any other exception is a bug,
    and is raised.
    """
    log_level, mesh = None, Mesh()
    try:
        check_environment()
        mesh = Mesh.from_environment()
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            console.show(_overview())
            return 0
        for word in arguments:
            if not word.isascii() and word != word.encode(errors="replace").decode():
                raise UserError(
                    f"cli.py: {word!r:.200}: not UTF-8, so a run could not write it to a file"
                )
        name, *rest = arguments
        if name not in COMMANDS:
            raise UserError(
                f"cli.py: {name}: no such command{did_you_mean(name, COMMANDS)}; see cli.py --help"
            )
        if COMMANDS[name].writes_alone and "LOCAL_RANK" in os.environ and mesh.world_size > 1:
            raise UserError(
                f"{name} needs no launch, and runs in one process: python cli.py {name}"
            )
        if name == "launch":
            from nanogpt_hf.commands import launch

            return launch.run(rest, COMMANDS)
        add_arguments, run, description = functions_of(name)
        parser = _Parser(
            prog=f"cli.py {name}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(parser)
        console.add_arguments(parser)
        overrides, rest = _take_overrides(parser.prog, rest)
        if overrides and not COMMANDS[name].knobs:
            raise UserError(
                f"{parser.prog}: --{overrides[0][0]}: this command reads no recipe and has no knobs"
            )
        parsed, unknown = parser.parse_known_args(rest)
        if unknown:
            _refuse(parser, unknown[0])
        _expand_paths(parser, parsed)
        log_level = parsed.log_level
        flags = [
            (key, value) for key, value in vars(parsed).items() if "." in key and value is not None
        ]
        overrides = flags + overrides  # flags that are short names of knobs: see arguments.py
        outputs = stdout_for_outputs(*vars(parsed).values())
        parsed.mesh = mesh
        with console.configure_logging(log_level, mesh.rank), outputs:
            return (run(parsed, overrides) if COMMANDS[name].knobs else run(parsed)) or 0
    except Stopped as stopped:
        if not mesh.local_rank:  # once per machine
            console.show_end(stopped)
        return EXIT_STOPPED
    except LostProcess as lost:
        if not mesh.local_rank:  # once per machine
            console.show_end(lost, sys.stderr)
        return EXIT_LOST
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        if log_level == "debug":
            traceback.print_exception(error)
        _show_error(
            message,
            mesh,
            isinstance(error, UserError) and not isinstance(error, NotEnoughMemoryError),
        )
        return EXIT_USER_ERROR


def entry_point() -> None:
    """The `nanogpt-hf` program, and `python cli.py`."""
    # The libraries create 400,000 permanent objects. The garbage collector would scan them
    # repeatedly during the imports and once at the end, which takes 1.4 s.
    limit_spinning()
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    console.survive_closed_streams()
    try:
        status = main(sys.argv[1:])
        distributed = sys.modules.get("torch.distributed")
        if (
            not status
            and distributed
            and distributed.is_available()
            and distributed.is_initialized()
        ):
            # without it, gloo sometimes aborts the process at its end
            distributed.destroy_process_group()
    except SystemExit as ended:  # --help
        status = ended.code
    except KeyboardInterrupt:
        status = 130
    except console.OutputLost as lost:
        status = console.status_of(lost)
    except BrokenPipeError:  # the reader of `--json -` is gone
        status = console.EXIT_NOBODY_READS
    sys.exit(status or console.flush())
