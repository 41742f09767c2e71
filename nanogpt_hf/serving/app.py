"""The routes of the server: OpenAI's models, completions and chat completions, and a chat page.

The event loop parses, encodes and decodes, so that only one thread uses the tokenizer; the
scheduler's thread runs the model. Of a request only its sizes are logged.
"""

import asyncio
import base64
import hashlib
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from functools import partial
from importlib.resources import files
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

from nanogpt_hf.errors import explain
from nanogpt_hf.serving.generation import Generation, Served, ShuttingDown
from nanogpt_hf.serving.requests import ApiError, parse_request

MAX_BODY = 2**20  # bytes of a request
_BODY_SECONDS = 30  # to send a body
# for completions, as in OpenAI's API; chat completions may fill the context
_DEFAULT_MAX_TOKENS = 16
_log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """A response of server-sent events that cancels its generation however it ends."""

    def __init__(self, events: AsyncIterator[str], generation: Generation, headers: dict[str, str]):
        super().__init__(
            events, headers={"Cache-Control": "no-store", **headers}, media_type="text/event-stream"
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


def _error_of(error: Exception) -> ApiError:
    """What the client gets for an error during generation; a bug's reason is only logged."""
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
    # A page of another site can send a form or plain text to this server without asking, but not
    # JSON.
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
        raise ApiError(415, "the header Content-Type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(
                        413, f"the body is larger than this server's limit of {MAX_BODY:,} bytes"
                    )
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
    generation = Generation(
        served, request, prompts, served.context if chat else _DEFAULT_MAX_TOKENS
    )
    kind = "chat.completion" if chat else "text_completion"
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and request.stream else kind,
        "created": int(time.time()),
        "model": served.name,
    }
    headers = {"X-Dropped-Messages": str(dropped)} if request.truncate else {}
    if request.stream:
        return EventStream(
            _events(generation, head, chat, request.include_usage), generation, headers
        )
    texts = await _unless_disconnected(http, generation)
    choices = []
    for index, (choice, text) in enumerate(zip(generation.choices, texts, strict=True)):
        message = {"role": "assistant", "content": text, "refusal": None}
        answer = {"message": message} if chat else {"text": text}
        end = {"logprobs": None, "finish_reason": choice.finish_reason}
        choices.append({"index": index, **answer, **end})
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()}, headers=headers)


async def _events(
    generation: Generation, head: dict[str, Any], chat: bool, include_usage: bool
) -> AsyncIterator[str]:
    """The server-sent events of a stream."""

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        fields = {**head, "choices": choices} | ({"usage": usage} if include_usage else {})
        return f"data: {json.dumps(fields)}\n\n"

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


def _load_page() -> tuple[str, dict[str, str]]:
    """The page and its headers.

    It talks to its own server only, and inserts text as text, never as HTML.
    """
    html = files("nanogpt_hf.serving").joinpath("chat.html").read_text("utf-8")
    hashes = {}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, flags=re.DOTALL)
        hashes[name] = (
            f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        )
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"connect-src 'self'; img-src data:; script-src {hashes['script']}; style-src "
        f"{hashes['style']}; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return html, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def build_app(served: Served, hosts: list[str]) -> Starlette:
    """The ASGI application. It answers requests whose header Host is in `hosts` only."""
    page, page_headers = _load_page()

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [served.entry()]})

    async def model(http: HTTPRequest) -> Response:
        if http.path_params["name"] != served.name:
            raise ApiError(
                404, f"this server has the model {served.name!r} only", "model", "model_not_found"
            )
        return JSONResponse(served.entry())

    async def answered(http: HTTPRequest, chat: bool) -> Response:
        try:
            return await _respond(served, http, chat)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has gone
        except Exception as error:
            raise _error_of(error) from None

    async def index(http: HTTPRequest) -> Response:
        return Response(page, headers=page_headers, media_type="text/html")

    async def api_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, headers)

    async def http_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{http.method} {http.url.path:.100}: {error.detail}"
        message = f"{where}; the API is under /v1, the chat page at /"
        body = ApiError(error.status_code, message).body()
        return JSONResponse(body, error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", partial(answered, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(answered, chat=True), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={ApiError: api_error, HTTPException: http_error},
    )
