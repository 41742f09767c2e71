"""Writing text: tokens sampled one after another with a key-value cache, and bytes that become text as they come."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanogpt_hf.data.chat_prompt import render_prompt
from nanogpt_hf.data.tokenizer import unknown_characters_named
from nanogpt_hf.errors import DivergedError


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
    to_the_end: bool = False,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each of `num_samples` continuations; None for one that has ended.

    When all have ended it stops, unless `to_the_end`: then the model is run `max_new_tokens` times whatever it writes,
    as processes need that hold a part of it each. `temperature` 0 takes the likeliest token. Sample i draws from its
    own generator, seeded with `seed` + i, so it is the same however many are drawn beside it. Past the model's
    positions the newer half of the context is read anew and writing goes on from it. An empty prompt raises ValueError,
    and logits that are not finite raise DivergedError.
    """
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    greedy = temperature < 1e-5  # dividing by less overflows
    warpers = LogitsProcessorList()
    if not greedy:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    generators = [torch.Generator().manual_seed(seed + i) for i in range(num_samples)]
    ends = model.config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    most = model.config.max_position_embeddings
    context = torch.tensor([prompt_ids[-most:]] * num_samples, device=model.device)
    fresh, cache, ended = context, None, [False] * num_samples
    for _ in range(max_new_tokens):
        if context.shape[1] > most:
            context = context[:, -max(1, most // 2) :]
            fresh, cache = context, None
        out = model(fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits = warpers(context, out.logits[:, -1].float()).cpu()
        if not logits.amax(-1).isfinite().all():  # left-out tokens are -inf; a NaN would be the maximum
            raise DivergedError(
                "the model's logits are not finite: its training diverged, or its weights are damaged; "
                "choose another model or checkpoint"
            )
        if not greedy:
            chances = logits.softmax(-1)
            drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(chances, generators, strict=True)]
            tokens = torch.cat(drawn)
        else:
            tokens = logits.argmax(-1)
        ended = [was or token in ends for was, token in zip(ended, tokens.tolist(), strict=True)]
        if all(ended) and not to_the_end:
            return
        yield [None if over else token for over, token in zip(ended, tokens.tolist(), strict=True)]
        fresh = tokens[:, None].to(model.device)
        context = torch.cat([context, fresh], dim=1)


def continue_text(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompt_ids: list[int],
    **options: Any,
) -> str:
    """The text of one continuation; `options` are those of `generate_tokens`."""
    text = TextStream(tokenizer)
    steps = generate_tokens(model, prompt_ids, **options)
    return "".join(text.add(token) for (token,) in steps if token is not None) + text.end()


def ask(
    tokenizer: transformers.PreTrainedTokenizerBase, messages: list[dict[str, str]], most: int
) -> tuple[list[int], list[dict[str, str]]]:
    """Ids that ask for the answer to the last of `messages`, and the messages in them.

    Where they are more than `most`, the oldest go, a question with its answer; a system message and the last question
    stay. Raises ValueError where those alone are more, and DataError for a character that the tokenizer does not know.
    """
    while True:
        with unknown_characters_named(tokenizer, [message["content"] for message in messages]):
            text = render_prompt(tokenizer, messages)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= most:
            return ids, messages
        first = 1 if messages[0]["role"] == "system" else 0
        if len(messages) - first < 3:
            raise ValueError(f"{len(ids)} tokens are more than {most}")
        messages = messages[:first] + messages[first + 2 :]


class TextStream:
    """Tokens in, text out, as soon as it is whole: a character may be spread over several tokens."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase):
        self.tokenizer, self.ids, self.text = tokenizer, [], ""

    def add(self, token: int) -> str:
        """The text that `token` completes, '' while a character is still in pieces."""
        self.ids.append(token)
        return self._new_text(whole=False)

    def end(self) -> str:
        """What is left at the end, broken characters included."""
        return self._new_text(whole=True)

    def _new_text(self, whole: bool) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not whole and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self.text = text[len(self.text) :], text
        return new
