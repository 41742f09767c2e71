"""Read the rows of JSON files and of JSON lines."""

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanogpt_hf.data.utf8 import utf8, without_nul

# An exception among rows stands for a row that cannot be read; the rows after it can.
Rows = Iterator[Any]


class _Twice(dict[str, Any]):
    """An object of JSON that has a key twice: one of the values would be ignored."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        seen = set()
        # `add` gives None.
        self.key = next(name for name, _ in pairs if name in seen or seen.add(name))

    def error(self) -> ValueError:
        return ValueError(f"the key {self.key!r:.40} is there twice in an object; leave one out")


class _Decoder:
    """Decodes JSON, and knows whether an object of it had a key twice."""

    def __init__(self) -> None:
        self.decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=self._object).decode
        # Almost no file has such an object, so that rows need not be searched.
        self.has_twice = False

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        self.has_twice = True
        return _Twice(pairs)


def _row(value: Any) -> Any:
    """Return a decoded row, or the error if an object in it has a key twice."""
    inside = [value]
    while inside:
        part = inside.pop()
        if isinstance(part, _Twice):
            return part.error()
        if isinstance(part, dict | list):
            inside += part.values() if isinstance(part, dict) else part
    return value


# The remedies for a row that is not JSON.
_IN_LINES = "; a row is one line, and JSON of several lines is read from a file named .json"
_UNDER_JSON = "; the first line is a whole value, so each line is a row; or write one list of rows"


def json_lines(lines: Iterable[str], remedy: str = _IN_LINES) -> Rows:
    decoder = _Decoder()
    for line in lines:
        if line.strip():
            try:
                row = decoder.decode(utf8(line))
                yield _row(row) if decoder.has_twice else row
            except json.JSONDecodeError as error:
                yield _not_json(line, error, remedy)
            except (ValueError, RecursionError) as error:
                yield error


def _not_json(line: str, error: ValueError, remedy: str) -> ValueError:
    try:
        # JSON has none.
        without_nul(line)
    except ValueError as problem:
        return problem
    return ValueError(f"not JSON: {error}{remedy}")


def json_file(text: io.TextIOWrapper, column: str | None) -> Rows:
    """Yield the rows of a list, {"data": list}, one row, or JSON lines under another name."""
    # JSON lines under the name .json: the first line that is not empty is complete, and another one
    # follows. Otherwise the file is one value, over any number of lines.
    first = ""
    while not first.strip() and (line := text.readline()):
        first += line
    if not first.strip():
        return
    decoder = _Decoder()
    try:
        tree = decoder.decode(first)
    except json.JSONDecodeError:
        # The value is not complete in one line.
        tree = decoder.decode(without_nul(utf8(first + text.read())))
    else:
        if second := next((line for line in text if line.strip()), ""):
            yield from json_lines(itertools.chain((first, second), text), _UNDER_JSON)
            return
        utf8(first)
    # A list of rows may be inside an object, next to facts about it.
    if isinstance(tree, dict) and column not in tree:
        lists = [name for name, value in tree.items() if _is_rows(value, dict)]
        if lists == ["data"] or (not lists and _is_rows(tree.get("data"), str)):
            if isinstance(tree, _Twice):
                # There may be another list.
                raise tree.error()
            tree = tree["data"]
        elif lists and column is not None:
            raise ValueError(
                f"an object around {', '.join(lists)}; write the list of rows alone, or as "
                '{"data": [...]}'
            )
    rows = tree if isinstance(tree, list) else [tree]
    yield from map(_row, rows) if decoder.has_twice else rows


def _is_rows(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, kind) for row in value)


def is_json(text: str) -> bool:
    """Whether a text is a JSON object or a list of such, or its first line is."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    # The first line alone would be one of JSON lines.
    for part in (text.lstrip().partition("\n")[0], text):
        try:
            tree = json.loads(part)
            if isinstance(tree, dict) or _is_rows(tree, dict):
                return True
        except (ValueError, RecursionError):
            continue
    return False
