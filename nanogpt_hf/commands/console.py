"""What is printed and where: -q, --log-level, and processes other than the first. Nothing else sets it.

The package says things by Python's logging: what is normal at `info`, to stdout; warnings and errors to stderr. What a
command was asked for, such as a sample or a table, it prints by `show` and `show_text`. If the reader leaves (`| head`,
a closed terminal), what is logged is dropped and a command continues; one that prints what it was asked for ends.

Names, reasons and texts may come from a model, a file or a server. So everything that is printed passes through here:
secrets in URLs are taken out, and control characters, which could rewrite a terminal's screen, title or clipboard, are
shown as \\x1b and the like. Only a model's own text stays as it is, if it goes to a file or pipe.
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
_OURS = "nanogpt_hf"
# Libraries that --log-level is for as well; some read a variable when they are imported, which may be later.
_LIBRARIES = {"accelerate": None, "datasets": "DATASETS_VERBOSITY", "transformers": "TRANSFORMERS_VERBOSITY"}
# Where torchao is installed transformers imports it, and it warns of kernels for inference that cannot be loaded here.
_UNASKED = ("torchao", "torch.utils._pytree")
# Warnings that are wrong or useless here, by their logger and a part of their text.
_USELESS = {
    "DeepSpeed": "Setting accelerator to CPU",  # once it is installed accelerate imports it, whatever is asked for
    "transformers.modeling_utils": "LOAD REPORT",  # of a foreign model folder: our error says it in one line
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",  # generation and export cut
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-q",
        "--quiet",
        action="store_const",
        const="warning",
        dest="log_level",
        help="print warnings, errors and what was asked for, and nothing else: no bar, no lines, no summary",
    )
    group.add_argument(
        "--log-level",
        choices=_LEVELS,
        help="the least that is printed (default info); also for transformers, datasets and accelerate, which are "
        "at warning unless this is given",
    )


# C0 and C1 but for tabs and line ends, and what turns the direction of writing round
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def escape_controls(text: str) -> str:
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(*values: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None) -> None:
    """Print as `print` does, at once, without secrets in URLs and with control characters escaped."""
    print(escape_controls(redact_urls(sep.join(map(str, values)))), end=end, file=file, flush=True)


def show_text(text: str, end: str = "") -> None:
    """Print a piece of what a model writes: control characters are escaped on a terminal, and stay elsewhere."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_any_character() -> None:
    """Print what the terminal's encoding lacks, such as × in ASCII, as an escape: no text may end a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


EXIT_NOBODY_READS = 141  # what a shell says of a program that SIGPIPE ended, as it ends most whose reader leaves
_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, a terminal


class OutputLost(Exception):  # noqa: N818  (no OSError: nothing that reads or writes files should take it for its own)
    """What was printed cannot be written to stdout."""


class _Output(io.FileIO):
    """stdout or stderr while somebody reads, and /dev/null from then on, for this process and all that it starts.

    What cannot be written to stdout raises OutputLost, about a reader that left only once; stderr, where only bars,
    warnings and errors go, drops it.
    """

    def __init__(self, descriptor: int, name: str):
        super().__init__(descriptor, "w", closefd=False)
        self.name = name

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                _lead_nowhere(self.fileno())
            if self.name == "<stdout>":
                raise OutputLost(error) from None
            return len(data)


def _lead_nowhere(descriptor: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def outlive_readers() -> None:
    """Replace sys.stdout and sys.stderr by streams whose reader may leave."""

    def outliving(stream: TextIO | None) -> TextIO | None:
        buffer = getattr(stream, "buffer", None)
        if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # closed, or Windows' console
            return stream
        stream.flush()
        raw = _Output(stream.fileno(), stream.name)
        how = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        return io.TextIOWrapper(io.BufferedWriter(raw) if hasattr(buffer, "raw") else raw, **how)

    sys.stdout, sys.stderr = outliving(sys.stdout), outliving(sys.stderr)
    logging.raiseExceptions = False  # libraries log by handlers of their own, which would print a traceback


def last_words(words: object, stream: TextIO | None = None) -> None:
    """Print why a command ended; that they cannot be written changes nothing of it."""
    with contextlib.suppress(OutputLost):
        show(redact_message(str(words)) if stream is sys.stderr else words, file=stream)


def flush() -> int:
    """Write what is left for stdout; the exit status of a command that went well, which is not 0 if that is lost."""
    try:
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
    except OutputLost as lost:
        return status_of(lost)
    return 0


def status_of(lost: OutputLost) -> int:
    """The exit status of a command whose answer is lost: quietly if nobody reads it, with a line if a disk is full."""
    (error,) = lost.args
    if error.errno in _GONE:
        return EXIT_NOBODY_READS
    _lead_nowhere(sys.stdout.fileno())  # Python would try again as it ends
    last_words(f"stdout: cannot be written: {error.strerror}", sys.stderr)
    return EXIT_USER_ERROR


class _Console(logging.Handler):
    """Writes where sys.stdout and sys.stderr are at that moment, above a live bar. What cannot be written is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        # `to_stderr` is for lines of a command whose stdout is a model's text
        aside = record.levelno >= logging.WARNING or getattr(record, "to_stderr", False)
        stream = sys.stderr if aside else sys.stdout
        bars = sys.modules.get("tqdm")  # without it there is no bar either
        above_the_bar = bars.tqdm.external_write_mode(stream) if bars else contextlib.nullcontext()
        with contextlib.suppress(OutputLost), above_the_bar:
            text = self.format(record).rstrip("\n")
            show(redact_message(text) if stream is sys.stderr else text, file=stream)


def _useful(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or _USELESS[record.name] not in record.getMessage()


@contextmanager
def configure_logging(log_level: str | None) -> Iterator[None]:
    """Print as the options ask for, and leave logging as it was.

    Processes other than the first say warnings and errors only, each with its rank in front, whoever says them: this
    package, a library, or Python's `warnings`.
    """
    rank = Mesh.from_environment().rank
    least = logging.WARNING if rank else logging.DEBUG
    level = max(least, getattr(logging, (log_level or "info").upper()))
    loggers = {_OURS: level, "py.warnings": max(level, logging.WARNING)}
    variables = {}
    if log_level != "debug":
        loggers |= dict.fromkeys(_UNASKED, logging.ERROR)
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

    spoken = [logging.getLogger(name) for name in (_OURS, "accelerate", "py.warnings")]  # the others print themselves
    os.environ.update(variables)
    filtered = [logging.getLogger(name) for name in _USELESS] if log_level != "debug" else []
    for logger in filtered:
        logger.addFilter(_useful)
    for name, least_of_it in loggers.items():
        logging.getLogger(name).setLevel(least_of_it)
    for logger in spoken:
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
        for logger in spoken:
            logger.removeHandler(handler)
        for name, level_before in before.items():
            logging.getLogger(name).setLevel(level_before)
        for name, value in variables_before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
