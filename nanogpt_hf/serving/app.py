"""An OpenAI-compatible server for one model: models, completions, chat completions, a chat page.

The event loop parses and decodes, a thread encodes, and another runs the model. Requests are not
logged.
"""

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import math
import re
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from importlib.resources import files
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanogpt_hf.errors import UserError, explain, is_utf8
from nanogpt_hf.serving.generation import Generation, Piece, Served
from nanogpt_hf.serving.requests import ApiError, check_model, parse_request

MAX_BODY = 2**20  # bytes of a request
_MAX_PARTS = 10_000  # of a body: tiny chunks take far more time than their bytes
MAX_CONNECTIONS = 512  # open at once
BODY_SECONDS = 30  # to send the body of a request
# To send the header of a request, or to read what was sent; longer than BODY_SECONDS, whose end is
# an answer.
CLIENT_SECONDS = 40
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
    """The body of a POST. Raises ApiError if it is too large, too slow or not declared as JSON."""
    # A page of another site can send a form or plain text to this server without asking, but not
    # JSON.
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


async def _collect(http: HTTPRequest, generation: Generation) -> list[str]:
    """The texts of all choices. Raises ClientDisconnect when the client is gone."""
    texts = [""] * len(generation.choices)
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if await http.is_disconnected():
                raise ClientDisconnect
            texts[piece.choice] += piece.text
    return texts


async def _respond(served: Served, http: HTTPRequest, chat: bool) -> Response:
    """The response to a request for completions: JSON, or a stream of server-sent events."""
    request = parse_request(await _read_body(http), served.name, chat)
    served.enter()
    streams = False
    try:
        ids, dropped = await served.encode(request)
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

            async def end() -> None:  # however the stream ends
                served.leave()
                await events.aclose()

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
    for index, (choice, text) in enumerate(zip(generation.choices, texts, strict=True)):
        message = {"role": "assistant", "content": text, "refusal": None}
        answer = {"message": message} if chat else {"text": text}
        end_of = {"logprobs": None, "finish_reason": choice.finish_reason}
        choices.append({"index": index, **answer, **end_of})
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()}, headers=headers)


async def _events(
    generation: Generation, head: dict[str, Any], chat: bool, include_usage: bool
) -> AsyncGenerator[str]:
    """The server-sent events of a stream."""

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        fields = {**head, "choices": choices} | ({"usage": usage} if include_usage else {})
        return f"data: {json.dumps(fields)}\n\n"

    def chunk(piece: Piece, **delta: str) -> str:
        text = {"delta": {**delta, "content": piece.text}} if chat else {"text": piece.text}
        end = {"logprobs": None, "finish_reason": piece.finish_reason or None}
        return event([{"index": piece.choice, **text, **end}])

    try:
        if chat:
            for index in range(len(generation.choices)):
                yield chunk(Piece(index, "", ""), role="assistant")
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if piece.text or piece.finish_reason:
                    yield chunk(piece)
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

    async def model(http: HTTPRequest) -> Response:
        check_model(http.path_params["name"], served.name)
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
        # The rest of a body that comes too late is not read.
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
        host.encode("idna")  # raises before a socket is made, which would stay open
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        name = host if is_utf8(host) else repr(host)
        raise UserError(
            f"cannot listen on {name} port {port}: {error}; choose another --port or --host"
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
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.served.closing = True  # ends the streams, for which uvicorn waits
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        for connection in _of(self.server_state.connections):
            if now - connection.waits_since > CLIENT_SECONDS:
                connection.drop()
        return await super().on_tick(counter)


class _Connection(h11.Connection):
    """Counts the parts of a request, and reads no more than are allowed."""

    parts = 0

    def next_event(self) -> Any:
        if self.parts > _MAX_PARTS:
            return h11.NEED_DATA
        event = super().next_event()
        self.parts = (
            0 if isinstance(event, h11.Request) else self.parts + isinstance(event, h11.Data)
        )
        return event


class Protocol(H11Protocol):
    """HTTP/1.1 that knows since when it waits for its client to send a whole request, or to read
    what was sent.

    A client that makes it wait for longer than CLIENT_SECONDS is disconnected. When there are
    more than MAX_CONNECTIONS, a new one takes the place of the one that waits longest; if none
    waits, it gets a 503. uvicorn limits the time to the first byte of a second request only.
    """

    _silent_since = math.inf
    _unread_since = math.inf

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER)

    @property
    def waits_since(self) -> float:
        """When the client was first waited for; infinity if it is not."""
        return min(self._silent_since, self._unread_since)

    def drop(self) -> None:
        self.connections.discard(self)  # at once: its end is noticed later
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing is paused while anything is unsent
        self._silent_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [other for other in _of(self.connections) if other is not self]
            longest = min(others, key=lambda other: other.waits_since)
            if longest.waits_since < math.inf:
                longest.drop()
            else:
                self.app = _no_place

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.parts > _MAX_PARTS:
            self.drop()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._silent_since = self.loop.time()  # a body has its own time
        if self.cycle and not self.cycle.more_body and not self.cycle.response_complete:
            self._silent_since = math.inf

    def on_response_complete(self) -> None:
        self._silent_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = math.inf
        super().resume_writing()


def _of(connections: Iterable[Any]) -> list[Protocol]:
    return list(connections)


async def _no_place(scope: Any, receive: Any, send: Any) -> None:
    error = ApiError(503, f"{MAX_CONNECTIONS} clients are connected; try again later")
    headers = {"Connection": "close", "Retry-After": "5"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
