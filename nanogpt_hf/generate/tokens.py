"""Continue a prompt, and hand its tokens on as they arrive."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
import transformers

from nanogpt_hf.generate.draws import FilteredDraw
from nanogpt_hf.generate.ends import end_ids_of
from nanogpt_hf.generate.stream import TextStream
from nanogpt_hf.generate.texts import Texts


@torch.no_grad()
def generate_tokens(
    model: transformers.PreTrainedModel,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end_ids: Collection[int] | None = None,
    to_the_end: bool = False,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each of `num_samples` continuations; None for one that
    has ended.

    A continuation ends before one of `end_ids`, by default the model's, and generation stops
    when all have ended. With `to_the_end` it runs the model `max_new_tokens` times in any case,
    which the processes of a sharded model need. Sample i is drawn by `seed` + i, so it does not
    depend on `num_samples`. Raises DivergedError if logits are not finite, and ValueError for an
    empty prompt.
    """
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    draw = FilteredDraw(range(seed, seed + num_samples), temperature, top_k, top_p)
    end_ids = end_ids_of(model) if end_ids is None else end_ids
    ends = torch.tensor(sorted(end_ids), dtype=torch.int64)
    texts = Texts(model)
    texts.start([prompt_ids] * num_samples)
    ended = torch.zeros(num_samples, dtype=torch.bool)
    for _ in range(max_new_tokens):
        tokens = draw(texts.next_logits())
        ended = ended | torch.isin(tokens, ends)
        # The token that ends a continuation is no part of its text.
        if ended.all() and not to_the_end:
            return
        pairs = zip(ended.tolist(), tokens.tolist(), strict=True)
        yield [None if over else token for over, token in pairs]
        texts.append(tokens)


def continue_text(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompt_ids: list[int],
    **options: Any,
) -> str:
    """Text of one continuation; `options` are arguments of `generate_tokens`."""
    stream = TextStream(tokenizer, prompt_ids)
    text = ""
    for (token,) in generate_tokens(model, prompt_ids, **options):
        if token is not None:
            text += stream.add(token)
    return text + stream.end()
