"""The schedules of the learning rate: a row each. `learning_rate_at` (optim/optimizer.py) adds the
warm-up.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Schedule(NamedTuple):
    """A value of `optim.schedule`."""

    # From update number `step` (0 is the first), the steps of warm-up, the step at which the decay
    # ends, and the section `optim`: 1 at the peak, less after it. Pure; it is asked for steps after
    # the warm-up alone.
    share: Callable[[int, int | float, int, Any], float]
    # Its part of the help text of optim.schedule; empty if its name is enough.
    meaning: str = ""
    # The share falls to 0 at optim.decay_steps, where the rate is optim.min_learning_rate. Without
    # an end these knobs are not read, and the rate is this share of the peak.
    ends: bool = True
    # The number of last steps that the decay takes, from the step at which it ends and the section
    # `optim`; the warm-up must not reach into them. 0 if the decay follows the warm-up.
    decay_steps: Callable[[int, Any], int] = lambda end, optim: 0


def _progress(step: int, warmup_steps: int | float, end: int) -> float:
    """The share of the steps after the warm-up that is done."""
    return min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))


def _cosine(step: int, warmup_steps: int | float, end: int, _: Any) -> float:
    # Half a period of a cosine, from 1 to 0: slow at both ends.
    return 0.5 * (1 + math.cos(math.pi * _progress(step, warmup_steps, end)))


def _wsd_decay_steps(end: int, optim: Any) -> int:
    return max(1, round(optim.decay_fraction * end))


def _wsd(step: int, _: int | float, end: int, optim: Any) -> float:
    # Constant until the decay (warm-up, stable, decay).
    return min(1.0, max(0.0, (end - step) / _wsd_decay_steps(end, optim)))


SCHEDULES = {
    # nanoGPT's `get_lr` (train.py) with lr_decay_iters = decay_steps
    "cosine": Schedule(_cosine),
    "linear": Schedule(lambda step, warmup, end, _: 1 - _progress(step, warmup, end)),
    "constant": Schedule(lambda *_: 1.0, ends=False),
    # Hu et al. 2024, arXiv:2404.06395, section 4, with a linear decay
    "wsd": Schedule(_wsd, "constant, then linear decay at the end", decay_steps=_wsd_decay_steps),
    # Vaswani et al. 2017, arXiv:1706.03762, section 5.3, whose warm-up ends at update W + 1
    "inverse_sqrt": Schedule(
        lambda step, warmup, *_: math.sqrt((warmup + 1) / (step + 1)),
        "falls as 1 / √step, without an end",
        ends=False,
    ),
}
ENDLESS = tuple(name for name, row in SCHEDULES.items() if not row.ends)
