"""The command `serve`: its start, mistakes, and Ctrl-C."""

import http.client
import importlib.util
import json
import os
import re
import signal
import sys

import pytest

from forked import Forked
from nanogpt_hf.errors import UserError, is_utf8

needs_server = pytest.mark.skipif(
    importlib.util.find_spec("uvicorn") is None, reason="the extra `serve` is missing"
)


@needs_server
def test_a_port_that_is_taken_and_an_unknown_host_are_refused(refused, letter_model):
    from nanogpt_hf.serving.server import listen

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", letter_model, "--port", port)
    assert f"127.0.0.1 port {port}" in line
    assert "--port" in line
    for host in ("no.such.host.invalid", "a..b", "a" * 70 + ".b", "1.2.3.4.5", "::g", "é" * 70):
        line = refused("serve", letter_model, "--host", host, "--port", 0)
        assert host in line
        assert "--host" in line


@needs_server
@pytest.mark.parametrize("host", ["a\udcff", "\ud800", "a..b"])
def test_a_host_that_is_no_name_is_refused(host):
    from nanogpt_hf.serving.server import listen

    with pytest.raises(UserError, match="choose another --port or --host") as caught:
        listen(host, 0)
    assert is_utf8(str(caught.value))


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@needs_server
def test_ctrl_c_ends_a_busy_server_with_status_130(letter_model, tmp_path):
    reading, writing = os.pipe()
    with (tmp_path / "errors").open("w") as errors:
        process = Forked(
            ["serve", letter_model, "--port", 0], streams={1: writing, 2: errors.fileno()}
        )
    os.close(writing)
    try:
        with os.fdopen(reading) as out:
            port = re.search(r"http://127\.0\.0\.1:(\d+)/v1", out.readline())[1]
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
            body = json.dumps({"prompt": "abc", "n": 16, "max_tokens": 29, "stream": True})
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            assert response.readline().startswith(b"data: {")
            os.kill(process.pid, signal.SIGINT)
            response.read()
            connection.close()
    finally:
        assert process.wait(60) == 130
    assert (tmp_path / "errors").read_text() == ""
