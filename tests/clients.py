"""Clients of the server under test."""

import http.client
import time
from contextlib import closing, contextmanager

QUESTION = {"role": "user", "content": "1+1?"}


@contextmanager
def client_of(server):
    """OpenAI's client."""
    import openai

    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(server, path, body, headers=(("Content-Type", "application/json"),), method="POST"):
    """Status and body of a request of raw bytes."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 10 seconds")
