"""Write plots as PNG files with a mark of this program, and find the mark in a file."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.runs.files import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SOFTWARE = "nanogpt_hf"
# A text chunk is its type, a keyword, a zero byte and the text (PNG specification, 11.3.3.2).
_MARK = b"tEXtSoftware\0" + _SOFTWARE.encode()
# Text is written before the pixels: after the signature (8 bytes), the header (25 bytes) and
# chunks of a few bytes.
_HEAD_BYTES = 1024
# Characters of a name in a plot; of long ones nothing would be left for the curves.
_NAME_LENGTH = 60


def plain(name: str) -> str:
    """A name or value of the user as text of a plot: in one line, without mathematics, which
    matplotlib sets between dollar signs, and cut in the middle if it is long.
    """
    name = " ".join(name.split())
    if len(name) > _NAME_LENGTH:
        half = _NAME_LENGTH // 2
        name = f"{name[:half]}…{name[-half:]}"
    return name.replace("$", r"\$")


def save_plot(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG in one rename. Its text chunk `Software` is nanogpt_hf.

    Raises UserError if it cannot be written.
    """
    with written_whole(path) as partial, warnings.catch_warnings():
        # A name may have letters that matplotlib's font lacks; it draws boxes for them.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(partial, format="png", metadata={"Software": _SOFTWARE})


def is_own_plot(path: Path) -> bool:
    """Whether a file was written by `save_plot`. What cannot be read was not."""
    try:
        # Reading a pipe might never end.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(_SIGNATURE) and _MARK in head
