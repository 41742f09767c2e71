"""Whether progress bars are shown."""

import logging
import sys


def shows_bars() -> bool:
    """Whether live progress bars are shown: on a terminal, on the main process, and without -q."""
    return logging.getLogger("nanogpt_hf").isEnabledFor(logging.INFO) and sys.stderr.isatty()
