"""What a user did wrong, said in one line. Imports nothing heavy, so that every floor can raise these."""

import difflib
from collections.abc import Iterable

EXIT_LOST = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: try again, and `--resume` goes on


class UserError(Exception):
    """A mistake that its maker can mend. The message is one line that says what to do; `main` exits with 2."""


class ConfigError(UserError):
    """Every problem of a recipe and its overrides at once, one line each."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        count = len(self.problems)
        footer = f"{count} problem{'s' * (count > 1)}; nothing was started."
        super().__init__("\n".join([*self.problems, footer]))


class DataError(UserError):
    """Text, prepared data or a tokenizer that cannot be used as asked."""


class RunFolderError(UserError):
    """A run folder, checkpoint or model folder that cannot be read or must not be written."""


class DivergedError(UserError):
    """Weights, optimizer state or logits that are not finite."""


class Stopped(Exception):  # noqa: N818  (not an error: the run was saved)
    """Training ended early because a signal asked for it, after saving; `main` exits with 75."""


class LostProcess(Exception):  # noqa: N818  (what ended is another process; this one only says so)
    """Another process of the run died or does not answer. One line; `main` exits with 1."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for the candidate nearest to `word` (dotted names also match by their last part), or ''."""
    candidates = list(candidates)
    by_last_part = {name.rpartition(".")[2]: name for name in candidates}
    if near := difflib.get_close_matches(word, candidates, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if near := difflib.get_close_matches(word.rpartition(".")[2], by_last_part, n=1, cutoff=0.7):
        return f"; did you mean {by_last_part[near[0]]}?"
    return ""
