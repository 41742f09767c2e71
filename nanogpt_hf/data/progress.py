"""Progress of preparing data: whether bars are shown, and lines with the tokens per second and the time left."""

import logging
import sys
import time

from nanogpt_hf.formatting import format_duration

_SECONDS_BETWEEN_LINES = 60

logger = logging.getLogger(__name__)


def shows_bars() -> bool:
    """Whether live progress bars are shown: on a terminal, on the main process, and without -q."""
    return logging.getLogger("nanogpt_hf").isEnabledFor(logging.INFO) and sys.stderr.isatty()


class TokenProgress:
    """Log the tokens so far, tokens per second and, with a limit, the time left; at most one line per minute."""

    def __init__(self, limit: int | None):
        self.limit, self.tokens, self.new = limit, 0, 0
        self.start = self.logged = time.monotonic()

    def add(self, tokens: int, where: str, *, new: bool = True) -> None:
        """Count tokens. Those of before an interruption are not `new`: they count, but not for the speed."""
        self.tokens += tokens
        self.new += tokens * new
        now = time.monotonic()
        if not new or now < self.logged + _SECONDS_BETWEEN_LINES:
            return
        self.logged = now
        rate = self.new / (now - self.start)
        left = f", about {format_duration(max(0, self.limit - self.tokens) / rate)} left" if self.limit and rate else ""
        logger.info(f"{where}: {self.tokens:,} tokens, {rate:,.0f} per second{left}")
