"""Derive the seed of each random number from the run's seed, a named stream and counters."""

# The position of a name is part of the seeds of its stream: append new names, and never reorder, or
# runs of before would not replay.
_NAMES = (
    "weights",
    "order",
    "dropout",
    "validation",
    "samples",
    "questions",
    "rollouts",
    "answers",
    "turns",
    "offsets",
)
_STREAMS = {name: number for number, name in enumerate(_NAMES)}


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """A 64-bit seed for `stream` at `counters`, such as (step, micro-batch).

    NumPy keeps SeedSequence's output the same across its versions, so a run replays after an
    upgrade.
    """
    # NumPy is slow to import, and `--help` does without it.
    import numpy as np

    return int(
        np.random.SeedSequence([seed, _STREAMS[stream], *counters]).generate_state(1, np.uint64)[0]
    )
