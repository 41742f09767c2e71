"""Fixtures of several files: a server per model in a thread of this process, for all tests of a
file; generation that never ends, and of a text that a test chooses.
"""

import time

import pytest

from clients import QUESTION, client_of


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


@pytest.fixture
def ask(server, monkeypatch):
    """Ask the file's `server`, whose model writes a text; the prompts are in `ask.prompts`, and the
    usage of an answer that is no stream in `ask.usage`.
    """
    served = server.served
    prompts = []

    def ask(text: str, messages=(QUESTION,), cut: bool = False, **options):
        tokens = served.tokenizer(text, add_special_tokens=False)["input_ids"]

        def generate(model, ids, *, max_new_tokens, **_):
            prompts.append(served.tokenizer.decode(ids))
            yield from ([token] for token in tokens[:max_new_tokens])

        monkeypatch.setattr("nanogpt_hf.serving.generation.generate_tokens", generate)
        if cut:
            options["max_tokens"] = len(tokens)
        with client_of(server) as client:
            answer = client.chat.completions.create(
                model=served.name, messages=list(messages), **options
            )
            if options.get("stream"):
                return list(answer)
            ask.usage = answer.usage
            (choice,) = answer.choices
            return choice

    ask.prompts = prompts
    return ask
