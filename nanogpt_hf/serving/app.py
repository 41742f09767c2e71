"""An OpenAI-compatible server for one model: models, completions, chat completions, a chat page.

The event loop parses, encodes and decodes, so that only one thread uses the tokenizer; another
thread runs the model. Requests are not logged.
"""

import base64
import hashlib
import ipaddress
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanogpt_hf.errors import UserError, explain
from nanogpt_hf.serving.generation import Generation, Served
from nanogpt_hf.serving.requests import ApiError, parse_request

MAX_BODY = 2**20  # bytes of a request
_MAX_CONNECTIONS = 512  # open at once; more get a 503
_LOOPBACK = ["localhost", "127.0.0.1", "::1", "[::1]"]
_log = logging.getLogger(__name__)


def _error_of(error: Exception) -> ApiError:
    """What the client gets for an error during generation; a bug's reason is only logged."""
    if isinstance(error, ApiError):
        return error
    if message := explain(error):
        return ApiError(500, message)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "an internal error of the server; its log has the reason")


async def _read_body(request: HTTPRequest) -> bytes:
    """The body of a POST. Raises ApiError if it is too large or not declared as JSON."""
    # A page of another site can send a form or plain text to this server without asking, but not
    # JSON.
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
        raise ApiError(415, "the header Content-Type must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(
                413, f"the body is larger than this server's limit of {MAX_BODY:,} bytes"
            )
    return bytes(body)


async def _collect(http: HTTPRequest, generation: Generation) -> list[str]:
    """The texts of all choices. Raises ClientDisconnect when the client is gone."""
    texts = [""] * len(generation.choices)
    async with aclosing(generation.pieces()) as pieces:
        async for index, text in pieces:
            if await http.is_disconnected():
                raise ClientDisconnect
            texts[index] += text
    return texts


async def _respond(served: Served, http: HTTPRequest, chat: bool) -> Response:
    """The response to a request for completions: JSON, or a stream of server-sent events."""
    request = parse_request(await _read_body(http), served.name, chat)
    ids, dropped = served.encode(request)
    generation = Generation(served, request, ids)
    kind = "chat.completion" if chat else "text_completion"
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chat and request.stream else kind,
        "created": int(time.time()),
        "model": served.name,
    }
    headers = {"X-Dropped-Messages": str(dropped)} if dropped else {}
    if request.stream:
        events = _events(generation, head, chat, request.stream_options.include_usage)
        return StreamingResponse(
            events,
            headers=headers,
            media_type="text/event-stream",
            background=BackgroundTask(events.aclose),  # runs however the stream ends
        )
    texts = await _collect(http, generation)
    choices = []
    for index, (choice, text) in enumerate(zip(generation.choices, texts, strict=True)):
        message = {"role": "assistant", "content": text, "refusal": None}
        answer = {"message": message} if chat else {"text": text}
        end = {"logprobs": None, "finish_reason": choice.finish_reason}
        choices.append({"index": index, **answer, **end})
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()}, headers=headers)


async def _events(
    generation: Generation, head: dict[str, Any], chat: bool, include_usage: bool
) -> AsyncGenerator[str]:
    """The server-sent events of a stream."""

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        fields = {**head, "choices": choices} | ({"usage": usage} if include_usage else {})
        return f"data: {json.dumps(fields)}\n\n"

    def chunk(index: int, text: str, **delta: str) -> str:
        piece = {"delta": {**delta, "content": text}} if chat else {"text": text}
        reason = generation.choices[index].finish_reason or None
        return event([{"index": index, **piece, "logprobs": None, "finish_reason": reason}])

    try:
        if chat:
            for index in range(len(generation.choices)):
                yield chunk(index, "", role="assistant")
        async with aclosing(generation.pieces()) as pieces:
            async for index, text in pieces:
                if text or generation.choices[index].finish_reason:
                    yield chunk(index, text)
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
    }


def build_app(served: Served, hosts: list[str]) -> Starlette:
    """The ASGI application. It answers requests whose header Host is in `hosts` only."""
    page, page_headers = _load_page()

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [served.entry()]})

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
        return JSONResponse(error.body(), error.status)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/v1/models", models),
            Route("/v1/completions", partial(answered, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(answered, chat=True), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={ApiError: api_error},
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at once; port 0 is any free one.

    Raises UserError in one line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error}; choose another --port or --host"
        ) from None


class Server(uvicorn.Server):
    """A server for one model. `run(sockets=[...])` returns after a signal."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Callable[[], AbstractContextManager],
        host: str,
    ):
        # A page of another site whose name an attacker points to this machine must not read
        # answers.
        hosts = [*_LOOPBACK, host] if is_loopback(host) else ["*"]
        self.served = Served(name, model, tokenizer, precision)
        config = uvicorn.Config(
            build_app(self.served, hosts),
            http=Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.served.closing = True  # ends the streams, for which uvicorn waits
        super().handle_exit(sig, frame)


REQUEST_SECONDS = 30  # to send the headers of the first request


class Protocol(H11Protocol):
    """HTTP/1.1 with a time limit for a client that sends no whole request; uvicorn has one for the
    requests after the first.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_SECONDS, transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle:
            self._timer.cancel()
