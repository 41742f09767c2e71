"""Interleave the sources of a mixture by weight: which sample of which source is sample n, as a pure function of n."""

import numpy as np


class Interleave:
    """The order of a mixture: sources by sample number, in shares given by integer `weights`.

    Greedy, as in Megatron-LM's blended data sets (helpers.cpp), but in integers: sample n goes to the source that is
    furthest behind its share of n + 1 samples. With integer weights that order repeats after their sum, so a table of
    one period gives any sample at once, without counting up to it.
    """

    def __init__(self, weights: list[int]):
        self.weights, self.period = np.array(weights, dtype=np.int64), sum(weights)
        self._source = np.empty(self.period, dtype=np.int64)
        self._number = np.empty(self.period, dtype=np.int64)  # of the sample within its source and period
        counts = [0] * len(weights)
        for n in range(self.period):
            behind = [weight * (n + 1) - count * self.period for weight, count in zip(weights, counts, strict=True)]
            source = behind.index(max(behind))
            self._source[n], self._number[n] = source, counts[source]
            counts[source] += 1

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sample number, the source and the number of the sample within that source."""
        periods, places = np.divmod(numbers, self.period)
        sources = self._source[places]
        return sources, periods * self.weights[sources] + self._number[places]

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each source."""
        periods, rest = divmod(samples, self.period)
        return periods * self.weights + np.bincount(self._source[:rest], minlength=len(self.weights))
