"""Clients that do nothing lose their place, and hold up no other client."""

import http.client
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from clients import post, wait_until

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
from nanogpt_hf.serving import app, generation

PATH = "/v1/completions"
WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "abc", "max_tokens": 5, "stream": True}).encode()
STREAM = HEADER + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
# what a client sends before it stops
SILENT = {
    "no byte": b"",
    "half a first header": b"GET / HTTP/1.1\r\nX-Slow: ",
    "half a second header": WHOLE,
    "a body that is not read": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx",
    "half a body": HEADER + b'Content-Length: 99\r\n\r\n{"prompt"',
    "half a chunk": HEADER + b"Transfer-Encoding: chunked\r\n\r\nff\r\nab",
}


@contextmanager
def sent(base_server, data, buffer=None):
    with socket.socket() as connection:
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", base_server.port))
        connection.sendall(data)
        if data == WHOLE:  # the rest comes later: uvicorn's own limit ends with its first byte
            answer = b""
            while not answer.endswith(b"]}"):
                answer += connection.recv(65536)
            connection.sendall(b"GET / HT")
        yield connection


def received(connection):
    """All that the server sends until it closes or resets the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


@pytest.mark.long
@pytest.mark.parametrize("kind", SILENT)
def test_a_silent_client_is_disconnected(base_server, monkeypatch, kind):
    monkeypatch.setattr("nanogpt_hf.serving.server.CLIENT_SECONDS", 0.5)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with sent(base_server, SILENT[kind]) as connection:
        answer = received(connection)
    if kind in ("half a body", "half a chunk"):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        error = json.loads(body)["error"]
        assert "0.2 seconds" in error["message"]
        assert error["type"] == "invalid_request_error"
    wait_until(lambda: not base_server.server_state.connections)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["header", "body"])
def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(base_server, monkeypatch, kind):
    monkeypatch.setattr("nanogpt_hf.serving.server.CLIENT_SECONDS", 0.5)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    start = HEADER + (b"Content-Length: 9999\r\n\r\n" if kind == "body" else b"X-Slow: ")
    with sent(base_server, start) as connection:
        for _ in range(2000):
            try:
                connection.sendall(b" ")
            except OSError:
                return
            time.sleep(0.01)
    raise AssertionError("it was not disconnected")


@pytest.mark.parametrize("kind", SILENT)
def test_silent_clients_leave_a_place_for_others(base_server, monkeypatch, kind):
    monkeypatch.setattr("nanogpt_hf.serving.server.MAX_CONNECTIONS", 4)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(sent(base_server, SILENT[kind]))
        for _ in range(4):
            assert post(base_server, "/v1/models", None, method="GET")[0] == 200
            assert post(base_server, PATH, b'{"prompt": "abc"}')[0] == 200
        assert len(base_server.server_state.connections) <= 5
    wait_until(lambda: not base_server.server_state.connections)


@pytest.fixture
def small_buffers(base_server):
    """Connections whose other side must read; the system buffers megabytes else."""
    listener = base_server.servers[0].sockets[0]
    size = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


@pytest.mark.long
def test_streams_that_nobody_reads_keep_no_turn(base_server, monkeypatch, small_buffers):
    monkeypatch.setattr(generation, "generate_tokens", lambda *_, **__: iter([[0]] * 300))
    monkeypatch.setattr("nanogpt_hf.serving.server.CLIENT_SECONDS", 60)
    connections = base_server.server_state.connections
    with ExitStack() as stack:
        for _ in range(generation.ACTIVE):
            stack.enter_context(sent(base_server, STREAM, buffer=2048))

        def unread() -> int:
            return sum(one._unread_since < math.inf for one in connections)

        wait_until(lambda: unread() == generation.ACTIVE)
        status, answer = post(base_server, PATH, b'{"prompt": "abc"}')
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 300)
        assert unread() == generation.ACTIVE
        monkeypatch.setattr("nanogpt_hf.serving.server.CLIENT_SECONDS", 0.1)
        wait_until(lambda: not connections)
    wait_until(lambda: not base_server.served.requests)
    assert base_server.served.turns._value == generation.ACTIVE


@pytest.mark.long
def test_a_slow_reader_gets_the_whole_stream(base_server, monkeypatch, small_buffers):
    monkeypatch.setattr(generation, "generate_tokens", lambda *_, **__: iter([[0]] * 300))
    with sent(base_server, STREAM, buffer=2048) as connection:
        data = b""
        while b"data: [DONE]" not in data:
            part = connection.recv(4096)
            assert part
            data += part
            time.sleep(0.002)
    assert data.count(b'"text": "\\n"') == 300


def test_more_clients_than_places_that_all_work_get_a_503(base_server, monkeypatch, endless):
    monkeypatch.setattr("nanogpt_hf.serving.server.MAX_CONNECTIONS", 1)
    with sent(base_server, STREAM) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        status, answer = post(base_server, "/v1/models", None, method="GET")
        assert (status, json.loads(answer)["error"]["type"]) == (503, "server_error")
    wait_until(lambda: not endless)


def test_more_requests_than_can_wait_get_a_503(base_server, monkeypatch, endless):
    monkeypatch.setattr(generation, "MAX_REQUESTS", 1)
    for body in (BODY, b'{"prompt": "abc"}'):
        with sent(base_server, STREAM) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            status, answer = post(base_server, PATH, body)
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (503, "server_overloaded")
            assert post(base_server, "/v1/models", None, method="GET")[0] == 200
        wait_until(lambda: not base_server.served.requests)


def test_streams_that_end_before_they_begin_leave_no_trace(base_server, endless):
    for _ in range(20):
        with sent(base_server, STREAM):
            pass
    wait_until(lambda: not base_server.server_state.connections and not base_server.served.requests)
    wait_until(lambda: not endless)
    assert base_server.served.turns._value == generation.ACTIVE


def test_a_slow_encoding_does_not_stop_other_requests(base_server, monkeypatch):
    entered = threading.Event()
    go_on = threading.Event()

    def encode(tokenizer, prompt):
        entered.set()
        assert go_on.wait(30)
        return [1]

    monkeypatch.setattr(generation, "prompt_ids", encode)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, base_server, PATH, b'{"prompt": "abc"}')
        try:
            assert entered.wait(30)
            assert post(base_server, "/v1/models", None, method="GET")[0] == 200
            assert post(base_server, PATH, b'{"prompt": 5}')[0] == 400
        finally:
            go_on.set()
        assert slow.result()[0] == 200


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_body_of_tiny_chunks_is_cut_off(base_server, path):
    with sent(base_server, HEADER.replace(PATH.encode(), path.encode())) as connection:
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(OSError):
            connection.sendall(b"1\r\n \r\n" * (app.MAX_BODY // 4))
        # It has the answer 404 at most, and its end.
        assert received(connection).count(b"HTTP/1.1") <= (path != PATH)
    wait_until(lambda: not base_server.server_state.connections)


def test_a_body_in_chunks_is_read(base_server):
    connection = http.client.HTTPConnection("127.0.0.1", base_server.port, timeout=30)
    chunks = [b'{"prompt": ', b'"abc"}']
    headers = {"Content-Type": "application/json"}
    connection.request("POST", PATH, iter(chunks), headers, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("status", "method", "path", "word"),
    [
        (404, "GET", "/v2", "/v1/models"),
        (404, "POST", "/v1/embeddings", "POST /v1/completions"),
        (404, "GET", "/v1/models/gpt-4", "gpt-4"),
        (405, "GET", "/v1/completions", "POST /v1/completions"),
        (405, "PUT", "/v1/models", "GET /v1/models"),
        (405, "POST", "/", "GET /"),
        (415, "POST", "/v1/completions", "Content-Type"),
    ],
)
def test_errors_are_objects_of_the_api(base_server, status, method, path, word):
    got, answer = post(base_server, path, b"{}", headers=(), method=method)
    error = json.loads(answer)["error"]
    assert (got, error["type"]) == (status, "invalid_request_error")
    assert word in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
