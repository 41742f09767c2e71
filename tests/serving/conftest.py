"""Servers for the tests of serving/."""

import signal
import threading
from contextlib import contextmanager, nullcontext

import pytest

from nanogpt_hf.commands.generate import open_model


@pytest.fixture(scope="session")
def running():
    """A function (model folder, name) -> context with a server in a thread of this process; it
    has a `port`.
    """
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from nanogpt_hf.serving.app import Server, listen

    @contextmanager
    def running(folder, name):
        with listen("127.0.0.1", 0) as listener:
            server = Server(name, *open_model(str(folder)), nullcontext, "127.0.0.1")
            server.port = listener.getsockname()[1]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield server
            finally:
                server.handle_exit(signal.SIGTERM, None)
                thread.join(30)
            assert not thread.is_alive()

    return running
