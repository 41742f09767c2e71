"""Values of a row's fields: whether they have content, and can be written as JSON in UTF-8."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any


def checked_text(name: str, content: Any) -> str:
    """The text of the field `name`. Raises ValueError if it has none."""
    if not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"{name}: expected text, got {content!r:.40}; leave the row out, or fill it"
        )
    check_value(content)
    return content


def is_empty(value: Any) -> bool:
    """Whether a field has no content. Numbers and truth values always are content."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


@contextlib.contextmanager
def named_field(name: str) -> Iterator[None]:
    """Context in which a ValueError gets the name of a field."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_value(value: Any, levels: int = 100) -> None:
    """Raises ValueError unless a value is text, a number or null, or lists and objects of them, not
    too many inside of another. JSON can escape half a character, which UTF-8 cannot encode.
    """
    if isinstance(value, str):
        value.encode()
    elif type(value) in (list, dict) and not levels:
        raise ValueError("has too many lists and objects inside of each other")
    elif type(value) is list:
        for item in value:
            check_value(item, levels - 1)
    elif type(value) is dict:
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.40} is no name of a field")
            name.encode()
            check_value(item, levels - 1)
    elif value is not None and type(value) not in (bool, int):
        if type(value) is float and math.isfinite(value):
            return
        raise ValueError(f"{value!r:.40} is no text, number, list or object")
