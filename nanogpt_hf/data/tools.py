"""Tools of a conversation and calls of them, in the form of OpenAI."""

import json
from typing import Any

from nanogpt_hf.data.values import check_value, is_empty, named_field


def functions_of(value: Any) -> list[Any] | None:
    """Tools, or calls of tools, in OpenAI's form; None for an empty value. They may be JSON text.

    Raises ValueError for anything else.
    """
    if is_empty(value):
        return None
    check_value(value)
    if isinstance(value, str):
        value = _json(value)
    items = value if type(value) is list else [] if value is None else [value]
    return [_function(item) for item in items] or None


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, got {text!r:.40}") from None
    check_value(value)
    return value


def _function(value: Any) -> dict[str, Any]:
    """A tool, or a call of one: `{"type": "function", "function": {...}}`.

    null is no content: tables write it for the fields of other rows. Arguments that are JSON text,
    as OpenAI's are, become what they say, which is what chat templates expect.
    """
    # A bare {"name": ..., "arguments": ...} is a function without its wrapper.
    value = _without_null(value)
    if type(value) is dict and "function" not in value and "name" in value:
        value = {"type": "function", "function": value}
    function = value.get("function") if type(value) is dict else None
    if type(function) is not dict or not isinstance(function.get("name"), str):
        raise ValueError(f"expected a function with a name, got {value!r:.60}")
    # OpenAI writes the arguments as JSON text, and templates would put quotes around it again.
    if isinstance(arguments := function.get("arguments"), str):
        with named_field("arguments"):
            function = function | {"arguments": _json(arguments.strip() or "{}")}
    return value | {"function": function}


def _without_null(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if type(value) is list else value
