"""Model that the server serves, and the texts of a request as they are generated."""

import asyncio
import copy
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nanogpt_hf.data.answer_format import AnswerFormat, answer_format
from nanogpt_hf.data.answer_stream import AnswerSplitter, ThoughtTokens, begun_at_end
from nanogpt_hf.data.call_format import Call
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.chat_window import TooManyTokensError, encode_chat
from nanogpt_hf.data.hf_tokenizer import prompt_ids
from nanogpt_hf.errors import DataError
from nanogpt_hf.generate import TextStream, answer_end_ids, end_ids_of, generate_tokens
from nanogpt_hf.serving.requests import ApiError, Request

ACTIVE = 8  # requests that take turns, each with a key-value cache; the others wait in their order
MAX_REQUESTS = 256  # that take turns or wait for one; more get a 503


class Served:
    """Model that is served, the thread that runs it, one token of each active request in turn,
    and the thread that encodes prompts, one after the other.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Callable[[], AbstractContextManager],
    ):
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        # A tokenizer is not safe to use from two threads: the event loop decodes with one, the
        # other encodes.
        self._encoder = copy.deepcopy(tokenizer)
        self.chat = ChatFormat(self._encoder) if tokenizer.chat_template else None
        self.form = answer_format(self.chat)
        self.end_ids = end_ids_of(model)
        self.answer_end_ids = answer_end_ids(model, self.chat) if self.chat else set[int]()
        self.context = int(model.config.max_position_embeddings)
        self.created = int(time.time())
        # autocast is a setting of a thread, so the thread enters it as its first act.
        self.thread = ThreadPoolExecutor(1, "generation", initializer=precision().__enter__)
        self._encoding = ThreadPoolExecutor(1, "encoding")
        self.turns = asyncio.Semaphore(ACTIVE)
        self.requests = 0
        self.closing = False

    def entry(self) -> dict[str, Any]:
        """Model in the list of models; `max_model_len` and `chat` are not in OpenAI's API."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanogpt_hf",
            "max_model_len": self.context,
            "chat": self.chat is not None,
        }

    def enter(self) -> None:
        """Count a request, which has to `leave`. Raises ApiError if there are too many."""
        if self.requests >= MAX_REQUESTS:
            message = f"{self.requests} requests wait for this server; try again later"
            raise ApiError(503, message, code="server_overloaded")
        self.requests += 1

    def leave(self) -> None:
        self.requests -= 1

    async def encode(self, request: Request) -> tuple[list[int], int]:
        """Prompt ids, and the number of messages that were dropped to fit the context."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encode, request)

    def _encode(self, request: Request) -> tuple[list[int], int]:
        messages = kept = [message.for_template() for message in request.messages]
        param = "messages" if messages else "prompt"
        tools = request.offered_tools
        try:
            if self.chat and self.form.thinks:
                messages = kept = self.chat.without_lost_thoughts(messages, tools)
            if isinstance(request.prompt, list):
                ids = request.prompt
                size = self.model.config.vocab_size
                if max(ids, default=0) >= size:
                    raise ValueError(f"token {max(ids)} is none of this model's {size}")
            elif not messages:
                ids = prompt_ids(self._encoder, request.prompt)
            elif self.chat is None:
                raise ValueError(f"{self.name} has no chat template; use /v1/completions")
            elif request.truncation == "auto":
                # The command `chat` reserves the same room for an answer.
                room = min(request.limit or self.context, self.context // 2)
                ids, kept = encode_chat(self.chat, messages, self.context - room, tools)
            elif len(messages) >= self.context:  # a message has at least one token
                raise _too_long(param, f"{len(messages)} messages", self.context)
            else:
                ids = self.chat.prompt_ids(messages, tools)
        except TooManyTokensError as error:
            message = (
                f"{param}: without the oldest, {error}, what this model's context of "
                f"{self.context} has beside the answer; shorten the last one or the system "
                "message, or lower max_tokens"
            )
            raise ApiError(400, message, param, "context_length_exceeded") from None
        except (DataError, ValueError) as error:
            if str(error).startswith("tools: "):
                raise ApiError(400, str(error), "tools") from None
            raise ApiError(400, f"{param}: {error}", param) from None
        if len(ids) >= self.context:
            raise _too_long(param, f"{len(ids)} tokens", self.context)
        return ids, len(messages) - len(kept)


def _too_long(param: str, size: str, context: int) -> ApiError:
    message = f"{param}: {size} leave no room for an answer: this model's context has {context}; "
    return ApiError(400, f"{message}shorten it", param, "context_length_exceeded")


class StopText:
    """Ends a text before the stop string that is complete first.

    Holds back text that may be the beginning of one.
    """

    def __init__(self, stops: list[str]):
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that may be shown after `text` was added, and whether a stop string has ended
        it.
        """
        self._held += text
        found = []  # (end, start) of each stop string in the text
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            return self._held[: min(found)[1]], True
        kept = max((begun_at_end(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - kept]
        self._held = self._held[len(shown) :]
        return shown, False

    def end(self) -> str:
        """Text that was held back, after the last token."""
        return self._held


class Choice:
    """One text of a response."""

    def __init__(
        self,
        steps: Iterator[list[int | None]],
        limit: int,
        text: TextStream,
        stops: list[str],
        splitter: AnswerSplitter,
        thought_tokens: ThoughtTokens,
    ):
        self.steps = steps
        self.length = 0  # tokens
        self.thought_tokens = thought_tokens
        self.finish_reason = ""
        # Calls of tools in OpenAI's form, once the text has ended.
        self.calls: list[dict[str, Any]] = []
        self._limit = limit
        self._text = text
        self._stop = StopText(stops)
        self._splitter = splitter

    def add(self, token: int | None) -> tuple[str, str]:
        """Thought and text that a token adds; None is the end."""
        if token is not None:
            self.length += 1
            new = self._text.add(token)
            self.thought_tokens.add(new)
        else:
            new = self._text.end()
        text, stopped = self._stop.add(new)
        if token is None and not stopped:
            text += self._stop.end()
        thought, text = self._splitter.add(text)
        if stopped or token is None:
            is_cut = not stopped and self.length >= self._limit
            self.finish_reason = "length" if is_cut else "stop"
            more, rest, calls = self._splitter.end(is_cut=is_cut)
            if calls:
                self.calls = list(map(_call_for_client, calls))
                self.finish_reason = "tool_calls"
            return thought + more, text + rest
        return thought, text


def _call_for_client(call: Call) -> dict[str, Any]:
    """A call as OpenAI's API writes it: with an id, and its arguments as JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    # Some chat templates take ids of nine letters only.
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


class Piece(NamedTuple):
    """A part of a text, in order."""

    choice: int  # its number
    text: str
    finish_reason: str  # '' before the last part
    thought: str = ""  # comes before the text
    # Calls come with the last part.
    calls: Sequence[dict[str, Any]] = ()


def _form_of(served: Served, request: Request) -> AnswerFormat | None:
    """The format in which the answers to a request are read; None if they have no marks."""
    if not request.messages:
        return None
    form = served.form if request.offered_tools else served.form.without_calls()
    return form if form.thinks or form.calls else None


class Generation:
    """Texts of one request, one after the other.

    Each is computed alone, not in a batch with others: so its tokens are bit for bit the tokens
    that `sample` writes.
    """

    def __init__(self, served: Served, request: Request, ids: list[int]):
        self._served = served
        self._is_chat = bool(request.messages)
        self._prompt_tokens = len(ids)
        self.choices = list[Choice]()
        # As in OpenAI's API: 16 tokens by default, and a chat may fill the context.
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
            form = _form_of(served, request)
            text = TextStream(served.tokenizer, () if request.messages else ids, form)
            splitter = AnswerSplitter(form, request.offered_tools)
            tokens = ThoughtTokens(form)
            self.choices.append(Choice(steps, limit, text, request.stop, splitter, tokens))

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Texts as they arrive, until all choices have a finish reason.

        The generation does not wait for the reader: a client that does not read would hold
        a turn.
        """
        pieces = asyncio.Queue[Piece | Exception | None]()
        task = asyncio.create_task(self._generate(pieces))
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            task.cancel()

    async def _generate(self, pieces: asyncio.Queue[Piece | Exception | None]) -> None:
        """Put the pieces in a queue, then None or the error that ended them."""
        loop = asyncio.get_running_loop()
        thread = self._served.thread
        try:
            async with self._served.turns:
                for index, choice in enumerate(self.choices):
                    try:
                        while not choice.finish_reason:
                            if self._served.closing:
                                raise ApiError(503, "the server is shutting down")
                            (token,) = await loop.run_in_executor(
                                thread, next, choice.steps, [None]
                            )
                            thought, text = choice.add(token)
                            piece = Piece(index, text, choice.finish_reason, thought, choice.calls)
                            pieces.put_nowait(piece)
                    finally:
                        choice.steps = iter(())  # frees the key-value cache
            pieces.put_nowait(None)
        except Exception as error:
            pieces.put_nowait(error)

    def usage(self) -> dict[str, Any]:
        completion = sum(choice.length for choice in self.choices)
        counts: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        if self._is_chat:
            thoughts = sum(choice.thought_tokens.count() for choice in self.choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return counts
