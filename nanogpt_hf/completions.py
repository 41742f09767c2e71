"""Completions of many prompts at once: batched sampling with a key-value cache, each row from
its own seed.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
import transformers

from nanogpt_hf.errors import DivergedError
from nanogpt_hf.generate import LOGITS_NOT_FINITE


class Completions(NamedTuple):
    """Completions of the rows of a batch, on the CPU."""

    ids: torch.Tensor  # (rows, max_new_tokens) int64, 0 after the end
    lengths: torch.Tensor  # (rows,) tokens of each, including the one that ends it
    ended: torch.Tensor  # (rows,) whether it ended by itself, before max_new_tokens


@torch.no_grad()
def generate_completions(
    model: transformers.PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    end_ids: Collection[int],
    all_ended: Callable[[bool], bool] = bool,
) -> Completions:
    """Sample one completion for each prompt, all rows together; `temperature` 0 is greedy.

    Row i depends on its prompt, `seeds[i]` and, by rounding, on the shape of the batch, but not
    on the other rows: token t is where the t-th uniform number of the row's seed falls in the
    cumulative distribution. A completion ends with one of `end_ids`. `all_ended` is called
    before each forward pass with whether all rows have ended, and ends the generation if it
    returns true; processes that share a sharded model must decide it together. Raises
    DivergedError if logits are not finite.
    """
    device, rows = model.device, len(prompts)
    width = max(map(len, prompts))
    unread = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.zeros(rows, width + max_new_tokens, dtype=torch.int64)
    # padded on the left, so that all continue at the same column
    for row, prompt in enumerate(prompts):
        unread[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    unread, mask = unread.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    uniform = torch.from_numpy(np.stack([_uniform(seed, max_new_tokens) for seed in seeds])).to(
        device, exact
    )
    ends = torch.tensor(sorted(end_ids), device=device)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    cache = None
    for number in range(max_new_tokens):
        if all_ended(bool(ended.all())):
            break
        out = model(
            unread,
            attention_mask=mask[:, : width + number],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        finite &= logits.isfinite().all()
        if temperature:
            cumulative = (logits / temperature).softmax(-1).cumsum(-1, dtype=exact)
            places = torch.searchsorted(
                cumulative, uniform[:, number, None] * cumulative[:, -1:], right=True
            )
            tokens = places[:, 0].clamp(max=logits.shape[1] - 1)
        else:
            tokens = logits.argmax(-1)
        ids[:, number] = tokens.masked_fill(ended, 0)
        lengths += ~ended
        ended = ended | torch.isin(tokens, ends)
        unread, positions = tokens[:, None], positions[:, -1:] + 1
    if not finite:
        raise DivergedError(f"{LOGITS_NOT_FINITE}, or lower optim.learning_rate")
    return Completions(ids.cpu(), lengths.cpu(), ended.cpu())


def _uniform(seed: int, count: int) -> np.ndarray:
    """Numbers in [0, 1) from raw bits, which no version of NumPy changes."""
    return (np.random.Philox(key=seed).random_raw(count) >> np.uint64(11)) * 2.0**-53
