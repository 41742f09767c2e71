"""The routes of the server: OpenAI's models, completions and chat completions, and a chat page.

The event loop parses, encodes and decodes, so that only one thread uses the tokenizer; the scheduler's thread runs the
model. Of a request only its sizes are logged.
"""

import asyncio
import json
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.tokenizer import prompt_ids
from nanogpt_hf.errors import DataError, explain
from nanogpt_hf.generate import (
    StopText,
    TextStream,
    answer_end_ids,
    encode_chat,
    encode_messages,
    end_ids_of,
    generate_tokens,
)
from nanogpt_hf.serving.page import load_page
from nanogpt_hf.serving.requests import ApiError, Request, parse_request
from nanogpt_hf.serving.scheduler import Job, Scheduler, ShuttingDown

MAX_BODY = 2**20  # bytes of a request
MAX_SEQUENCES = 128  # generated or waiting; more are refused
_BODY_SECONDS = 30  # to send a body
_ALIVE_SECONDS = 10  # between two comments in a stream without new text, so that no proxy closes it
_DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API; chat completions may fill the context
_log = logging.getLogger(__name__)


class Served:
    """The model that is served, and the sequences of all requests."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, scheduler: Scheduler):
        self.name, self.model, self.tokenizer, self.scheduler = name, model, tokenizer, scheduler
        self.chat = ChatFormat(tokenizer) if tokenizer.chat_template else None
        self.end_ids = end_ids_of(model)
        self.answer_end_ids = answer_end_ids(model, self.chat) if self.chat else set[int]()
        self.context = int(model.config.max_position_embeddings)
        self.created = int(time.time())
        self.sequences = 0

    def entry(self) -> dict[str, Any]:
        """The model in the list of models; `max_model_len` and `chat` are not in OpenAI's API."""
        about = {"max_model_len": self.context, "chat": self.chat is not None}
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "nanogpt_hf", **about}

    def encode(self, request: Request) -> tuple[list[list[int]], int]:
        """The prompt ids of each prompt, and the number of messages that were dropped to fit the context."""
        if request.messages:
            return self._encode_messages(request)
        try:
            prompts = [prompt_ids(self.tokenizer, text) for text in request.prompts]
        except (DataError, ValueError) as error:
            raise ApiError(400, f"prompt: {error}", "prompt") from None
        for ids in prompts:
            self._check_length(ids, "prompt")
        return prompts, 0

    def _encode_messages(self, request: Request) -> tuple[list[list[int]], int]:
        if not self.chat:
            reason = "its tokenizer has no chat template, so it was not trained to chat; use /v1/completions"
            raise ApiError(400, f"{self.name}: {reason}", "messages")
        kept = request.messages
        try:
            if request.truncate:  # as in `chat`
                room = min(request.max_tokens or self.context, self.context // 2)
                ids, kept = encode_chat(self.chat, request.messages, self.context - room)
            else:
                ids = encode_messages(self.chat, request.messages)
        except DataError as error:
            raise ApiError(400, f"messages: {error}", "messages") from None
        except ValueError as error:  # of encode_chat
            raise self._too_long(error, "messages") from None
        self._check_length(ids, "messages")
        return [ids], len(request.messages) - len(kept)

    def _check_length(self, ids: list[int], param: str) -> None:
        if len(ids) >= self.context:
            raise self._too_long(f"{len(ids)} tokens are more than {self.context - 1}", param)

    def _too_long(self, reason: object, param: str) -> ApiError:
        message = f"{param}: {reason}, this model's context without room for an answer; shorten it"
        return ApiError(400, message, param, "context_length_exceeded")


class Choice:
    """One sequence of a response, and its text so far."""

    def __init__(self, job: Job, limit: int, text: TextStream, stops: list[str]):
        self.job, self.limit, self.length, self.finish_reason = job, limit, 0, ""
        self._text, self._stop = text, StopText(stops)

    def add(self, token: int | None) -> str:
        """The text that a token adds; None is the end."""
        self.length += token is not None
        text, stopped = self._stop.add(self._text.end() if token is None else self._text.add(token))
        if token is None and not stopped:
            text += self._stop.end()
        if stopped or token is None:
            self.finish_reason = "length" if self.length == self.limit and not stopped else "stop"
            self.job.cancelled = True
        return text


class Generation:
    """The sequences of one request, generated from its creation until all have ended or `cancel`."""

    def __init__(self, served: Served, request: Request, prompts: list[list[int]], default_max_tokens: int):
        self._served, self._items = served, asyncio.Queue[tuple[int, Any]]()
        self.prompt_tokens, self.choices = sum(map(len, prompts)), list[Choice]()
        count = len(prompts) * request.n
        if served.sequences + count > MAX_SEQUENCES:
            reason = f"{served.sequences} sequences are being generated or wait; try again later"
            raise ApiError(429, f"the server is busy: {reason}", None, "rate_limit_exceeded")
        for ids in prompts:
            limit = min(request.max_tokens or default_max_tokens, served.context - len(ids))
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
                job = Job(len(self.choices), steps, self._items)
                text = TextStream(served.tokenizer, () if request.messages else ids)
                self.choices.append(Choice(job, limit, text, request.stop))
        self._unfinished, self._began = count, time.monotonic()
        served.sequences += count
        for choice in self.choices:
            served.scheduler.submit(choice.job)

    async def pieces(self) -> AsyncIterator[tuple[int, str] | None]:
        """(index of a choice, its next text), until all have a finish reason; None for a while without any."""
        while not all(choice.finish_reason for choice in self.choices):
            try:
                index, item = await asyncio.wait_for(self._items.get(), _ALIVE_SECONDS)
            except TimeoutError:
                yield None
                continue
            if self.choices[index].finish_reason:
                continue
            if isinstance(item, Exception):
                raise item
            yield index, self.choices[index].add(item)

    def cancel(self) -> None:
        """Free what the request holds; its jobs that have not ended generate no further token."""
        if not self._unfinished:
            return
        self._served.sequences -= self._unfinished
        self._unfinished = 0
        usage, seconds = self.usage(), time.monotonic() - self._began
        ended = all(choice.finish_reason for choice in self.choices)
        _log.info(
            "%d tokens read, %d generated in %.1f s%s",
            usage["prompt_tokens"],
            usage["completion_tokens"],
            seconds,
            "" if ended else "; not finished",
        )
        for choice in self.choices:
            choice.job.cancelled = True

    def usage(self) -> dict[str, int]:
        completion = sum(choice.length for choice in self.choices)
        total = self.prompt_tokens + completion
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": total}


class EventStream(StreamingResponse):
    """A response of server-sent events that cancels its generation however it ends."""

    def __init__(self, events: AsyncIterator[str], generation: Generation, headers: dict[str, str]):
        super().__init__(events, headers={"Cache-Control": "no-store", **headers}, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


def _error_of(error: Exception) -> ApiError:
    """What the client gets for an error during generation; the reason of a bug is for the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error))
    if message := explain(error):
        return ApiError(500, message)
    _log.error("".join(traceback.format_exception(error)))
    return ApiError(500, "an internal error of the server; its log has the reason")


async def _read_body(request: HTTPRequest) -> bytes:
    """The body of a POST. Raises ApiError if it is too large, too slow or not declared as JSON."""
    # A page of another site can send a form or plain text to this server without asking, but not JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the header Content-Type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"the body is larger than this server's limit of {MAX_BODY:,} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body took more than {_BODY_SECONDS} seconds") from None
    return bytes(body)


async def _collect(generation: Generation) -> list[str]:
    texts = [""] * len(generation.choices)
    async for piece in generation.pieces():
        if piece:
            texts[piece[0]] += piece[1]
    return texts


async def _unless_disconnected(request: HTTPRequest, generation: Generation) -> list[str]:
    """The texts of all choices. Raises ClientDisconnect as soon as the client is gone."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.create_task(_collect(generation)), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        generation.cancel()


async def _respond(served: Served, http: HTTPRequest, chat: bool) -> Response:
    """The response to a request for completions: JSON, or a stream of server-sent events."""
    request = parse_request(await _read_body(http), served.name, chat)
    prompts, dropped = served.encode(request)
    generation = Generation(served, request, prompts, served.context if chat else _DEFAULT_MAX_TOKENS)
    kind = "chat.completion" if chat else "text_completion"
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and request.stream else kind,
        "created": int(time.time()),
        "model": served.name,
    }
    headers = {"X-Dropped-Messages": str(dropped)} if request.truncate else {}
    if request.stream:
        return EventStream(_events(generation, head, chat, request.include_usage), generation, headers)
    texts = await _unless_disconnected(http, generation)
    choices = []
    for index, (choice, text) in enumerate(zip(generation.choices, texts, strict=True)):
        answer = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
        choices.append({"index": index, **answer, "logprobs": None, "finish_reason": choice.finish_reason})
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()}, headers=headers)


