"""Chat templates that fail, loop or write endlessly are one line; others render as with transformers."""

import time

import pytest

from nanogpt_hf.data import chat_prompt
from nanogpt_hf.data.chat_prompt import render_prompt
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.errors import DataError

MESSAGES = [{"role": "user", "content": "why"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer():
    return char_tokenizer(sorted("why: use")).hf


def test_template_renders_as_with_transformers(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert render_prompt(tokenizer, MESSAGES) == expected == "user: why"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ range(10 ** 9) }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no\nlines') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[5].content.x }}",
        "{% for",
    ],
)
def test_failing_template_is_one_line(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"^the model's chat template fails \(.+\); choose another model$") as caught:
        render_prompt(tokenizer, MESSAGES)
    assert "\n" not in str(caught.value)


def test_looping_template_is_stopped(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_prompt, "_SECONDS", 0.2)
    tokenizer.chat_template = LOOP
    started = time.monotonic()
    with pytest.raises(DataError, match=r"takes more than 0\.2 seconds"):
        render_prompt(tokenizer, MESSAGES)
    assert time.monotonic() - started < 60


def test_template_with_too_much_output_is_refused(tokenizer):
    tokenizer.chat_template = "{{ 'a' * 10000001 }}"
    with pytest.raises(DataError, match="writes 10,000,001 characters"):
        render_prompt(tokenizer, MESSAGES)
