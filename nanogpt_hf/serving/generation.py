"""What the server generates: the model it serves, and the texts of a request as they arrive."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.tokenizer import prompt_ids
from nanogpt_hf.errors import DataError
from nanogpt_hf.generate import (
    StopText,
    TextStream,
    answer_end_ids,
    encode_chat,
    encode_messages,
    end_ids_of,
    generate_tokens,
)
from nanogpt_hf.serving.requests import ApiError, Request

ACTIVE = 8  # requests that take turns, each with a key-value cache; the others wait in their order


class Served:
    """The model that is served, and the thread that runs it, one token of each active request in
    turn.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Callable[[], AbstractContextManager],
    ):
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.chat = ChatFormat(tokenizer) if tokenizer.chat_template else None
        self.end_ids = end_ids_of(model)
        self.answer_end_ids = answer_end_ids(model, self.chat) if self.chat else set[int]()
        self.context = int(model.config.max_position_embeddings)
        self.created = int(time.time())
        # autocast is a setting of a thread
        self.thread = ThreadPoolExecutor(1, "generation", initializer=precision().__enter__)
        self.turns = asyncio.Semaphore(ACTIVE)
        self.closing = False

    def entry(self) -> dict[str, Any]:
        """The model in the list of models; `max_model_len` and `chat` are not in OpenAI's API."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanogpt_hf",
            "max_model_len": self.context,
            "chat": self.chat is not None,
        }

    def encode(self, request: Request) -> tuple[list[int], int]:
        """The prompt ids, and the number of messages that were dropped to fit the context."""
        messages = kept = [message.for_template() for message in request.messages]
        param = "messages" if messages else "prompt"
        try:
            if not messages:
                ids = prompt_ids(self.tokenizer, request.prompt)
            elif self.chat is None:
                raise ValueError(f"{self.name} has no chat template; use /v1/completions")
            elif request.truncation == "auto":  # as in `chat`
                room = min(request.limit or self.context, self.context // 2)
                ids, kept = encode_chat(self.chat, messages, self.context - room)
            else:
                ids = encode_messages(self.chat, messages)
        except (DataError, ValueError) as error:
            raise ApiError(400, f"{param}: {error}", param) from None
        if len(ids) >= self.context:
            message = f"{param}: {len(ids)} tokens leave no room for an answer: this model's "
            message += f"context has {self.context}; shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")
        return ids, len(messages) - len(kept)


class Choice:
    """One text of a response."""

    def __init__(
        self, steps: Iterator[list[int | None]], limit: int, text: TextStream, stops: list[str]
    ):
        self.steps, self.length, self.finish_reason = steps, 0, ""
        self._limit, self._text, self._stop = limit, text, StopText(stops)

    def add(self, token: int | None) -> str:
        """The text that a token adds; None is the end."""
        self.length += token is not None
        text, stopped = self._stop.add(self._text.end() if token is None else self._text.add(token))
        if token is None and not stopped:
            text += self._stop.end()
        if stopped or token is None:
            self.finish_reason = "stop" if stopped or self.length < self._limit else "length"
        return text


class Generation:
    """The texts of one request, one after the other.

    Each is computed alone, not in a batch with others: so its tokens are bit for bit those of
    `sample`.
    """

    def __init__(self, served: Served, request: Request, ids: list[int]):
        self._served, self._prompt_tokens, self.choices = served, len(ids), list[Choice]()
        # as in OpenAI's API: 16 tokens by default, and a chat may fill the context
        wanted = request.limit or (served.context if request.messages else 16)
        limit = min(wanted, served.context - len(ids))
        for i in range(request.n):
            steps = generate_tokens(
                served.model,
                ids,
                max_new_tokens=limit,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                seed=request.seed + i,
                end_ids=served.answer_end_ids if request.messages else served.end_ids,
            )
            text = TextStream(served.tokenizer, () if request.messages else ids)
            self.choices.append(Choice(steps, limit, text, request.stop))

    async def pieces(self) -> AsyncGenerator[tuple[int, str]]:
        """(index of a choice, its next text), until all have a finish reason."""
        loop, thread = asyncio.get_running_loop(), self._served.thread
        async with self._served.turns:
            for index, choice in enumerate(self.choices):
                try:
                    while not choice.finish_reason:
                        if self._served.closing:
                            raise ApiError(503, "the server is shutting down")
                        (token,) = await loop.run_in_executor(thread, next, choice.steps, [None])
                        yield index, choice.add(token)
                finally:
                    choice.steps = iter(())  # frees the key-value cache

    def usage(self) -> dict[str, int]:
        completion = sum(choice.length for choice in self.choices)
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion}
        return counts | {"total_tokens": self._prompt_tokens + completion}
