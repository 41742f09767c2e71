"""The chat page: one HTML file, and the headers that allow its own script and style only."""

import base64
import hashlib
import re
from importlib.resources import files


def load_page() -> tuple[str, dict[str, str]]:
    """The page and its headers.

    It talks to its own server only, and inserts text as text, never as HTML.
    """
    html = files("nanogpt_hf.serving").joinpath("chat.html").read_text("utf-8")
    hashes = {}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, flags=re.DOTALL)
        hashes[name] = (
            f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        )
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"connect-src 'self'; img-src data:; script-src {hashes['script']}; style-src "
        f"{hashes['style']}; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return html, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
