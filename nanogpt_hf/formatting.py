"""Format numbers, durations, byte counts, plurals and control characters for messages and reports;
whether progress bars are shown.
"""

import logging
import re
import sys
from collections.abc import Iterable, Sequence


def format_number(value: float, digits: int) -> str:
    """A number with `digits` decimals: 3.1416. One that would fill a line is 1e+300."""
    return f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """3725 -> 1 h 2 min"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_bytes(size: float) -> str:
    """2.5e9 -> 2.5 GB, 3e6 -> 3.0 MB"""
    # SI prefixes, powers of ten: so a disk of 1 TB has 1,000 GB.
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


# What could change a terminal's screen, title or clipboard; not tabs and ends of lines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
# And these.
_CONTROLS_AND_LINE_ENDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def escape_controls(text: str, *, lines: bool = False) -> str:
    """Escape control characters: \\x1b. With `lines` also tabs and ends of lines, which a value
    or a file's name may have, so that the result is one line.
    """
    controls = _CONTROLS_AND_LINE_ENDS if lines else _CONTROLS
    return controls.sub(lambda found: ascii(found[0])[1:-1], text)


def plural(count: int, noun: str) -> str:
    """1 process, 2 processes, 1,000 tensors"""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def align(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Lay out rows of cells as lines of text with aligned columns; the columns numbered in `right`
    are aligned to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    right = set(right)
    lines = []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if number in right else cell.ljust(width))
        # Without spaces at the end, which a narrow terminal would wrap.
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shows_bars() -> bool:
    """Whether live progress bars are shown: on a terminal, on the main process, and without -q."""
    return logging.getLogger("nanogpt_hf").isEnabledFor(logging.INFO) and sys.stderr.isatty()
