"""The routes of an OpenAI-compatible server for one model: models, completions, chat completions,
the chat page.

The event loop parses and decodes, a thread encodes, and another runs the model. Requests are not
logged.
"""

import asyncio
import base64
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanogpt_hf.data.messages import THOUGHT
from nanogpt_hf.errors import explain
from nanogpt_hf.serving.generation import Generation, Piece, Served
from nanogpt_hf.serving.requests import ApiError, check_model, parse_request

MAX_BODY = 2**20  # bytes of a request
BODY_SECONDS = 30  # a client's time to send the body of a request
_log = logging.getLogger(__name__)


def _error_of(error: Exception) -> ApiError:
    """Translate an error during generation for the client; the reason of a bug is only logged."""
    if isinstance(error, ApiError):
        return error
    if message := explain(error):
        return ApiError(500, message)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "an internal error of the server; its log has the reason")


async def _read_body(request: HTTPRequest) -> bytes:
    """Read the body of a POST. Raises ApiError if it is too large, too slow or not declared as
    JSON.
    """
    # A page of another site can make a browser send a form or plain text to this server. For JSON
    # the browser asks this server first, which does not allow it.
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
        raise ApiError(415, "the header Content-Type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(
                        413, f"the body is larger than this server's limit of {MAX_BODY:,} bytes"
                    )
    except TimeoutError:
        raise ApiError(408, f"the body was not complete after {BODY_SECONDS} seconds") from None
    return bytes(body)


async def _collect(http: HTTPRequest, generation: Generation) -> list[tuple[str, str]]:
    """Wait for the texts of all choices, and return the thought and the text of each. Raises
    ClientDisconnect when the client is gone.
    """
    texts = [""] * len(generation.choices)
    thoughts = [""] * len(generation.choices)
    # aclosing ends the generation with this function, also by an exception: its text has no reader.
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if await http.is_disconnected():
                raise ClientDisconnect
            texts[piece.choice] += piece.text
            thoughts[piece.choice] += piece.thought
    return list(zip(thoughts, texts, strict=True))


def _thought_fields(thought: str) -> dict[str, str]:
    """The thought of an answer under both names that servers give it; none without a thought."""
    # SGLang, llama.cpp and chat templates have the first one, vLLM since 0.11 the second.
    return {THOUGHT: thought, "reasoning": thought} if thought else {}


async def _respond(served: Served, http: HTTPRequest, chat: bool) -> Response:
    """Answer a request for completions by JSON, or by a stream of server-sent events."""
    request = parse_request(await _read_body(http), served.name, chat)
    # The place of this request among those that run or wait; it is left when the answer has ended.
    served.enter()
    streams = False
    try:
        ids, dropped = await served.encode(request)
        generation = Generation(served, request, ids)
        # These fields are in the answer, and in each event of a stream.
        kind = "chat.completion" if chat else "text_completion"
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and request.stream else kind,
            "created": int(time.time()),
            "model": served.name,
        }
        # With `truncation: auto` the oldest messages of a long conversation are left out.
        headers = {"X-Dropped-Messages": str(dropped)} if dropped else {}
        if request.stream:
            events = _events(generation, head, chat, request.stream_options.include_usage)

            async def end() -> None:
                served.leave()
                await events.aclose()

            # From here on the stream has the place. Starlette calls `end` however the stream ends,
            # also if the client is gone.
            streams = True
            return StreamingResponse(
                events,
                headers=headers,
                media_type="text/event-stream",
                background=BackgroundTask(end),
            )
        texts = await _collect(http, generation)
    finally:
        if not streams:
            served.leave()
    choices = []
    answers = zip(generation.choices, texts, strict=True)
    for index, (choice, (thought, text)) in enumerate(answers):
        if chat:
            # As in OpenAI's API: an answer that only calls tools has no content.
            content = text or None if choice.calls else text
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            message |= _thought_fields(thought)
            if choice.calls:
                message["tool_calls"] = choice.calls
            answer = {"message": message}
        else:
            answer = {"text": text}
        ended = {"logprobs": None, "finish_reason": choice.finish_reason}
        choices.append({"index": index, **answer, **ended})
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()}, headers=headers)


