"""Read the calls of tools that a model has written, in the form of its chat template.

Templates write a call in one of three styles, which are found by a rendered example:

    {"name": "add", "arguments": {"x": 1}}     an object of JSON (Qwen 3, Llama 3, Mistral)
    add[ARGS]{"x": 1}                          a name and its arguments in JSON (newer Mistral)
    <function=add> <parameter=x> 1 ...         a name and a mark for each argument (Qwen 3.5, GLM)
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Call = dict[str, Any]  # {"type": "function", "function": {"name": ..., "arguments": {...}}}
# Reads the call at a place of a text: name, arguments, and the place behind it. Raises ValueError
# with the reason if there is none.
_ReadCall = Callable[[str, int], tuple[str, dict[str, Any], int]]

_NAME = re.compile(r"[\w.\-]+")


def _no_constant(name: str) -> None:
    raise ValueError(name)


# NaN and Infinity are no JSON, but Python would read them.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def call_of(name: str, arguments: dict[str, Any]) -> Call:
    """A call in OpenAI's form, with the arguments as an object."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# The calls of the example. No template has these words itself.
EXAMPLES = [
    call_of("probe_first", {"probe_a": "Bravo", "probe_b": "Delta"}),
    call_of("probe_second", {"probe_c": "Tango", "probe_d": "Whiskey"}),
]


class Found(NamedTuple):
    """An answer without its thought, divided into text and calls."""

    content: str
    calls: list[Call]
    problem: str = ""  # why the calls cannot be read; '' if they can, or there are none


@dataclass(frozen=True)
class CallFormat:
    """The marks around the calls of an answer, and how one call is read."""

    begin: str  # before the first call; '' if an answer that calls begins with the call
    between: str | None  # between two calls; None if the template writes one call only
    end: str  # after the last call
    read_call: _ReadCall

    def read(self, text: str, tools: Sequence[Any] = ()) -> Found:
        """Divide an answer into its text and its calls. `tools` have the types of the arguments
        that are written without quotes.
        """
        start = self.start(text)
        if start is None:
            return Found(text, [])
        before = text[:start]
        calls: list[Call] = []
        try:
            behind = self._read_groups(text, start, calls)
        except (ValueError, RecursionError) as error:
            # A text that begins as JSON without a mark may be an answer in JSON.
            if not self.begin:
                return Found(text, [])
            return Found(before.strip(), calls, str(error))
        content = before + text[behind:]
        return Found(content.strip(), [_typed(call, tools) for call in calls])

    def start(self, text: str) -> int | None:
        """Where calls may begin in a text; None if it has none."""
        if self.begin:
            found = text.find(self.begin)
            return found if found >= 0 else None
        return 0 if text.lstrip().startswith("{") else None

    def _read_groups(self, text: str, start: int, calls: list[Call]) -> int:
        """Read all calls of a text, and return the place behind the last one. Some models write
        the marks around each call. Text between the marks is left out.
        """
        place = self._read_group(text, start + len(self.begin), calls)
        while self.begin and self.begin in text[place:]:
            start = text.index(self.begin, place)
            place = self._read_group(text, start + len(self.begin), calls)
        if self.between is None and len(calls) > 1:
            raise ValueError("an answer of this model has one call only")
        return place

    def _read_group(self, text: str, place: int, calls: list[Call]) -> int:
        """Read calls up to the mark of their end, and return the place behind it."""
        while True:
            name, arguments, place = self.read_call(text, place)
            calls.append(call_of(name, arguments))
            if self.between is not None:
                behind = _skip(text, place, self.between)
                if behind is not None:
                    place = behind
                    continue
            behind = _skip(text, place, self.end)
            if behind is None:
                raise ValueError(f"the call of {name!r:.60} does not end with {self.end!r}")
            return behind


def common_start(first: str, second: str) -> str:
    """The characters with which both texts begin."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def derive_format(answer: Callable[[list[Call]], str | None]) -> CallFormat | None:
    """Find the format of calls by examples.

    `answer` gives what a model has to write for some calls, None if the template has no such
    answer. None if the template writes no calls, or writes them in an unknown style.
    """
    one = answer(EXAMPLES[:1])
    if one is None:
        return None
    for style in (_object_style, _arguments_style, _parameters_style):
        found = style(one, EXAMPLES[0])
        if found is None:
            continue
        start, stop, read_call = found
        # A name may come after a mark that is a part of a longer one: white space does not count.
        form = CallFormat(one[:start].strip(), None, one[stop:].strip(), read_call)
        two = answer(EXAMPLES)
        if two is not None:
            first = style(two, EXAMPLES[0])
            second = style(two, EXAMPLES[1])
            if first and second:
                form = replace(form, between=two[first[1] : second[0]].strip())
        return form
    return None


def _skip(text: str, place: int, mark: str) -> int | None:
    """The place behind a mark, with white space before it; None if the text has another."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place + len(mark) if text.startswith(mark, place) else None


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """Read the value of JSON at a place. Raises ValueError with a short reason."""
    place = _skip(text, place, "") or 0
    try:
        value, stop = _DECODER.raw_decode(text, place)
        # JSON can escape half a character, which no tokenizer encodes. 1e999 becomes an infinity,
        # which JSON cannot write.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value, stop
    except (ValueError, RecursionError):
        raise ValueError(f"the call is no JSON: {text[place : place + 40]!r}") from None


