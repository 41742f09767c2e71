"""The name of this program, as the user started it, for messages that name a command to type."""

import os
import shlex
import sys
from pathlib import Path

# `nanogpt-hf launch` starts its processes as a module. This variable tells them its own name.
LAUNCHER = "NANOGPT_HF_LAUNCHER"


def program() -> str:
    """`nanogpt-hf`, `python cli.py` or `python -m nanogpt_hf`.

    In any other Python program, such as a notebook, it is `nanogpt-hf`, which pip installs.
    """
    script = Path(sys.argv[0])
    if script.name == "cli.py":
        return f"python {shlex.quote(sys.argv[0])}"
    if script.parts[-2:] == ("nanogpt_hf", "__main__.py"):
        return os.environ.get(LAUNCHER, "python -m nanogpt_hf")
    return "nanogpt-hf"


def as_started(help_text: str | None) -> str:
    """A help text, which names the program `nanogpt-hf`, with the name that the user typed."""
    return (help_text or "").replace("nanogpt-hf", program())