async def _events(
    generation: Generation, head: dict[str, Any], chat: bool, include_usage: bool
) -> AsyncGenerator[str]:
    """Yield the server-sent events of a stream: a line `data: JSON` and an empty line each."""

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        fields = {**head, "choices": choices}
        # As in OpenAI's API: every event has the field then, and all but the last have null.
        if include_usage:
            fields["usage"] = usage
        return f"data: {json.dumps(fields)}\n\n"

    def chunk(piece: Piece, **delta: Any) -> str:
        if piece.calls:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(piece.calls)]
        # An event has a part of the thought or of the text, so that no client mixes them up.
        content = _thought_fields(piece.thought) or {"content": piece.text}
        text = {"delta": {**delta, **content}} if chat else {"text": piece.text}
        end = {"logprobs": None, "finish_reason": piece.finish_reason or None}
        return event([{"index": piece.choice, **text, **end}])

    try:
        # The first event of each choice states the role, and has no text.
        if chat:
            for index in range(len(generation.choices)):
                yield chunk(Piece(index, "", ""), role="assistant")
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if piece.thought:
                    yield chunk(Piece(piece.choice, "", "", piece.thought))
                    piece = piece._replace(thought="")
                # A piece has no text if a character needs more bytes than have come so far.
                if piece.text or piece.finish_reason:
                    yield chunk(piece)
        if include_usage:
            yield event([], generation.usage())
        yield "data: [DONE]\n\n"
    except Exception as error:
        # The status, 200, has been sent already: the error is an event, as OpenAI's clients expect.
        yield f"data: {json.dumps(_error_of(error).body())}\n\n"


def _load_page() -> tuple[str, dict[str, str]]:
    """Read the chat page, and make its headers.

    The page talks to its own server only, and inserts text as text, never as HTML: a model's answer
    may hold a script.
    """
    html = files("nanogpt_hf.serving").joinpath("chat.html").read_text("utf-8")
    # The browser runs the page's own script and style, known by their hashes, and no other.
    hashes = {}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[name] = f"'sha256-{digest}'"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"connect-src 'self'; img-src data:; script-src {hashes['script']}; style-src "
        f"{hashes['style']}; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # A page that a browser kept would meet the server of another version, with other hashes.
    return html, {"Content-Security-Policy": policy, "Cache-Control": "no-store"}


def build_app(served: Served, hosts: list[str]) -> Starlette:
    """The ASGI application. It answers requests whose header Host is in `hosts` only."""
    page, page_headers = _load_page()

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [served.entry()]})

    async def model(http: HTTPRequest) -> Response:
        check_model(http.path_params["name"], served.name)
        return JSONResponse(served.entry())

    async def answered(http: HTTPRequest, chat: bool) -> Response:
        try:
            return await _respond(served, http, chat)
        except ClientDisconnect:
            # The client has gone, so it does not get this answer; 499 is nginx's status for that.
            return Response(status_code=499)
        except Exception as error:
            raise _error_of(error) from None

    async def index(http: HTTPRequest) -> Response:
        return Response(page, headers=page_headers, media_type="text/html")

    async def api_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        # A body that came too late is not read to its end, so the connection cannot go on.
        headers = {"Connection": "close"} if error.status == 408 else {}
        return JSONResponse(error.body(), error.status, headers)

    async def http_error(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # 404 or 405
        message = f"{http.method} {http.url.path:.100}: {error.detail}; this server has "
        api = ApiError(error.status_code, message + ", ".join(paths))
        return JSONResponse(api.body(), error.status_code, error.headers)

    routes = [
        Route("/", index),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", partial(answered, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(answered, chat=True), methods=["POST"]),
    ]
    paths = [
        f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in routes
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={ApiError: api_error, HTTPException: http_error},
    )
