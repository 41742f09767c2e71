"""Errors that end a command with one line, and the translation of library errors into such a line.

Imports nothing heavy, so that every package can raise these errors.
"""

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable

from nanogpt_hf.formatting import escape_controls, plural

EXIT_LOST = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: start again with --resume to continue


class UserError(Exception):
    """An error that the user can correct.

    The message is one line with the remedy; `main` exits with status 2. A caller who knows another
    remedy reads `fault`, the message without the one that was given apart.
    """

    def __init__(self, message: object = "", remedy: str = ""):
        self.fault = escape_controls(str(message), lines=True)
        end = f"; {escape_controls(remedy, lines=True)}" if remedy else ""
        super().__init__(self.fault + end)


class ConfigError(UserError):
    """All problems of a recipe and its overrides, one line each."""

    def __init__(self, problems: Iterable[str]):
        self.problems = [escape_controls(problem, lines=True) for problem in problems]
        end = f"{plural(len(self.problems), 'problem')}; nothing was started."
        self.fault = self.problems[0]
        Exception.__init__(self, "\n".join([*self.problems, end]))


class DataError(UserError):
    """Text, prepared data or a tokenizer that cannot be used as asked."""


class ChangedError(DataError):
    """What data was prepared from is no longer what it was.

    A run that starts may have other data. For one that has learned the data, `of_a_run` is the
    message: it cannot continue with other data.
    """

    def __init__(self, fault: str, remedy: str, remedy_of_a_run: str):
        super().__init__(fault, remedy)
        self.of_a_run = f"{fault}; {remedy_of_a_run}"


class RunFolderError(UserError):
    """A run folder, checkpoint or model folder that cannot be read or must not be written."""


class DamagedFileError(UserError):
    """A file that this package wrote is missing, or is not as it was written."""


class DivergedError(UserError):
    """Weights, optimizer state or logits that are not finite."""


class NotEnoughMemoryError(UserError):
    """This process ran out of memory; the other processes of the run may have enough."""


class Stopped(Exception):  # noqa: N818  (not an error: the run was saved)
    """A signal ended training early, after saving; `main` exits with status 75."""


class LostProcess(Exception):  # noqa: N818  (the error is in another process)
    """Another process of the run died or does not respond; `main` exits with status 1."""


# Messages of torch and the C++ library about memory, in errors without a class for it.
_NO_MEMORY = re.compile(
    r"can.t allocate memory|bad_alloc|not enough memory|out of memory", re.IGNORECASE
)


# What torch's inductor and triton say on a machine that cannot compile.
_LACKS_TO_COMPILE = re.compile(
    r"Python\.h: No such file or directory|No working C\+\+ compiler found|"
    r"Compiler: \S+ is not found|Failed to find C compiler"
)


# Of Python without its UTF-8 mode, in a locale such as C.
_OTHER_ENCODING = (
    f"Python reads the names of files and the command line as {sys.getfilesystemencoding()} here, "
    "not as UTF-8; set LC_ALL=C.UTF-8, or unset PYTHONUTF8"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that this machine or a device ran out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )


