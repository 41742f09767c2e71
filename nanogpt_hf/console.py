"""Logging for -q, --log-level and ranks, and output without secrets and control characters.

Log lines go to stdout, warnings and errors to stderr. The result of a command, such as a table, is
printed by `show` and `show_text`. Without a reader (`| head`, a closed terminal) log lines are
dropped and a command continues, but one that prints its result ends.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from nanogpt_hf.formatting import escape_controls
from nanogpt_hf.runs.files import redact_urls

# Loggers whose warnings are wrong or useless here.
_NOISY = (
    # kernels that this machine lacks
    "torchao",
    "torchao.kernel.intmm",
    "torch.utils._pytree",
    # accelerate imports it, also on a CPU
    "DeepSpeed",
    # tables of missing weights, which our own errors state in a line
    "transformers.modeling_utils",
    # texts that are longer than the model, which are cut on purpose
    "transformers.tokenization_utils_base",
    # a home folder that has no room for its cache
    "matplotlib",
    # every retry of a request, whose failure our own errors state in a line
    "huggingface_hub.utils._http",
)


def has_styles() -> bool:
    """Whether stdout is a terminal that shows dimmed text, and its user wants that."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout.isatty()


# Failed writes to stdout since this list was last looked at.
_failed_writes: list[OSError] = []


def show_text(
    text: str, end: str = "", file: IO[str] | None = None, *, is_dim: bool = False
) -> None:
    """Print a part of a model's text; control characters are escaped on a terminal only.

    `is_dim`: for a terminal that `has_styles`.
    """
    release()
    shown = escape_controls(text) if sys.stdout.isatty() else text
    # Each part by itself, so that an interruption leaves the terminal as it was.
    shown = f"\x1b[2m{shown}\x1b[22m" if is_dim else shown
    print(shown, end=end, file=file, flush=True)
    if _failed_writes:
        raise _failed_writes.pop()


def show(*values: object, sep: str = " ", file: IO[str] | None = None) -> None:
    """Like `print`, flushed, without secrets in URLs and with control characters escaped."""
    show_text(escape_controls(redact_urls(sep.join(map(str, values)))), "\n", file)


def show_end(message: object, file: IO[str] | None) -> None:
    """Print a log line, or why a command ended; a failed write is ignored."""
    with contextlib.suppress(OSError):
        show(message, file=file)


class _Output(io.FileIO):
    """stdout or stderr; no library sees a write that fails, as to a closed pipe or a full disk."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 1:
                error.filename = "stdout"
                _failed_writes[:] = [error]
            return len(data)


def survive_closed_streams() -> None:
    """Let stdout and stderr survive the end of their reader, and escape what an encoding lacks; a
    closed stdin is an empty one.
    """
    # The first of the three that are opened here, since each gets the lowest number that is free.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name)
        # Closed, by `>&-` in a shell.
        if stream is None:
            replaced = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        else:
            raw = io.BufferedWriter(_Output(number, "w", closefd=False))
            options = {key: getattr(stream, key) for key in ("encoding", "line_buffering")}
            # A terminal in another encoding shows an escape, and no command ends by an error.
            replaced = io.TextIOWrapper(raw, errors="backslashreplace", **options)
        setattr(sys, name, replaced)


# Lines about a command that may still be refused, and their handlers.
_held: list[tuple["_Console", logging.LogRecord]] = []


def release() -> None:
    """Print the lines that were held back: the command is not refused any more."""
    lines = _held[:]
    _held.clear()
    for handler, record in lines:
        handler.write(record)


class _Console(logging.Handler):
    """Writes to the current sys.stdout and sys.stderr, above a progress bar.

    A record with `is_notice` waits for the next line or result: a command that is refused before
    prints its refusal only.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_notice", False):
            _held.append((self, record))
        else:
            release()
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        # Here, since --help does without.
        from tqdm import tqdm

        # `to_stderr` marks lines of a command whose stdout is a model's text.
        on_stderr = record.levelno >= logging.WARNING or getattr(record, "to_stderr", False)
        stream = sys.stderr if on_stderr else sys.stdout
        with tqdm.external_write_mode(stream):
            show_end(self.format(record), stream)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def configure_logging(log_level: str | None, rank: int = 0) -> Iterator[None]:
    """Print what this package logs, by --log-level, until the end.

    Processes other than the first print warnings and errors only, each with its rank in front.
    """
    lowest = logging.WARNING if rank else logging.DEBUG
    level = max(lowest, getattr(logging, (log_level or "info").upper()))
    # A filter and not a level: some libraries set the level when they are imported.
    for name in _NOISY:
        logging.getLogger(name).addFilter(_is_error)
    package = logging.getLogger("nanogpt_hf")
    handler = _Console()
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else None))
    before = package.level
    package.setLevel(level)
    package.addHandler(handler)
    try:
        yield
        release()
    finally:
        _held.clear()
        package.removeHandler(handler)
        package.setLevel(before)
