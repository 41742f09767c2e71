"""The work of a request is bounded: what is encoded, counted in characters. Requests have a
quarter of the size that is allowed.
"""

import json
from contextlib import suppress
from threading import Thread

import pytest
from transformers import AutoTokenizer

from clients import post
from nanogpt_hf.data import chat_template
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.chat_window import encode_chat
from nanogpt_hf.errors import DataError


@pytest.fixture(scope="module")
def chat(chat_model):
    return ChatFormat(AutoTokenizer.from_pretrained(chat_model))


@pytest.fixture
def encoded(chat, monkeypatch):
    """The number of characters of each call of the tokenizer."""
    counts = []
    render = type(chat.hf).__call__
    tokenizer = type(chat.hf)

    def counting(self, text, *arguments, **options):
        counts.append(sum(map(len, [text] if isinstance(text, str) else text)))
        return render(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "__call__", counting)
    return counts


def conversation(*texts, system=""):
    start = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return start + [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]


def drop_one_by_one(chat, messages, max_tokens):
    """What `encode_chat` does, in the plain way."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    others = messages[len(system) :]
    while True:
        ids = chat.prompt_ids(system + others)
        if len(ids) <= max_tokens:
            return ids, system + others
        if len(others) < 3:
            return None
        others = others[2:]


SHAPES = {
    "one short": conversation("Why?"),
    "one long": conversation("x" * 5000),
    "many short": conversation(*["ab"] * 101),
    "many of one length": conversation(*["word " * 8] * 61),
    "growing": conversation(*["y" * n for n in range(1, 60)]),
    "shrinking": conversation(*["y" * n for n in range(59, 0, -1)]),
    "a long one first": conversation("z" * 3000, *["ab"] * 40),
    "a long one in the middle": conversation(*["ab"] * 20, "z" * 3000, *["ab"] * 20),
    "a long one last": conversation(*["ab"] * 20, "z" * 3000),
    "empty and blank": conversation(*["", "   \n" * 50] * 30, "Why?"),
    "a system message": conversation(*["word " * 8] * 21, system="Be brief."),
    "a long system message": conversation(*["word"] * 21, system="Be brief. " * 100),
    "an answer last": conversation(*["word " * 8] * 22),
}


@pytest.mark.parametrize("room", [20, 100, 226])
@pytest.mark.parametrize("shape", SHAPES)
def test_truncation_drops_as_few_questions_as_possible(chat, shape, room):
    messages = SHAPES[shape]
    expected = drop_one_by_one(chat, messages, room)
    if expected is None:
        with pytest.raises(ValueError, match=f"more than {room}"):
            encode_chat(chat, messages, room)
    else:
        assert encode_chat(chat, messages, room) == expected


def test_truncation_begins_at_a_question(chat):
    messages = conversation(*["word " * 8] * 7)
    messages[3:3] = [{"role": "assistant", "content": "more " * 8}] * 4
    _, kept = encode_chat(chat, messages, 200)
    assert kept[0]["role"] == "user"
    assert kept == messages[-len(kept) :]


def test_a_template_that_leaves_out_old_answers_keeps_what_fits(chat_model):
    hf = AutoTokenizer.from_pretrained(chat_model)
    hf.chat_template = (
        "{%- for m in messages -%}{%- if m.role == 'user' or loop.last -%}"
        "{{ m.content }}\n{%- else -%}{{ m.content.split('|')[-1] }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}:{%- endif -%}"
    )
    chat = ChatFormat(hf)
    messages = conversation(*["Why?", "long " * 40 + "|So."] * 9, "How?")
    _, kept = encode_chat(chat, messages, 110)
    assert kept == messages


@pytest.mark.parametrize(
    "messages",
    [
        conversation(*["word " * 400] * 127),
        conversation(*["x"] * 5001),
        conversation("x" * 212_000),
        conversation(*["ab"] * 5000, "z" * 50_000, *["ab"] * 101),
        conversation(*["ab"] * 5000, "z" * 50_000),
        conversation(*["word " * 30] * 1001, system="s" * 12_000),
        conversation(*[" " * 100] * 2001),
    ],
    ids=["wide", "many", "one", "middle", "last", "system", "blank"],
)
def test_truncation_encodes_each_message_about_once(chat, encoded, messages):
    size = sum(len(message["content"]) for message in messages)
    with suppress(ValueError):
        encode_chat(chat, messages, 128)
    assert sum(encoded) < 2.5 * size + 40_000
    assert len(encoded) < 30


def test_a_template_without_an_end_is_stopped_in_a_thread(chat_model, monkeypatch):
    hf = AutoTokenizer.from_pretrained(chat_model)
    chat = ChatFormat(hf)
    endless = "{%- for i in range(99999) -%}" * 3 + "{%- endfor -%}" * 3
    chat._template = endless
    monkeypatch.setattr(chat_template, "_SECONDS", 0.1)
    errors = []

    def render():
        try:
            chat.prompt_ids(conversation("Why?"))
        except DataError as error:
            errors.append(str(error))

    thread = Thread(target=render, daemon=True)
    thread.start()
    thread.join(20)
    assert "takes more than 0.1 seconds" in errors[0]


def _body(**fields):
    return json.dumps(fields).encode()


_USER = {"role": "user", "content": "x"}
LARGE = {
    "messages": _body(messages=[_USER] * 6000),
    "truncated messages": _body(messages=[_USER] * 6000, truncation="auto"),
    "roles": _body(messages=[{"role": "x"}] * 12_000),
    "parts": _body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 7000}]),
    "wrong parts": _body(messages=[{"role": "user", "content": [5] * 70_000}]),
    "one message": _body(messages=[_USER | {"content": "x" * 250_000}]),
    "fields": _body(**{f"a{i}": 1 for i in range(17_000)}),
    "a long name": _body(**{"a" * 250_000: 1}),
    "depth": b'{"messages": ' + b"[" * 125_000,
    "objects": b'{"a":' * 50_000,
    "stops": _body(messages=[_USER], stop=["a"] * 50_000),
    "a long stop": _body(messages=[_USER], stop="a" * 250_000),
    "tools": _body(messages=[_USER], tools=[{}] * 50_000),
    "a number": b'{"messages": [], "n": ' + b"9" * 250_000 + b"}",
    "metadata": _body(messages=[_USER], metadata={"a": ["b"] * 50_000}, max_tokens=1),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_request_is_answered_briefly(chat_server, encoded, kind):
    status, answer = post(chat_server, "/v1/chat/completions", LARGE[kind])
    assert status == (200 if kind in ("metadata", "parts", "truncated messages") else 400)
    assert len(answer) < 2000
    assert sum(encoded) < 2.5 * len(LARGE[kind])
    assert len(encoded) < 30


PROMPTS = {
    "one word": _body(prompt="a" * 250_000),
    "words": _body(prompt="abc " * 212_000),
    "ids": _body(prompt=[1] * 70_000),
    "prompts": _body(prompt=["a"] * 50_000),
    "wrong ids": _body(prompt=[0.5] * 50_000),
    "one list": _body(prompt=[[1] * 70_000]),
    "no end": _body(prompt=[[[[1]]]] * 25_000),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_large_prompt_is_refused_briefly(chat_server, encoded, kind):
    status, answer = post(chat_server, "/v1/completions", PROMPTS[kind])
    assert status == 400
    assert json.loads(answer)["error"]["param"] == "prompt"
    assert len(answer) < 2000
    assert sum(encoded) <= 1_000_000
