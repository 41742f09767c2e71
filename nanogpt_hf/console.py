"""Logging for -q, --log-level and ranks, and output without secrets and control characters.

The package logs with Python's logging: `info` to stdout, warnings and errors to stderr. The result
of a command, such as a sample or a table, is printed by `show` and `show_text`. If the reader of
the output is gone (`| head`, a closed terminal), log lines are dropped and a command continues; a
command that prints its result ends.
"""

import argparse
import contextlib
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from nanogpt_hf.errors import EXIT_USER_ERROR
from nanogpt_hf.runs.files import redact_message, redact_urls

EXIT_NOBODY_READS = 141  # a shell's exit status of a program that SIGPIPE ended
_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, a terminal
_PACKAGE = "nanogpt_hf"
_LIBRARIES = ("accelerate", "datasets", "transformers")  # to which --log-level applies too
# transformers imports an installed torchao, which warns about kernels that this machine lacks
_NOISY = ("torchao", "torch.utils._pytree")
# Warnings that are wrong or useless here: a CPU where accelerate imports DeepSpeed, reports that
# our own errors state in a line, texts that are cut. DeepSpeed sets its level when it is imported;
# transformers verifies plans for tensor parallelism if its level is above `warning`.
_USELESS = ("DeepSpeed", "transformers.modeling_utils", "transformers.tokenization_utils_base")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")  # not tabs and line ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quiet = "print results, warnings and errors only: as --log-level warning"
    level = "lowest level that is logged (default info), also by transformers, datasets, accelerate"
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-q", "--quiet", action="store_const", const="warning", dest="log_level", help=quiet
    )
    levels = ("debug", "info", "warning", "error")
    group.add_argument("--log-level", choices=levels, help=level)


def escape_controls(text: str) -> str:
    """Escape what could change a terminal's screen, title or clipboard: \\x1b."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(*values: object, sep: str = " ", file: IO[str] | None = None) -> None:
    """Like `print`, flushed, without secrets in URLs and with control characters escaped."""
    _print(escape_controls(redact_urls(sep.join(map(str, values)))), "\n", file)


def show_text(text: str, end: str = "") -> None:
    """Print a part of a model's text; control characters are escaped on a terminal only."""
    _print(escape_controls(text) if sys.stdout.isatty() else text, end)


def _print(text: str, end: str, file: IO[str] | None = None) -> None:
    print(text, end=end, file=file, flush=True)
    if _lost:
        sys.exit(_status_of_lost_output())


def show_end(message: object, file: IO[str] | None = None) -> None:
    """Print a log line, or why a command ended; a failed write is ignored."""
    with contextlib.suppress(SystemExit):
        show(redact_message(str(message)), file=file)


_lost: list[OSError] = []  # errors of stdout, until somebody is told


class _Output(io.FileIO):
    """stdout or stderr, on which a failed write is remembered or ignored, and never raised.

    Once its reader is gone, it is /dev/null, for this process and its children.
    """

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                with open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), self.fileno())
            if self.fileno() == 1:
                _lost.append(error)
            return len(data)


def survive_closed_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that survive the end of their reader and print
    characters that the terminal's encoding lacks, such as × in ASCII, as escapes.
    """
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name)
        if stream is None:  # closed (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
            stream.flush()
            raw = io.BufferedWriter(_Output(number, "w", closefd=False))
            options = {key: getattr(stream, key) for key in ("encoding", "line_buffering")}
            setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", **options))
    logging.raiseExceptions = False  # the libraries' own handlers would print a traceback


def status_at_end() -> int:
    """Flush stdout; return the exit status of a command: not 0 if its output was lost."""
    sys.stdout.flush()
    return _status_of_lost_output() if _lost else 0


def _status_of_lost_output() -> int:
    """Logs why output was lost, unless its reader closed it."""
    error = _lost.pop()
    if error.errno in _GONE:
        return EXIT_NOBODY_READS
    show_end(f"stdout: cannot be written: {error.strerror}", sys.stderr)
    return EXIT_USER_ERROR


class _Console(logging.Handler):
    """Writes to the current sys.stdout and sys.stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        # `to_stderr`: for lines of a command whose stdout is a model's text
        on_stderr = record.levelno >= logging.WARNING or getattr(record, "to_stderr", False)
        stream = sys.stderr if on_stderr else sys.stdout
        bars = sys.modules.get("tqdm")  # if tqdm is not imported, there is no bar
        with bars.tqdm.external_write_mode(stream) if bars else contextlib.nullcontext():
            show_end(self.format(record).rstrip("\n"), stream)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def configure_logging(log_level: str | None, rank: int = 0) -> Iterator[None]:
    """Configure logging by the options, and restore it at the end.

    Processes other than the first log warnings and errors only, each with its rank in front.
    """
    handler = _Console()
    lowest = logging.WARNING if rank else logging.DEBUG
    level = max(lowest, getattr(logging, (log_level or "info").upper()))
    levels = {_PACKAGE: level, "py.warnings": max(level, logging.WARNING)}
    if rank:
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    if log_level:
        levels |= dict.fromkeys(_LIBRARIES, level)
        for name in ("DATASETS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):  # read by later imports
            os.environ[name] = logging.getLevelName(level).lower()
    if level > logging.INFO:
        os.environ["WANDB_SILENT"] = "true"
    if log_level != "debug":
        levels |= dict.fromkeys(_NOISY, logging.ERROR)
    with contextlib.ExitStack() as undo:
        for logger in map(logging.getLogger, _USELESS if log_level != "debug" else ()):
            logger.addFilter(_is_error)
            undo.callback(logger.removeFilter, _is_error)
        for logger, value in ((logging.getLogger(name), value) for name, value in levels.items()):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(value)
        # the others have handlers
        for logger in map(logging.getLogger, (_PACKAGE, "accelerate", "py.warnings")):
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
        logging.captureWarnings(True)
        undo.callback(logging.captureWarnings, False)
        yield
