"""What a user did wrong, said in one line. Imports nothing heavy, so that every floor can raise these."""

import difflib
import errno
import os
import re
from collections.abc import Iterable

from nanogpt_hf.formatting import plural

_PROBLEMS_SHOWN = 100
EXIT_LOST = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: try again, and `--resume` goes on


class UserError(Exception):
    """A mistake that its maker can mend. The message is one line that says what to do; `main` exits with 2."""


class ConfigError(UserError):
    """Every problem of a recipe and its overrides at once, one line each."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        lines = self.problems[:_PROBLEMS_SHOWN]
        if len(lines) < len(self.problems):
            lines = [*lines, f"... and {len(self.problems) - len(lines):,} more"]
        super().__init__("\n".join([*lines, f"{plural(len(self.problems), 'problem')}; nothing was started."]))


class DataError(UserError):
    """Text, prepared data or a tokenizer that cannot be used as asked."""


class RunFolderError(UserError):
    """A run folder, checkpoint or model folder that cannot be read or must not be written."""


class DivergedError(UserError):
    """Weights, optimizer state or logits that are not finite."""


class NotEnoughMemoryError(UserError):
    """The memory of this process was not enough, whatever the other processes of the run have."""


class Stopped(Exception):  # noqa: N818  (not an error: the run was saved)
    """Training ended early because a signal asked for it, after saving; `main` exits with 75."""


class LostProcess(Exception):  # noqa: N818  (what ended is another process; this one only says so)
    """Another process of the run died or does not answer. One line; `main` exits with 1."""


# How torch and the C++ library say that memory was not enough, in errors that have no class of their own.
_NO_MEMORY = re.compile(r"can.t allocate memory|bad_alloc|not enough memory|out of memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the memory of this machine or of a device was not enough."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def explain(error: BaseException) -> str | None:
    """The line for an error that a user, a file, the machine or the network caused; None for any other: it is a bug.

    This is the one place that decides. A library's error that was raised from one of these is explained by it.
    """
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        amount = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        wanted = f" ({amount[1]} more were asked for)" if amount else ""
        return f"out of memory{wanted}: take a smaller model, batch or block, or free some memory"
    if isinstance(error, BrokenPipeError):  # the reader of our output has left, and nobody would read the line
        return None
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        reason = error.strerror or one_line(error) or type(error).__name__
        return f"{os.fsdecode(path)}: {reason}" if isinstance(path, str | bytes | os.PathLike) else reason
    if isinstance(error, RecursionError) and "decoding a JSON" in str(error):  # any other is a bug
        return "a JSON file is nested too deeply to be read"
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "safetensors.SafetensorError" in names:
        return f"a file of weights cannot be read or written: {one_line(error)}"
    if "httpx.TransportError" in names:
        return f"the network: {one_line(error) or type(error).__name__}"
    return explain(error.__cause__) if error.__cause__ else None


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The text of an error in one line, cut at `limit` characters: libraries write whole pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[: limit - 2]} …"


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for the candidate nearest to `word` (dotted names also match by their last part), or ''."""
    candidates = list(candidates)
    by_last_part = {name.rpartition(".")[2]: name for name in candidates}
    if near := difflib.get_close_matches(word, candidates, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if near := difflib.get_close_matches(word.rpartition(".")[2], by_last_part, n=1, cutoff=0.7):
        return f"; did you mean {by_last_part[near[0]]}?"
    return ""
