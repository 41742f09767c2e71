"""Listen on a port, and run the server until Ctrl-C."""

import ipaddress
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanogpt_hf.errors import UserError
from nanogpt_hf.serving.app import build_app
from nanogpt_hf.serving.generation import Scheduler, Served

_MAX_CONNECTIONS = 512  # open at once; more get a 503
_CLIENT_SECONDS = 30  # to send the headers of a request, and to read what was sent
_LOOPBACK = ["localhost", "127.0.0.1", "::1", "[::1]"]


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
    except socket.gaierror as error:
        raise UserError(
            f"--host: {host}: {error.strerror}; give an address of this machine"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise UserError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port or --host"
        ) from None


class _Protocol(H11Protocol):
    """HTTP/1.1 with a time limit for clients that send no whole request or read no response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause as soon as the client does not read
        self._timer = self.loop.call_later(_CLIENT_SECONDS, transport.abort)

    def _restart_timer(self) -> None:
        """Restart the time limit, if the next step is the client's."""
        self._timer.cancel()
        if self.cycle.response_complete or self.flow.write_paused:
            self._timer = self.loop.call_later(_CLIENT_SECONDS, self.transport.abort)

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
            http=_Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
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
