"""Fixtures of several files: a server per model in a thread of this process, for all tests of a
file; generation that never ends.
"""

import time

import pytest


@pytest.fixture(scope="module")
def chat_server(chat_model, running):
    with running(chat_model, "parrot") as server:
        yield server


@pytest.fixture(scope="module")
def base_server(letter_model, running):
    with running(letter_model, "letters") as server:
        yield server


@pytest.fixture
def endless(monkeypatch):
    """Generation that never ends; returns the sequences that are being generated."""
    active = []

    def generate(model, ids, **options):
        active.append(ids)
        try:
            while True:
                time.sleep(0.002)
                yield [0]
        finally:
            active.remove(ids)

    monkeypatch.setattr("nanogpt_hf.serving.generation.generate_tokens", generate)
    return active
