"""Configure logging for -q, --log-level and ranks, and print safely: no secrets, no control characters.

The package logs with Python's logging: `info` to stdout, warnings and errors to stderr. The result of a command, such
as a sample or a table, is printed by `show` and `show_text`. If the reader of the output is gone (`| head`, a closed
terminal), log lines are dropped and a command continues; a command that prints its result ends.

Names, reasons and texts may come from a model, a file or a server. So all output passes through this module: secrets in
URLs are removed, and control characters, which could change a terminal's screen, title or clipboard, are escaped
(\\x1b). Only a model's text keeps them, if it goes to a file or pipe.
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
from typing import IO, Any, TextIO

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import EXIT_USER_ERROR
from nanogpt_hf.runs.redact import redact_message, redact_urls

_LEVELS = ("debug", "info", "warning", "error")
_PACKAGE = "nanogpt_hf"
# Libraries to which --log-level applies too. Some read an environment variable when they are imported, maybe later.
_LIBRARIES = {"accelerate": None, "datasets": "DATASETS_VERBOSITY", "transformers": "TRANSFORMERS_VERBOSITY"}
# transformers imports an installed torchao, which warns about inference kernels that this machine cannot load.
_NOISY = ("torchao", "torch.utils._pytree")
# Warnings that are wrong or useless here: logger and a part of the message.
_USELESS = {
    "DeepSpeed": "Setting accelerator to CPU",  # accelerate imports it whenever it is installed
    "transformers.modeling_utils": "LOAD REPORT",  # our own error says it in one line
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",  # generation and export truncate
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-q",
        "--quiet",
        action="store_const",
        const="warning",
        dest="log_level",
        help="print results, warnings and errors only: no progress bar, no log lines, no summary",
    )
    group.add_argument(
        "--log-level",
        choices=_LEVELS,
        help="lowest level that is logged (default info); applies to transformers, datasets and accelerate too, whose "
        "own default is warning",
    )


# C0 and C1 except tabs and line ends, and characters that change the direction of text
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def escape_controls(text: str) -> str:
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(*values: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None) -> None:
    """Like `print`, flushed, without secrets in URLs and with control characters escaped."""
    print(escape_controls(redact_urls(sep.join(map(str, values)))), end=end, file=file, flush=True)


def show_text(text: str, end: str = "") -> None:
    """Print a part of a model's text; control characters are escaped on a terminal only."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_any_character() -> None:
    """Escape characters that the terminal's encoding lacks, such as × in ASCII, so that no text ends a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


EXIT_NOBODY_READS = 141  # a shell's exit status of a program that SIGPIPE ended
_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, a terminal


class OutputLost(Exception):  # noqa: N818  (not an OSError, which code that writes files would catch)
    """Output could not be written to stdout."""


class _Output(io.FileIO):
    """stdout or stderr; once its reader is gone, /dev/null, for this process and its children.

    A failed write to stdout raises OutputLost, if the reader is gone only once; on stderr, which has bars, warnings and
    errors only, it is ignored.
    """

    def __init__(self, descriptor: int, name: str):
        super().__init__(descriptor, "w", closefd=False)
        self.name = name

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (*_GONE, errno.EBADF):
                _redirect_to_null(self.fileno())
            if self.name == "<stdout>":
                raise OutputLost(error) from None
            return len(data)


def _redirect_to_null(descriptor: int) -> None:
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), descriptor)


def survive_closed_pipes() -> None:
    """Replace sys.stdout and sys.stderr by streams that survive the end of their reader, or were closed (`>&-`)."""

    def resilient(stream: TextIO | None, number: int, name: str) -> TextIO:
        if stream is None:  # reading only, so that a write fails; no file that is opened later gets the number
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)
            raw = io.BufferedWriter(_Output(number, name))
            return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace")
        buffer = getattr(stream, "buffer", None)
        if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # Windows' console
            return stream
        stream.flush()
        raw = _Output(stream.fileno(), stream.name)
        how = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        return io.TextIOWrapper(io.BufferedWriter(raw) if hasattr(buffer, "raw") else raw, **how)

    sys.stdout = resilient(sys.stdout, 1, "<stdout>")
    sys.stderr = resilient(sys.stderr, 2, "<stderr>")
    logging.raiseExceptions = False  # the libraries' own handlers would print a traceback


def show_end(message: object, stream: TextIO | None = None) -> None:
    """Print why a command ended; a failed write does not change its exit status."""
    with contextlib.suppress(OutputLost):
        show(redact_message(str(message)) if stream is sys.stderr else message, file=stream)


def flush() -> int:
    """Flush stdout at the end of a successful command; return its exit status, which is not 0 if that fails."""
    try:
        sys.stdout.flush()
    except OutputLost as lost:
        return status_of(lost)
    return 0


def status_of(lost: OutputLost) -> int:
    """The exit status of a command whose output was lost; prints the reason unless the reader is gone."""
    (error,) = lost.args
    if error.errno in _GONE:
        return EXIT_NOBODY_READS
    _redirect_to_null(sys.stdout.fileno())  # Python would write again at its end
    show_end(f"stdout: cannot be written: {error.strerror}", sys.stderr)
    return EXIT_USER_ERROR


class _Console(logging.Handler):
    """Writes to the current sys.stdout and sys.stderr, above a progress bar. Ignores failed writes."""

    def emit(self, record: logging.LogRecord) -> None:
        # `to_stderr`: for lines of a command whose stdout is a model's text
        on_stderr = record.levelno >= logging.WARNING or getattr(record, "to_stderr", False)
        stream = sys.stderr if on_stderr else sys.stdout
        bars = sys.modules.get("tqdm")  # if tqdm is not imported, there is no bar
        above_the_bar = bars.tqdm.external_write_mode(stream) if bars else contextlib.nullcontext()
        with contextlib.suppress(OutputLost), above_the_bar:
            text = self.format(record).rstrip("\n")
            show(redact_message(text) if stream is sys.stderr else text, file=stream)


def _useful(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or _USELESS[record.name] not in record.getMessage()


@contextmanager
def configure_logging(log_level: str | None) -> Iterator[None]:
    """Configure logging by the options, and restore it at the end.

    Processes other than the first log warnings and errors only, each with its rank in front: those of this package, of
    libraries, and of Python's `warnings`.
    """
    rank = Mesh.from_environment().rank
    lowest = logging.WARNING if rank else logging.DEBUG
    level = max(lowest, getattr(logging, (log_level or "info").upper()))
    loggers = {_PACKAGE: level, "py.warnings": max(level, logging.WARNING)}
    variables = {}
    if log_level != "debug":
        loggers |= dict.fromkeys(_NOISY, logging.ERROR)
    if log_level:
        loggers |= dict.fromkeys(_LIBRARIES, level)
        variables = {name: logging.getLevelName(level).lower() for name in _LIBRARIES.values() if name}
    if level > logging.INFO:
        variables["WANDB_SILENT"] = "true"
    before = {name: logging.getLogger(name).level for name in loggers}
    variables_before = {name: os.environ.get(name) for name in variables}
    make_record, handler = logging.getLogRecordFactory(), _Console()

    def with_rank(*arguments, **options) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        record.msg = f"[rank {rank}] {record.msg}"
        return record

    handled = [logging.getLogger(name) for name in (_PACKAGE, "accelerate", "py.warnings")]  # the others have handlers
    os.environ.update(variables)
    filtered = [logging.getLogger(name) for name in _USELESS] if log_level != "debug" else []
    for logger in filtered:
        logger.addFilter(_useful)
    for name, logger_level in loggers.items():
        logging.getLogger(name).setLevel(logger_level)
    for logger in handled:
        logger.addHandler(handler)
    if rank:
        logging.setLogRecordFactory(with_rank)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.setLogRecordFactory(make_record)
        for logger in filtered:
            logger.removeFilter(_useful)
        for logger in handled:
            logger.removeHandler(handler)
        for name, level_before in before.items():
            logging.getLogger(name).setLevel(level_before)
        for name, value in variables_before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
