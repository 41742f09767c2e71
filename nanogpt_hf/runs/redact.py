"""What must not leave the machine with a model: tokens, passwords and keys in URLs, the name of the user's home."""

import os
import re

_HUB_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
# `?X-Amz-Signature=...`, `&sig=...`, `?access_token=...` of a URL that needs no login
_KEY_IN_URL = re.compile(
    r"([?&][\w.-]*(?:token|secret|sig|signature|key|credential|password)=)[^&\s'\"]+", re.IGNORECASE
)


def without_private_parts(text: str) -> str:
    """`text` with the user's home folder as ~, and without the passwords, keys and tokens that URLs in it may hold."""
    home = os.path.expanduser("~").rstrip("/")
    text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=/|\s|$)", "~", text) if home else text
    return _KEY_IN_URL.sub(r"\1...", re.sub(r"(https?://)[^/@\s]+@", r"\1", text))


def holds_token(content: bytes, token: str) -> bool:
    """Whether `token`, or anything that looks like a token of the Hub, is in `content`."""
    return token.encode() in content or _HUB_TOKEN.search(content) is not None