def _name_at(text: str, place: int) -> tuple[str, int]:
    name = _NAME.match(text, place)
    if name is None:
        raise ValueError(f"the call has no name: {text[place : place + 40]!r}")
    return name[0], name.end()


def _checked_arguments(name: str, arguments: Any) -> dict[str, Any]:
    # Some models write the arguments as OpenAI does: as a text of JSON.
    if isinstance(arguments, str):
        arguments = _json_at(arguments, 0)[0]
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name!r:.60} are no object: {arguments!r:.40}")
    return arguments


_Style = tuple[int, int, _ReadCall] | None  # where the call of the example begins and ends


def _object_style(text: str, example: Call) -> _Style:
    function = example["function"]
    for start, value, stop in _objects(text):
        keys = {json.dumps(item): key for key, item in value.items()}
        name_key = keys.get(json.dumps(function["name"]))
        arguments_key = keys.get(json.dumps(function["arguments"]))
        if name_key is None or arguments_key is None:
            continue

        def read(
            text: str, place: int, name_key: str = name_key, arguments_key: str = arguments_key
        ) -> tuple[str, dict[str, Any], int]:
            value, stop = _json_at(text, place)
            name = value.get(name_key) if isinstance(value, dict) else None
            if not isinstance(name, str):
                raise ValueError(f"the call has no {name_key!r}: {json.dumps(value)[:60]}")
            return name, _checked_arguments(name, value.get(arguments_key, {})), stop

        return start, stop, read
    return None


def _arguments_style(text: str, example: Call) -> _Style:
    function = example["function"]
    start = text.find(function["name"])
    if start < 0:
        return None
    named = start + len(function["name"])
    for opened, value, stop in _objects(text):
        if opened < named or value != function["arguments"]:
            continue
        mark = text[named:opened].strip()

        def read(text: str, place: int, mark: str = mark) -> tuple[str, dict[str, Any], int]:
            name, place = _name_at(text, _skip(text, place, "") or 0)
            behind = _skip(text, place, mark)
            if behind is None:
                raise ValueError(f"the call of {name!r:.60} has no {mark!r} before its arguments")
            value, stop = _json_at(text, behind)
            return name, _checked_arguments(name, value), stop

        return start, stop, read
    return None


def _parameters_style(text: str, example: Call) -> _Style:
    function = example["function"]
    (key, value), (next_key, next_value) = function["arguments"].items()
    words = [function["name"], key, value, next_key, next_value]
    places = []
    place = 0
    for word in words:
        place = text.find(word, place)
        if place < 0:
            return None
        places.append(place)
        place += len(word)
    # name GAP key GAP value GAP key GAP value GAP
    ends = [start + len(word) for start, word in zip(places, words, strict=True)]
    after_name, after_key, after_value, after_next = (
        text[end:start] for end, start in zip(ends, places[1:], strict=False)
    )
    if after_key != after_next:
        return None
    opening = common_start(after_name[::-1], after_value[::-1])[::-1]
    name_close = after_name.removesuffix(opening)
    value_close = after_value.removesuffix(opening)
    if not (opening and after_key and value_close):
        return None

    def read(text: str, place: int) -> tuple[str, dict[str, Any], int]:
        name, place = _name_at(text, _skip(text, place, "") or 0)
        if text.startswith(name_close + opening, place):
            place += len(name_close)
        arguments = {}
        while text.startswith(opening, place):
            place += len(opening)
            key_stop = text.find(after_key, place)
            value_stop = text.find(value_close, key_stop + len(after_key))
            if key_stop < 0 or value_stop < 0:
                raise ValueError(f"an argument of {name!r:.60} does not end")
            arguments[text[place:key_stop]] = text[key_stop + len(after_key) : value_stop]
            place = value_stop + len(value_close)
        return name, arguments, place

    stop = ends[-1] + len(value_close)
    return (places[0], stop, read) if text.startswith(value_close, ends[-1]) else None


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yield every object of JSON in a text: where it begins, its value, and where it ends."""
    for brace in re.finditer(r"\{", text):
        try:
            value, stop = _DECODER.raw_decode(text, brace.start())
        except ValueError:
            continue
        yield brace.start(), value, stop


def _typed(call: Call, tools: Sequence[Any]) -> Call:
    """Read arguments that are written without quotes by the types that their tool states: `7` is
    a number, but the text "7" if the tool wants a text.
    """
    function = call["function"]
    stated: dict[str, Any] = {}
    for tool in tools:
        wanted = tool.get("function", {}) if isinstance(tool, dict) else {}
        if isinstance(wanted, dict) and wanted.get("name") == function["name"]:
            parameters = wanted.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            stated = properties if isinstance(properties, dict) else {}
    arguments = {
        name: _value(value, stated[name]) if name in stated else value
        for name, value in function["arguments"].items()
    }
    return call_of(function["name"], arguments)


def _value(value: Any, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if not isinstance(value, str) or None in kinds or "string" in kinds:
        return value
    # Templates write true as Python does.
    text = value.lower() if "boolean" in kinds else value
    try:
        found, stop = _json_at(text, 0)
    except ValueError:
        return value
    return value if text[stop:].strip() else found
