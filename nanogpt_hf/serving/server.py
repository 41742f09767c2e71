"""The server's connections: the socket, limits for idle clients, the server's start and end."""

import asyncio
import ipaddress
import math
import socket
from collections.abc import Iterable
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanogpt_hf.errors import UserError, is_utf8
from nanogpt_hf.serving.app import build_app
from nanogpt_hf.serving.generation import Served
from nanogpt_hf.serving.requests import ApiError

# A body in tiny chunks takes far more time than its bytes.
_MAX_PARTS = 10_000
MAX_CONNECTIONS = 512  # open at once
# Seconds to send the header of a request, or to read what was sent. It is longer than BODY_SECONDS
# of app.py, whose end is an answer that the client can still read.
CLIENT_SECONDS = 40
_LOOPBACK = ["localhost", "127.0.0.1", "::1", "[::1]"]


def is_loopback(host: str) -> bool:
    """Whether a host name or address reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that accepts connections at once; port 0 is any free one.

    Raises UserError in one line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A name that cannot be encoded raises here, before a socket is made, which would stay open.
        host.encode("idna")
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        name = host if is_utf8(host) else repr(host)
        raise UserError(
            f"cannot listen on {name} port {port}: {error}; choose another --port or --host"
        ) from None


class Server(uvicorn.Server):
    """A server for one model. `run(sockets=[...])` returns after a signal."""

    def __init__(self, served: Served, host: str):
        # An attacker may point the name of his own site to this machine (DNS rebinding). A browser
        # then takes the server for a part of that site, but still sends its name as Host, which is
        # refused. A server for other machines has names that we do not know.
        hosts = [*_LOOPBACK, host] if is_loopback(host) else ["*"]
        self.served = served
        config = uvicorn.Config(
            build_app(self.served, hosts),
            http=Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # a client could write any address into them
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        # uvicorn waits for open streams; this ends them after their next token.
        self.served.closing = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Disconnect idle clients; uvicorn calls it ten times a second."""
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
        if isinstance(event, h11.Request):
            self.parts = 0
        elif isinstance(event, h11.Data):
            self.parts += 1
        return event


class Protocol(H11Protocol):
    """HTTP/1.1 with limits for idle clients: it notes since when it waits for a client to send a
    whole request, or to read what was sent.

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
        """The time since which the client is waited for; infinity if it is not."""
        return min(self._silent_since, self._unread_since)

    def drop(self) -> None:
        # uvicorn notices the end of a connection later, and would still count this one until then.
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio calls pause_writing as soon as anything is unsent: so a client that does not read
        # is noticed at its first byte.
        transport.set_write_buffer_limits(high=0)
        self._silent_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [other for other in _of(self.connections) if other is not self]
            longest = min(others, key=lambda other: other.waits_since)
            # A busy client is not disconnected for a new one.
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
            # A header is complete. Its body has a time limit of its own, in app.py.
            self._silent_since = self.loop.time()
        # The request is complete and has no answer yet: it is we who are waited for.
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
    """The connections as a list that stays as it is while some are dropped."""
    return list(connections)


async def _no_place(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that answers every request with 503: too many clients are connected."""
    error = ApiError(503, f"{MAX_CONNECTIONS} clients are connected; try again later")
    headers = {"Connection": "close", "Retry-After": "5"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
