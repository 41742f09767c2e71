"""Values of knobs: YAML whose scalars stay text, and the conversion of text to a knob's type."""

import argparse
import contextlib
import copy
import functools
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import yaml

from nanogpt_hf.config.aliases import suggestion
from nanogpt_hf.config.schema import LARGEST, Knob, kind_options
from nanogpt_hf.errors import is_utf8, one_line

# Bounds of a file of settings. A few lines of YAML can expand to gigabytes, since an alias repeats
# what it stands for: text counts as often as aliases repeat it.
_MOST_CHARACTERS = 1_000_000
_DEEPEST = 50


class SettingsLoader(yaml.SafeLoader):
    """yaml.safe_load, except that a file that cannot be meant is an error before its values are
    built: too large, also by aliases, nested too deeply, inside itself, or with text that no file
    can hold.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"nested more than {_DEEPEST} times", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        if (node := super().get_single_node()) is not None:
            self._characters(node, {})
        return node

    def _characters(self, node: yaml.Node, known: dict[int, int | None]) -> int:
        """Characters of a value; raises YAMLError if they are too many, or no text."""
        if id(node) in known:
            if (count := known[id(node)]) is None:
                self._refuse("is inside itself", node.start_mark)
            return count
        known[id(node)] = None
        count = 1
        if isinstance(node, yaml.ScalarNode):
            if not is_utf8(node.value) or "\0" in node.value:
                self._refuse(f"{node.value!r:.80}: no text that a file could hold", node.start_mark)
            count += len(node.value)
        else:
            for part in node.value:
                for inner in part if isinstance(part, tuple) else (part,):
                    count += self._characters(inner, known)
        if count > _MOST_CHARACTERS:
            more = f"aliases repeat more than {_MOST_CHARACTERS:,} characters"
            self._refuse(more, node.start_mark)
        known[id(node)] = count
        return count

    def _refuse(self, problem: str, mark: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class RecipeLoader(SettingsLoader):
    """A loader whose scalars stay text, and to which a key that occurs twice is an error.

    `convert` then reads the text by the knob's type, as on the command line. YAML 1.1 would guess:
    it reads 6e-4 as text, 010 as eight, the revision 1.10 as 1.1 and `project: on` as true.
    """

    # PyYAML resolves a scalar by patterns, indexed by its first character. Only the pattern of null
    # stays.
    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse("a key is no text", key.start_mark)
            if str(key.value) in names:
                mark = key.start_mark
                raise yaml.MarkedYAMLError(problem=f"{key.value} occurs twice", problem_mark=mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep=True)


def read_settings(path: Path) -> str:
    """The text of a file of settings. Raises OSError, or ValueError if it cannot be one."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"it is {kind}, and no file of at most {_MOST_CHARACTERS:,} characters")
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has over {_MOST_CHARACTERS:,} characters")
    return text


def parse_settings(text: str, loader: type[SettingsLoader]) -> Any:
    """The values of a text in YAML. Raises ValueError, with the reason in one line."""
    try:
        # A command reads the recipe of its run several times. The caller may change what it gets.
        return copy.deepcopy(_loaded(text, loader))
    # The last three come from explicit tags, such as !!bool maybe.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{one_line(getattr(error, 'problem', None) or error)}") from None


@functools.lru_cache(maxsize=16)
def _loaded(text: str, loader: type[SettingsLoader]) -> Any:
    return yaml.load(text, Loader=loader)


def parse_flow_list(text: str) -> list[Any]:
    """`a, "b, c", [d]` -> its values, read as a recipe reads them.

    Raises ValueError if it is no YAML.
    """
    return parse_settings(f"[{text}]", RecipeLoader)


# Readers of one type each: text, or a list, mapping or None from YAML, to a value of the type. What
# is none raises ValueError, or any of _NOT_THAT_TYPE.
_NOT_THAT_TYPE = (ValueError, TypeError, AttributeError, LookupError)


def is_null(value: Any) -> bool:
    return str(value).lower() in ("null", "none", "~")


def _null(value: Any) -> None:
    if not is_null(value):
        raise ValueError


def _boolean(value: Any) -> bool:
    return {"true": True, "false": False}[value.lower()]


def _integer(value: Any) -> int:
    # Messages write numbers as 491,520, so a user may copy one with its commas.
    value = re.sub(r"(?<=\d),(?=\d{3})", "", value)
    with contextlib.suppress(ValueError):
        # `int` comes first, since `float` loses digits above 2**53.
        return int(value)
    if not float(value).is_integer():
        raise ValueError
    return int(float(value))


def _number(value: Any) -> float:
    if not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _text(value: Any) -> str:
    # No recipe could hold these.
    if not isinstance(value, str) or "\0" in value or not is_utf8(value):
        raise ValueError
    return value