async def _events(generation: Generation, head: dict[str, Any], chat: bool, include_usage: bool) -> AsyncIterator[str]:
    """The server-sent events of a stream."""

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        return f"data: {json.dumps({**head, 'choices': choices} | ({'usage': usage} if include_usage else {}))}\n\n"

    def chunk(index: int, text: str | None, finish_reason: str | None = None, **delta: str) -> str:
        if text is not None:
            delta["content"] = text
        piece = {"delta": delta} if chat else {"text": text or ""}
        return event([{"index": index, **piece, "logprobs": None, "finish_reason": finish_reason}])

    try:
        if chat:
            for index in range(len(generation.choices)):
                yield chunk(index, "", role="assistant")
        async for piece in generation.pieces():
            if piece is None:
                yield ": waiting\n\n"
                continue
            index, text = piece
            if text:
                yield chunk(index, text)
            if reason := generation.choices[index].finish_reason:
                yield chunk(index, None, reason)
        if include_usage:
            yield event([], generation.usage())
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent already
        yield f"data: {json.dumps(_error_of(error).body())}\n\n"


def build_app(served: Served, hosts: list[str]) -> Starlette:
    """The ASGI application. It answers requests whose header Host is in `hosts` only."""
    page, page_headers = load_page()

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [served.entry()]})

    async def model(http: HTTPRequest) -> Response:
        if http.path_params["name"] != served.name:
            raise ApiError(404, f"this server has the model {served.name!r} only", "model", "model_not_found")
        return JSONResponse(served.entry())

    async def answered(http: HTTPRequest, chat: bool) -> Response:
        try:
            return await _respond(served, http, chat)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody receives it
        except Exception as error:
            raise _error_of(error) from None

    async def completions(http: HTTPRequest) -> Response:
        return await answered(http, chat=False)

    async def chat_completions(http: HTTPRequest) -> Response:
        return await answered(http, chat=True)

    async def index(http: HTTPRequest) -> Response:
        return Response(page, headers=page_headers, media_type="text/html")

    async def api_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, headers)

    async def http_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path:.100}: {error.detail}; the API is under /v1, the chat page at /"
        return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={ApiError: api_error, HTTPException: http_error},
    )
