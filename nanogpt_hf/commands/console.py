"""What is printed and where: -q, --log-level, and processes other than the first. Nothing else sets it.

The package says things by Python's logging: what is normal at `info`, to stdout; warnings and errors to stderr. What a
command was asked for, such as a sample or a table, it prints.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


def print_any_character() -> None:
    """Print what the terminal's encoding lacks, such as × in ASCII, as an escape: no text may end a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def shows_bars() -> bool:
    """Whether live bars are wanted: on a terminal, by the first process, without -q."""
    return logging.getLogger(_OURS).isEnabledFor(logging.INFO) and sys.stderr.isatty()


class _Console(logging.Handler):
    """Writes where sys.stdout and sys.stderr are at that moment, above a live bar. Its errors are the caller's."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        bars = sys.modules.get("tqdm")  # without it there is no bar either
        above_the_bar = bars.tqdm.external_write_mode(stream) if bars else contextlib.nullcontext()
        with above_the_bar:
            print(self.format(record).rstrip("\n"), file=stream, flush=True)


def _useful(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or _USELESS[record.name] not in record.getMessage()


@contextmanager
def speaking(log_level: str | None) -> Iterator[None]:
    """Print as the options ask for, and leave logging as it was.

    Processes other than the first say warnings and errors only, each with its rank in front, whoever says them: this
    package, a library, or Python's `warnings`.
    """
    rank = os.environ.get("RANK", "0")
    least = logging.WARNING if rank != "0" else logging.DEBUG
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
    if rank != "0":
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
