"""Redact secrets: users, passwords and parameters in URLs, tokens, the path of the user's home."""

import os
import re
from collections.abc import Callable
from typing import Any

_SECRETS = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
# A user with a password may have any character before its @; without one, none of a path.
_URL = re.compile(
    r"([a-z][a-z0-9+.-]*://)([^\s/?#]*@|[^\s/?#:]*:(?!\d*[/?#])\S*@)?([^\s?#]*)([?#]\S*)?",
    re.IGNORECASE,
)
_AFTER_URL = re.compile(r"""[\])}>'"`,.:;]*$""")  # punctuation of the text around the URL


def redact_urls(text: str) -> str:
    """`text` without users, passwords and parameters in its URLs: for messages on this machine.

    A secret in the path is not recognized.
    """

    def hide(url: re.Match[str]) -> str:
        scheme, _, path, parameters = url.groups("")
        end = _AFTER_URL.search(parameters)
        return f"{scheme}{path}{parameters[:1]}{'...' if parameters else ''}{end[0] if end else ''}"

    return _URL.sub(hide, text) if "://" in text else text


def redact_message(text: str) -> str:
    """An error or log line with `redact_urls`, also where a library quotes a secret again."""
    shown = redact_urls(text)
    for _, user, _, parameters in _URL.findall(text):
        for word in re.split(r"[:@=&;?#'\"]", user + parameters):
            if len(word) > 3:
                shown = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", shown)
    return shown


def redact(text: str) -> str:
    """`text` for other people: `redact_urls`, and the user's home folder as ~."""
    home = os.path.expanduser("~").rstrip("/")
    if home:
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", text)
    return redact_urls(text)


def redact_tree(tree: Any, redact_text: Callable[[str], str] = redact) -> Any:
    """A JSON or YAML tree with every string in it redacted."""
    match tree:
        case str():
            return redact_text(tree)
        case dict():
            return {key: redact_tree(value, redact_text) for key, value in tree.items()}
        case list() | tuple():
            return [redact_tree(value, redact_text) for value in tree]
    return tree


def holds_token(content: bytes, token: str) -> bool:
    """Whether `content` has `token`, or anything like a token of the Hub or a private key."""
    return token.encode() in content or _SECRETS.search(content) is not None
