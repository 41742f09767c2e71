"""Draw the next token of each text of a batch from logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanogpt_hf.errors import DivergedError

LOGITS_NOT_FINITE = (
    "the model's logits are not finite: its training diverged, or its weights are damaged; choose "
    "another model or checkpoint"
)
# Below this temperature the likeliest token is taken: logits that are divided by less overflow, and
# by then it has all probability.
_GREEDY_BELOW = 1e-5
# In place of a token that could not be drawn, since logits are not finite.
NO_TOKEN = -1


class FilteredDraw:
    """Draws on the CPU by `torch.multinomial`, from the likeliest tokens only if asked.

    Row i draws from its own generator, seeded with `seeds[i]`. `temperature` 0 is greedy.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        temperature: float,
        top_k: int | None,
        top_p: float | None,
    ):
        self._greedy = temperature < _GREEDY_BELOW
        # A generator for each row: what one row draws does not move the others.
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        text: Any = None  # these warpers do not read it
        logits = self._warpers(text, logits).cpu()
        # Tokens that were filtered out are -inf, so only the largest logit of a row has to be
        # finite. A NaN would be the largest.
        if not logits.amax(-1).isfinite().all():
            raise DivergedError(LOGITS_NOT_FINITE)
        if self._greedy:
            return logits.argmax(-1)
        # (rows, V): a row of probabilities with its generator.
        rows = zip(logits.softmax(-1), self._generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=source) for row, source in rows])


def draw_by_quantile(
    logits: torch.Tensor, numbers: Sequence[float], temperature: float
) -> torch.Tensor:
    """Draw on the logits' device the token at which a row's cumulative distribution passes its
    number in [0, 1): tokens (rows,), from logits (rows, V) in float32.

    Temperature 0 is greedy, and so are the lowest ones. A row whose logits are not finite gets
    NO_TOKEN: an error here would let the host wait for the device.
    """
    # MPS has no float64.
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    if temperature >= _GREEDY_BELOW:
        cumulative = (logits / temperature).softmax(-1).cumsum(-1, dtype=exact)
        # Inverse transform sampling: a uniform number falls into the interval of token v with
        # probability p(v). The last sum is 1 up to rounding. Scaled by it, a number below 1 falls
        # into the distribution; the clamp is for a product that is rounded up to that sum.
        places = torch.tensor(numbers, dtype=exact).to(logits.device)[:, None]  # (rows, 1)
        tokens = torch.searchsorted(cumulative, places * cumulative[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[1] - 1)
    else:
        tokens = logits.argmax(-1)
    return tokens.where(logits.isfinite().all(-1), NO_TOKEN)


def uniform_numbers(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of a seed. They come from raw bits, so that completions
    stay the same with every version of torch and NumPy.
    """
    return (np.random.Philox(key=seed).random_raw(count) >> np.uint64(11)) * 2.0**-53