def _names(value: Any) -> list[str]:
    if isinstance(value, list):
        return [_text(part) for part in value]
    # In brackets it is YAML's list, whose quotes keep commas and spaces: '["The ", "If you "]'.
    if value.startswith("[") and value.endswith("]"):
        return _names(parse_flow_list(value[1:-1]))
    return [part.strip() for part in value.split(",") if part.strip()]


def _mapping(value: Any) -> dict[str, Any]:
    (tree,) = parse_flow_list(value) if isinstance(value, str) else [value]
    return {_text(key): _typed(part) for key, part in tree.items()}


def parse_field(value: Any) -> Any:
    """The value of a mapping's field, from the command line: text in brackets is YAML's list or
    mapping, as in a recipe. Raises ValueError if it is no YAML.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        (value,) = parse_flow_list(value)
    return value


def _typed(value: Any) -> Any:
    """The text in a tree from YAML as null, booleans, numbers or text, as YAML's later version 1.2
    reads it.
    """
    if isinstance(value, dict):
        return {key: _typed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_typed(part) for part in value]
    for read in (_null, _boolean, int, _number) if isinstance(value, str) else ():
        with contextlib.suppress(*_NOT_THAT_TYPE):
            return read(value)
    return value


def _mappings(value: Any) -> list[Any]:
    """The entries are checked by `convert_entries`. A text without mappings is none, but a glob."""
    if isinstance(value, str):
        (value,) = parse_flow_list(value)
    if not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
        raise ValueError
    return value


# How each type of the schema is called in messages, and its reader. `convert` tries the types of a
# knob in this order, so that `1` is an integer and `null` is not text.
_READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    NoneType: ("", _null),
    bool: ("true or false", _boolean),
    int: ("an integer", _integer),
    float: ("a number", _number),
    list[str]: ("a list of names", _names),
    dict[str, Any]: ("a mapping such as {name: value}", _mapping),
    list[dict[str, Any]]: ("a list of mappings", _mappings),
    str: ("text", _text),
}


def convert(knob: Knob, value: Any) -> Any:
    """`value` (text from a recipe or the command line) as the knob's type, within its bounds.

    Raises ValueError with a message such as "expected an integer, got 'ten'".
    """
    if not isinstance(value, list | dict | None):
        value = str(value)
    options = kind_options(knob.kind)
    if knob.default == "":  # null leaves such a knob out, as it does one whose default is null
        options = (NoneType, *options)
    if value in options:
        # One of the values of a Literal.
        return value
    kinds = [kind for kind in _READERS if kind in options]  # text last, so that `null` is None
    for kind in kinds:
        with contextlib.suppress(*_NOT_THAT_TYPE):
            result = _READERS[kind][1](value)
            break
    else:
        literals = ", ".join(option for option in options if isinstance(option, str))
        expected = [_READERS[kind][0] for kind in kinds if kind is not NoneType]
        expected = " or ".join(filter(None, [*expected, literals]))
        got = "nothing" if value is None else repr(value)
        raise ValueError(f"expected {expected}, got {got:.80}")
    if result is None:
        return "" if knob.default == "" else None
    high = LARGEST if knob.high is None and isinstance(result, int) else knob.high
    if knob.low is not None and result < knob.low:
        raise ValueError(f"must be at least {knob.low:g}, got {result!s:.40}")
    if high is not None and result > high:
        largest = f"{high:,}" if isinstance(high, int) else high
        raise ValueError(f"must be at most {largest}, got {result!s:.40}")
    return result


def convert_entries(
    entries: list[dict[str, Any]], knobs: dict[str, Knob], required: tuple[str, ...], example: str
) -> list[dict[str, Any]]:
    """The entries of a list of mappings, each value as the type of its knob.

    Raises ValueError with the number of the wrong entry.
    """
    converted = []
    for number, entry in enumerate(entries, 1):
        values = {}
        where = f"entry {number}: "
        for key, value in entry.items():
            if key not in knobs:
                raise ValueError(f"{where}{key}: cannot be set here{suggestion(key, knobs)}")
            try:
                values[key] = convert(knobs[key], value)
            except ValueError as error:
                raise ValueError(f"{where}{key}: {error}") from None
        if missing := [key for key in required if values.get(key) in (None, "")]:
            raise ValueError(f"{where}has no {missing[0]}, as in {example}")
        converted.append(values)
    if not converted:
        raise ValueError(f"an empty list; leave it out, or give entries such as {example}")
    return converted


def stated(text: str) -> str:
    """An argparse type: a path or a name."""
    if not text.strip(" ,"):
        raise argparse.ArgumentTypeError(f"expected a path or a name, got {text!r}")
    return text


def bounded(
    kind: type[int] | type[float], low: float, high: float | None = None
) -> Callable[[str], int | float]:
    """An argparse type: a number within inclusive bounds."""
    knob = Knob("", kind, None, "", low, high)

    def parse(text: str) -> int | float:
        try:
            return convert(knob, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
