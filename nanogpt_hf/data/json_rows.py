"""Read the rows of JSON files and of JSON lines."""

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from nanogpt_hf.data.utf8 import utf8

# An exception among rows stands for a row that cannot be read; the rows after it can.
Rows = Iterator[Any]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key that is there twice: one would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.40} is there twice in an object; leave one out")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def json_lines(lines: Iterable[str]) -> Rows:
    for line in lines:
        if line.strip():
            try:
                yield _JSON.decode(utf8(line))
            except json.JSONDecodeError as error:
                yield ValueError(
                    f"not JSON: {error}; a row is one line, and JSON of several lines is read "
                    "from a file named .json"
                )
            except (ValueError, RecursionError) as error:
                yield error


def json_file(text: io.TextIOWrapper, column: str | None) -> Rows:
    """Yield the rows of a list, {"data": list}, one row, or JSON lines under another name."""
    # JSON lines under the name .json: the first line that is not empty is complete, and another one
    # follows. Otherwise the file is one value, over any number of lines.
    first = ""
    while not first.strip() and (line := text.readline()):
        first += line
    if not first.strip():
        return
    try:
        tree = _JSON.decode(utf8(first))
    except json.JSONDecodeError:
        # The value is not complete in one line.
        tree = _JSON.decode(utf8(first + text.read()))
    else:
        if second := next((line for line in text if line.strip()), ""):
            yield from json_lines(itertools.chain((first, second), text))
            return
    # A list of rows may be inside an object, next to facts about it.
    if isinstance(tree, dict) and column not in tree:
        lists = [name for name, value in tree.items() if _is_rows(value, dict)]
        if lists == ["data"] or (not lists and _is_rows(tree.get("data"), str)):
            tree = tree["data"]
        elif lists and column is not None:
            raise ValueError(
                f"an object around {', '.join(lists)}; write the list of rows alone, or as "
                '{"data": [...]}'
            )
    yield from tree if isinstance(tree, list) else [tree]


def _is_rows(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(row) is kind for row in value)


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
