"""Redact secrets: passwords and keys in URLs, tokens, the path of the user's home."""

import os
import re
from typing import Any

_SECRETS = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)(\S+)", re.IGNORECASE)
_AFTER_URL = re.compile(r"""[\])}>'"`,.:;]*$""")  # punctuation of the text around the URL
# The only URL parameters whose values are shown: names of secrets are too many to list.
_HARMLESS = {
    *("alt", "branch", "commit", "config", "dl", "download", "ext", "format", "lang", "language", "limit", "offset"),
    *("order", "page", "raw", "ref", "rev", "revision", "sort", "split", "subset", "type", "v", "version"),
}
_HARMLESS_VALUE = re.compile(r"[\w.,:+-]{0,64}")


def redact_urls(text: str) -> str:
    """`text` without user names, passwords and keys in its URLs: for messages on this machine.

    Redacts user and password, and the value of each parameter after `?` or `#` that is not known to be harmless. Does
    not recognise a secret in the path.
    """
    return _URL.sub(_redact_url, text) if "://" in text else text


def _redact_url(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    url = _AFTER_URL.sub("", rest)
    after = rest[len(url) :]
    host, path = _split_at(r"[/?#]", url)
    if "@" not in host and "@" in path and re.search(r":(?!\d*$)", host):
        host, path = "", path.rpartition("@")[2]  # a password with / ? or # in it looks like a port
        host, path = _split_at(r"[/?#]", path)
    path, query = _split_at(r"[?#]", path)
    mark, parameters = query[:1], query[1:]
    parts = re.split(r"([&;#])", parameters)
    parts[::2] = map(_redact_parameter, parts[::2])
    return f"{scheme}{host.rpartition('@')[2]}{path}{mark}{''.join(parts)}{after}"


def _split_at(pattern: str, text: str) -> tuple[str, str]:
    """`text` before the first match of `pattern`, and the rest."""
    match = re.search(pattern, text)
    return (text[: match.start()], text[match.start() :]) if match else (text, "")


def _redact_parameter(parameter: str) -> str:
    key, equals, value = parameter.partition("=")
    if not parameter or (key.lower() in _HARMLESS and _HARMLESS_VALUE.fullmatch(value)):
        return parameter
    return f"{key}=..." if equals else "..."


def redact(text: str) -> str:
    """`text` for other people: `redact_urls`, and the user's home folder as ~."""
    home = os.path.expanduser("~").rstrip("/")
    text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=[/\s'\"),:;\]}}]|$)", "~", text) if home else text
    return redact_urls(text)


def redact_tree(tree: Any, redact_text=redact) -> Any:
    """A JSON or YAML tree with every string in it redacted."""
    match tree:
        case str():
            return redact_text(tree)
        case dict():
            return {key: redact_tree(value, redact_text) for key, value in tree.items()}
        case list() | tuple():
            return [redact_tree(value, redact_text) for value in tree]
    return tree


def redact_message(text: str) -> str:
    """An error or log line with `redact_urls`, also where a library quotes a part of the URL again."""
    shown = redact_urls(text)
    words, left = (set(re.split(r"[^\w%.~+-]+", " ".join(map("".join, _URL.findall(t))))) for t in (text, shown))
    for word in sorted(words - left, key=len, reverse=True):
        if len(word) > 3:
            shown = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", shown)
    return shown


def holds_token(content: bytes, token: str) -> bool:
    """Whether `content` has `token`, or anything that looks like a token of the Hub or a private key."""
    return token.encode() in content or _SECRETS.search(content) is not None