def explain(error: BaseException) -> str | None:
    """One line for an error caused by a user, a file, the machine or the network; None for any
    other, which is a bug.

    An error that was raised from such an error is explained by its cause.
    """
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory: use a smaller model, batch or block size, or free some memory"
    # The reader of the output is gone, and would not read the line.
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError):
        # Of two paths, as in a rename, the second is the one that was to be written.
        path = error.filename2 or error.filename
        reason = error.strerror or one_line(error) or type(error).__name__
        return f"{os.fsdecode(path)}: {reason}" if isinstance(path, str | bytes) else reason
    # A name that a recipe, which is in UTF-8, has.
    others = {sys.getfilesystemencoding()} - {"utf-8"}
    if isinstance(error, UnicodeEncodeError) and error.encoding in others:
        return f"{error.object!r:.200}: {_OTHER_ENCODING}"
    # Path.resolve raises it before Python 3.13.
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        return f"{one_line(error).partition(' from ')[2].strip(chr(39))}: is a link to itself"
    if isinstance(error, RuntimeError) and "deterministic" in str(error):
        return (
            "train.deterministic, which train.gradient_groups implies, needs kernels that sum in a "
            f"fixed order, and torch has none on this device: {one_line(error)}; leave both out"
        )
    if isinstance(error, RuntimeError) and (lacks := _LACKS_TO_COMPILE.search(str(error))):
        return (
            f"torch.compile: {lacks[0]}; install a C++ compiler and the headers of this Python (on "
            "Debian g++ and python3-dev), or set dynamo_backend: NO in the accelerate config"
        )
    # By name, since importing these libraries takes time.
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "safetensors.SafetensorError" in names:
        return f"a safetensors file cannot be read or written: {one_line(error)}"
    if names & {"httpx.TransportError", "httpx2.TransportError"}:
        return f"the network: {one_line(error) or type(error).__name__}"
    return _failed_import(error) or (explain(error.__cause__) if error.__cause__ else None)


def _failed_import(error: BaseException) -> str | None:
    """One line for an error of a library that is being imported: it is not installed, is another
    version, or cannot read a variable of the environment. None for any other error.
    """
    library = ""
    # The names of the modules whose code was running, the innermost last.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            library = frame.f_globals.get("__name__", "")
    if isinstance(error, ImportError) and error.name:
        library = error.name
    library = library.partition(".")[0]
    if library in ("", "__main__", __package__):
        return None
    reason = f"{library} cannot be imported: {type(error).__name__}: {one_line(error)}"
    if not isinstance(error, ImportError):
        # Such as HF_HUB_DOWNLOAD_TIMEOUT=abc, which is no number: the message has name or value.
        message = str(error)
        named = [name for name in os.environ if re.search(rf"\b{re.escape(name)}\b", message)]
        valued = [name for name, value in os.environ.items() if repr(value) in message]
        for names in (named, valued):
            if len(names) == 1:
                return f"{reason}; correct or unset the variable {names[0]}"
    return f"{reason}; install nanogpt_hf again in this environment: its packages do not fit"


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded: not with a byte of a path that was no UTF-8, or with half a
    character, as in JSON's "\\ud800".
    """
    return text == text.encode(errors="replace").decode()


def encoding_problem(word: str) -> str | None:
    """One line if a word of the command line is not in UTF-8; None if it is."""
    if is_utf8(word):
        return None
    try:
        text = os.fsencode(word).decode()
    except UnicodeError:
        return (
            f"{word!r:.200}: not UTF-8, so no file could hold it; write it in UTF-8, or rename the "
            "file"
        )
    return f"{text!r:.200}: {_OTHER_ENCODING}"


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The message of an error in one line, cut at `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[: limit - 2]} …"


def last_part(name: str) -> str:
    """`optim.learning_rate` -> learning_rate."""
    return name.rpartition(".")[2]


# How alike two names have to be, from 0 to 1. In another section a name has to be nearly the same:
# no suggestion is better than a wrong one.
_ALIKE = 0.7
_ALIKE_ELSEWHERE = 0.85


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for the candidates that are written almost like `word`, at most three
    that are equally near, or ''.

    Dotted names are compared by their last part. One in the same section is preferred.
    """
    plain = _plain(word)
    section = plain.rpartition(".")[0]
    # Candidate -> whether it is in the same section, and how alike the last parts are.
    near: dict[str, tuple[bool, float]] = {}
    for candidate in candidates:
        name = _plain(candidate)
        same = name.rpartition(".")[0] == section
        ratio = difflib.SequenceMatcher(None, last_part(plain), last_part(name)).ratio()
        if ratio >= (_ALIKE if same else _ALIKE_ELSEWHERE):
            near[candidate] = (same, ratio)
    best = [name for name, score in near.items() if score == max(near.values())]
    if not 0 < len(best) <= 3:
        return ""
    *first, last = best
    named = f"{', '.join(first)} or {last}" if first else last
    return f"; did you mean {named}?"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
