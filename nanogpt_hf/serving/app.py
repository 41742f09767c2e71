"""An OpenAI-compatible server for one model: models, completions, chat completions, a chat page.

The event loop parses, encodes and decodes, so that only one thread uses the tokenizer; the
scheduler's thread runs the model. Requests are not logged.
"""

import base64
import hashlib
import ipaddress
import json
import logging
import re
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
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
from nanogpt_hf.serving.generation import Generation, Scheduler, Served
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
    _log.error("".join(traceback.format_exception(error)))
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
    try:
        async for piece in generation.pieces():
            if await http.is_disconnected():
                raise ClientDisconnect
            if piece:
                texts[piece[0]] += piece[1]
    finally:
        await generation.cancel()
    return texts


async def _respond(served: Served, http: HTTPRequest, chat: bool) -> Response:
    """The response to a request for completions: JSON, or a stream of server-sent events."""
    request = parse_request(await _read_body(http), served.name, chat)
    prompts, dropped = served.encode(request)
    generation = Generation(served, request, prompts)
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
            background=BackgroundTask(generation.cancel),  # runs however the stream ends
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
        await generation.cancel()  # the client may send its next request at once
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
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, headers)

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
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error}; choose another --port or --host"
        ) from None


class Server(uvicorn.Server):
    """A server for one model.

    `run(sockets=[...])` returns after a signal; a scheduler's thread runs meanwhile.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Callable[[], AbstractContextManager],
        host: str,
    ):
        self.scheduler = Scheduler(precision)
        # A page of another site whose name an attacker points to this machine must not read
        # answers.
        hosts = [*_LOOPBACK, host] if is_loopback(host) else ["*"]
        self.served = Served(name, model, tokenizer, self.scheduler)
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
        self.scheduler.close()  # ends the streams, for which uvicorn waits
        super().handle_exit(sig, frame)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        self.scheduler.start()
        try:
            super().run(sockets)
        finally:
            self.scheduler.close()
            # a thread that runs torch while the process ends could crash it
            self.scheduler.join(10)


CLIENT_SECONDS = 30  # to send the headers of a request, and to read what was sent


class Protocol(H11Protocol):
    """HTTP/1.1 with a time limit for clients that send no whole request or read no response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause as soon as the client does not read
        self._timer = self.loop.call_later(CLIENT_SECONDS, transport.abort)

    def _restart_timer(self) -> None:
        """Restart the time limit, if the next step is the client's."""
        self._timer.cancel()
        if self.cycle.response_complete or self.flow.write_paused:
            self._timer = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._restart_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
