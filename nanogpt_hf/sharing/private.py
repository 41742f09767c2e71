"""What must not leave the machine with a model: tokens, passwords in URLs, the name of the user's home folder."""

import os
import re

_HUB_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")


def without_private_parts(text: str) -> str:
    """`text` with the user's home folder as ~, and without the name and password that a URL may hold."""
    home = os.path.expanduser("~").rstrip("/")
    text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=/|\s|$)", "~", text) if home else text
    return re.sub(r"(https?://)[^/@\s]+@", r"\1", text)


def holds_token(content: bytes, token: str) -> bool:
    """Whether `token`, or anything that looks like a token of the Hub, is in `content`."""
    return token.encode() in content or _HUB_TOKEN.search(content) is not None
