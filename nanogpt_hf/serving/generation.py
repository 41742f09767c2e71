"""What the server generates: the model it serves, the sequences of a request, and their text as
it arrives. One thread generates for many requests: active sequences take turns, a token each.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
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

ACTIVE = 8  # sequences that take turns, each with a key-value cache; the others wait in their order


class Sequence:
    """One text of a response: a thread takes the steps that generate its tokens; the event loop
    gets them from a queue and decodes them.

    The queue gets (index, token), at the end (index, None), or (index, exception).
    """

    def __init__(
        self,
        index: int,
        steps: Iterator[list[int | None]],
        limit: int,
        text: TextStream,
        stops: list[str],
        receiver: "asyncio.Queue[tuple[int, object]]",
    ):
        self.limit, self.length, self.finish_reason, self.canceled = limit, 0, "", False
        self._index, self._steps, self._receiver = index, steps, receiver
        self._text, self._stop = text, StopText(stops)
        self._loop = asyncio.get_running_loop()

    def step(self) -> bool:
        """Generate one token and deliver it; returns whether there may be more."""
        if self.canceled:
            self._steps = iter(())  # frees the key-value cache
            return False
        item: object
        try:
            (item,) = next(self._steps, (None,))
        except Exception as error:  # this sequence fails; the others continue
            item = error
        self.deliver(item)
        return isinstance(item, int)

    def deliver(self, item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._receiver.put_nowait, (self._index, item))

    def add(self, token: int | None) -> str:
        """The text that a token adds; None is the end."""
        self.length += token is not None
        text, stopped = self._stop.add(self._text.end() if token is None else self._text.add(token))
        if token is None and not stopped:
            text += self._stop.end()
        if stopped or token is None:
            self.finish_reason = "length" if self.length == self.limit and not stopped else "stop"
            self.canceled = True
        return text


class Scheduler(threading.Thread):
    """Generates the tokens of submitted sequences, one token of each active one in turn.

    A sequence is computed alone, not in a batch with others: so its tokens are bit for bit those
    of `sample`.
    """

    def __init__(self, precision: Callable[[], AbstractContextManager]):
        super().__init__(name="generation", daemon=True)
        self._precision = precision  # autocast is a setting of a thread
        # None only wakes the thread
        self._submitted: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._closing = False

    def submit(self, sequence: Sequence) -> None:
        self._submitted.put(sequence)

    def close(self) -> None:
        """End the thread; sequences that have not ended get an error.

        May be called by a signal handler.
        """
        self._closing = True
        self._submitted.put(None)

    def run(self) -> None:
        active: deque[Sequence] = deque()
        with self._precision():
            while not self._closing:
                with contextlib.suppress(queue.Empty):
                    while len(active) < ACTIVE:
                        sequence = self._submitted.get(block=not active)
                        if sequence is None:
                            break
                        active.append(sequence)
                if active and (sequence := active.popleft()).step():
                    active.append(sequence)
        while not self._submitted.empty():
            active.extend(filter(None, [self._submitted.get()]))
        for sequence in active:
            sequence.deliver(ApiError(503, "the server is shutting down"))


MAX_SEQUENCES = 128  # generated or waiting; more are refused
ALIVE_SECONDS = 10  # between two comments in a stream without new text, so that no proxy closes it


class Served:
    """The model that is served, and the sequences of all requests."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: Scheduler,
    ):
        self.name, self.model, self.tokenizer, self.scheduler = name, model, tokenizer, scheduler
        self.chat = ChatFormat(tokenizer) if tokenizer.chat_template else None
        self.end_ids = end_ids_of(model)
        self.answer_end_ids = answer_end_ids(model, self.chat) if self.chat else set[int]()
        self.context = int(model.config.max_position_embeddings)
        self.created = int(time.time())
        self.sequences = 0

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

    def encode(self, request: Request) -> tuple[list[list[int]], int]:
        """The prompt ids of each prompt, and the number of messages that were dropped to fit the
        context.
        """
        messages = kept = [message.for_template() for message in request.messages]
        param = "messages" if messages else "prompt"
        try:
            if not messages:
                prompts = [prompt_ids(self.tokenizer, text) for text in request.prompt]
            elif self.chat is None:
                raise ValueError(f"{self.name} has no chat template; use /v1/completions")
            elif request.truncation == "auto":  # as in `chat`
                room = min(request.limit or self.context, self.context // 2)
                ids, kept = encode_chat(self.chat, messages, self.context - room)
                prompts = [ids]
            else:
                prompts = [encode_messages(self.chat, messages)]
        except (DataError, ValueError) as error:
            raise ApiError(400, f"{param}: {error}", param) from None
        if (longest := max(map(len, prompts))) >= self.context:
            message = f"{param}: {longest} tokens leave no room for an answer: this model's context"
            message += f" has {self.context}; shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")
        return prompts, len(messages) - len(kept)


class Generation:
    """The sequences of one request, generated from its creation until all have ended or
    `cancel`.
    """

    def __init__(self, served: Served, request: Request, prompts: list[list[int]]):
        self._served, self._items = served, asyncio.Queue[tuple[int, Any]]()
        self.prompt_tokens, self.choices = sum(map(len, prompts)), list[Sequence]()
        count = len(prompts) * request.n
        if served.sequences + count > MAX_SEQUENCES:
            reason = f"{served.sequences} sequences are being generated or wait; try again later"
            raise ApiError(429, f"the server is busy: {reason}", None, "rate_limit_exceeded")
        # as in OpenAI's API: 16 tokens by default, and a chat may fill the context
        wanted = request.limit or (served.context if request.messages else 16)
        for ids in prompts:
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
                about = (limit, text, request.stop, self._items)
                self.choices.append(Sequence(len(self.choices), steps, *about))
        self._unfinished = count
        served.sequences += count
        for choice in self.choices:
            served.scheduler.submit(choice)

    async def pieces(self) -> AsyncIterator[tuple[int, str] | None]:
        """(index of a choice, its next text), until all have a finish reason; None for a while
        without any.
        """
        while not all(choice.finish_reason for choice in self.choices):
            try:
                index, item = await asyncio.wait_for(self._items.get(), ALIVE_SECONDS)
            except TimeoutError:
                yield None
                continue
            if self.choices[index].finish_reason:
                continue
            if isinstance(item, Exception):
                raise item
            yield index, self.choices[index].add(item)

    async def cancel(self) -> None:
        """Free what the request holds; its sequences generate no further token."""
        if not self._unfinished:
            return
        self._served.sequences -= self._unfinished
        self._unfinished = 0
        for choice in self.choices:
            choice.canceled = True

    def usage(self) -> dict[str, int]:
        completion = sum(choice.length for choice in self.choices)
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion}
        return counts | {"total_tokens": self.prompt_tokens + completion}
