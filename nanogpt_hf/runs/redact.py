"""What must not leave the machine or be printed: passwords and keys in URLs, tokens, the name of the user's home."""

import os
import re
from typing import Any

_SECRETS = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)(\S+)", re.IGNORECASE)
_AFTER_URL = re.compile(r"""[\])}>'"`,.:;]*$""")  # of the sentence or quotation that the URL stands in
# The only parameters of a URL whose values are shown. There are too many names of secrets to list those instead.
_HARMLESS = {
    *("alt", "branch", "commit", "config", "dl", "download", "ext", "format", "lang", "language", "limit", "offset"),
    *("order", "page", "raw", "ref", "rev", "revision", "sort", "split", "subset", "type", "v", "version"),
}
_HARMLESS_VALUE = re.compile(r"[\w.,:+-]{0,64}")


def redact_urls(text: str) -> str:
    """`text` with no user name, password or key in its URLs: for messages on this machine.

    Of a URL the user and password go, and the value of each parameter, after `?` or `#`, that is not known to be
    harmless. A secret in the path is not recognised.
    """
    return _URL.sub(_redact_url, text) if "://" in text else text


def _redact_url(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    after = _AFTER_URL.search(rest)[0]
    rest = rest.removesuffix(after)
    host, path = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()
    if "@" not in host and "@" in path and re.search(r":(?!\d*$)", host):
        host, path = "", path.rpartition("@")[2]  # what looks like a port is a password with / ? or # in it
        host, path = re.fullmatch(r"([^/?#]*)(.*)", path, re.DOTALL).groups()
    path, mark, parameters = re.fullmatch(r"([^?#]*)([?#]?)(.*)", path, re.DOTALL).groups()
    parts = re.split(r"([&;#])", parameters)
    parts[::2] = map(_redact_parameter, parts[::2])
    return f"{scheme}{host.rpartition('@')[2]}{path}{mark}{''.join(parts)}{after}"


def _redact_parameter(parameter: str) -> str:
    key, equals, value = parameter.partition("=")
    if not parameter or (key.lower() in _HARMLESS and _HARMLESS_VALUE.fullmatch(value)):
        return parameter
    return f"{key}=..." if equals else "..."


def redact(text: str) -> str:
    """`text` for others to see: `redact_urls`, and the user's home folder as ~."""
    home = os.path.expanduser("~").rstrip("/")
    text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=[/\s'\"),:;\]}}]|$)", "~", text) if home else text
    return redact_urls(text)


def redact_tree(tree: Any, redact_text=redact) -> Any:
    """What JSON or YAML holds, with every text in it redacted."""
    match tree:
        case str():
            return redact_text(tree)
        case dict():
            return {key: redact_tree(value, redact_text) for key, value in tree.items()}
        case list() | tuple():
            return [redact_tree(value, redact_text) for value in tree]
    return tree


def redact_message(text: str) -> str:
    """An error line or log line with `redact_urls`; a library's reason in it may quote a part of the URL once more."""
    shown = redact_urls(text)
    words, left = (set(re.split(r"[^\w%.~+-]+", " ".join(map("".join, _URL.findall(t))))) for t in (text, shown))
    for word in sorted(words - left, key=len, reverse=True):
        if len(word) > 3:
            shown = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", shown)
    return shown


def holds_token(content: bytes, token: str) -> bool:
    """Whether `token`, or anything that looks like a token of the Hub or a private key, is in `content`."""
    return token.encode() in content or _SECRETS.search(content) is not None
