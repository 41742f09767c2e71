"""Read the files that this package writes: what makes one damaged, as one line with its name.

What follows from a damage is up to the file's reader, of which there is one per file: what a resume
does not need is skipped with one warning, what can be computed is computed again, a damaged
checkpoint is passed over for the one before, and anything else ends the command.
"""

import dataclasses
import hashlib
import json
import logging
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from nanogpt_hf.errors import DamagedFileError, UserError, one_line

logger = logging.getLogger(__name__)
# How messages name the types of JSON; all others are mappings.
_SHOWN = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    NoneType: "null",
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context in which the content of a file is read. Whatever is wrong with it, which raises an
    error of any kind somewhere in a library, raises DamagedFileError.
    """
    try:
        # A read of either may never end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError("it is a device or a pipe")
        yield
    except (UserError, MemoryError):
        # Not the file's fault.
        raise
    except OSError as error:
        # safetensors has the path in the message alone.
        reason = f"cannot be read: {error.strerror or one_line(error)}"
        is_missing = isinstance(error, FileNotFoundError) and error.strerror
        raise DamagedFileError(f"{path}: {'is missing' if is_missing else reason}") from None
    except RecursionError:
        # A text of many brackets, which json reads by recursion.
        raise DamagedFileError(f"{path}: is damaged: it is nested too deeply") from None
    except Exception as error:
        raise DamagedFileError(f"{path}: is damaged: {one_line(error)}") from None


def file_sha256(path: Path) -> str:
    """Sha256 of the content of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file as the type `kind` (`as_type`). Raises DamagedFileError."""
    with reading(path):
        return as_type(json.loads(path.read_bytes().decode("utf-8")), kind)


def read_json_lines(path: Path, check: Callable[[Any], bool]) -> list[Any]:
    """Return the values in a file of one per line that pass `check`; none if there is no file.

    Others are skipped with one warning; an incomplete last line, cut by a kill or being written
    now, silently.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    except OSError as error:
        warn_once(f"{path}: skipped, since it cannot be read: {error.strerror}")
        return []
    values = []
    damaged = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = []
        with suppress(ValueError, RecursionError):
            found = [value for value in [json.loads(line.decode("utf-8"))] if check(value)]
        values += found
        # The last line has no line end yet: it is being written, or a kill has cut it.
        if not found and number < len(lines):
            damaged.append(number)
    if damaged:
        count = "1 damaged line" if len(damaged) == 1 else f"{len(damaged):,} damaged lines"
        warn_once(f"{path}: skipped {count}, the first in line {damaged[0]:,}")
    return values


@cache
def log_once(
    message: str, level: int = logging.INFO, *, is_notice: bool = False, to_stderr: bool = False
) -> None:
    """Log a line, once per process: a run reads some of its files several times."""
    logger.log(level, message, extra={"is_notice": is_notice, "to_stderr": to_stderr})


def warn_once(message: str) -> None:
    """Log a warning, once per process."""
    log_once(message, logging.WARNING)


def notice_once(message: str, level: int = logging.INFO, *, to_stderr: bool = False) -> None:
    """Log a line about a command that may still be refused, once per process. The console prints it
    with the next line of the command, and not before a refusal.
    """
    log_once(message, level, is_notice=True, to_stderr=to_stderr)


def as_type(value: Any, annotation: Any, name: str = "") -> Any:
    """A value from JSON as an annotated type. A dataclass is made of a mapping of its fields; a
    TypedDict may have further keys.

    Raises ValueError with the name of the field.
    """
    kind: Any = annotation
    origin = get_origin(kind)
    parameters = get_args(kind)
    if kind is Any:
        return value
    # Of unions there is `kind | None` only.
    if origin in (Union, UnionType):
        if value is None and NoneType in parameters:
            return None
        (option,) = (option for option in parameters if option is not NoneType)
        return as_type(value, option, name)
    if origin is list and isinstance(value, list):
        return [as_type(part, parameters[0], f"{name}[{n}]") for n, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: as_type(part, parameters[1], _path(name, key)) for key, part in value.items()}
    if is_typeddict(kind) and isinstance(value, dict):
        known = {key: value[key] for key in value.keys() & get_type_hints(kind).keys()}
        return value | _typed_fields(known, kind, name, kind.__required_keys__)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        required = {field.name for field in dataclasses.fields(kind) if _is_required(field)}
        return cast(Any, kind)(**_typed_fields(value, kind, name, required))
    # JSON has one kind of number: 1 may be a float. bool is no int here, as type() is compared.
    is_number = kind is float and type(value) is int
    if type(value) is kind or is_number:
        return value
    shown = _SHOWN.get(origin or kind, "a mapping of fields")
    raise ValueError(f"{name or 'content'}: expected {shown}, got {reprlib.repr(value)}")


def _typed_fields(
    tree: dict[str, Any], kind: Any, name: str, required: frozenset[str] | set[str]
) -> dict[str, Any]:
    # A field too few or too many means another version of the file, or damage.
    hints = get_type_hints(kind)
    if missing := sorted(required - tree.keys()):
        raise ValueError(f"{_path(name, missing[0])}: is missing")
    if unknown := sorted(tree.keys() - hints.keys()):
        raise ValueError(f"{_path(name, unknown[0])}: unknown field")
    return {key: as_type(part, hints[key], _path(name, key)) for key, part in tree.items()}


def _is_required(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
