"""Derive the seed of every random number of a run from the run's seed, a named stream and counters."""

import numpy as np

_NAMES = ("weights", "order", "dropout", "validation", "samples", "questions", "rollouts", "answers")  # append only
_STREAMS = {name: number for number, name in enumerate(_NAMES)}


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """A 64-bit seed for `stream` at `counters`, such as (step, micro-batch).

    NumPy keeps SeedSequence's output the same across its versions, so a run replays after an upgrade.
    """
    return int(np.random.SeedSequence([seed, _STREAMS[stream], *counters]).generate_state(1, np.uint64)[0])
