"""A time limit for clients of the server that do nothing: uvicorn limits idle connections only."""

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
