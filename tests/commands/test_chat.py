"""The `chat` command, and the prompts that the model gets."""

import io
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from nanogpt_hf import generate
from nanogpt_hf.commands import main
from nanogpt_hf.commands.generate import questions


@pytest.fixture
def talk(capsys, monkeypatch, chat_model):
    """Pipe lines into `chat`; return its stdout and stderr."""

    def talk(*lines: str, arguments=(), status=0):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", str(chat_model), *map(str, arguments)]) == status
        return capsys.readouterr()

    return talk


@pytest.fixture
def scripted(monkeypatch):
    """Replace the model's answers; return the list of (prompt ids, max_new_tokens) that it was
    called with.
    """
    calls = []

    def script(*answers):
        remaining = list(answers)

        def generate_tokens(model, ids, *, max_new_tokens, **options):
            calls.append((ids, max_new_tokens))
            answer = remaining.pop(0)
            for token in answer[:max_new_tokens]:
                if token is KeyboardInterrupt:
                    raise KeyboardInterrupt
                yield [token]

        monkeypatch.setattr(generate, "generate_tokens", generate_tokens)
        return calls

    return script


@pytest.fixture
def ids_of(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    return lambda text: tokenizer(text)["input_ids"]


def test_answers_go_to_stdout_and_depend_on_the_seed(talk):
    options = ["--max-new-tokens", 5]
    first = talk("hello", "", "  ", "again", arguments=options)
    assert first.err == "(cut off after 5 tokens)\n" * 2
    assert first.out.endswith("\n")
    assert talk("hello", "again", arguments=options).out == first.out
    assert talk("hello", "again", arguments=[*options, "--seed", 1]).out != first.out
    greedy = [*options, "--temperature", 0]
    assert (
        talk("hello", arguments=greedy).out == talk("hello", arguments=[*greedy, "--seed", 1]).out
    )


def test_conversation_is_kept_until_reset(talk, scripted, ids_of):
    calls = scripted(ids_of("Yes."), ids_of("No."), ids_of("Well."))
    out, err = talk(
        "One?", "Two?", "/reset", "Three?", "/quit", "never", arguments=["--system", "Be brief."]
    )
    assert out == "Yes.\nNo.\nWell.\n"
    assert err == "(the conversation was cleared)\n"
    system = "### System:\nBe brief.\n\n"
    one, three = (f"{system}### User:\n{word}?\n\n### Assistant:\n" for word in ("One", "Three"))
    assert calls[0][0] == ids_of(one)
    assert calls[1][0] == ids_of(f"{one}Yes.<|endoftext|>### User:\nTwo?\n\n### Assistant:\n")
    assert calls[2][0] == ids_of(three)


def test_full_context_drops_oldest_messages(talk, scripted, ids_of):
    # 128 of the 256 positions are reserved for an answer; an exchange takes 36 of the others
    calls = scripted(*[ids_of("Yes.")] * 5)
    out, err = talk("One?", "Two?", "Tri?", "For?", "Fiv?")
    assert out == "Yes.\n" * 5
    assert err == "(the context is full: the oldest 2 messages were dropped)\n" * 2
    assert [ids[10:14] for ids, _ in calls] == [
        ids_of(text) for text in ("One?", "One?", "One?", "Two?", "Tri?")
    ]
    assert all(len(ids) + limit <= 256 for ids, limit in calls)


def test_too_long_question_is_refused_and_chat_continues(talk, scripted, ids_of):
    scripted(ids_of("Yes."))
    out, err = talk("long " * 100, "Short?")
    assert out == "Yes.\n"
    assert err.startswith("(no answer: ")
    assert err.count("\n") == 1


def test_interrupted_answer_is_kept_in_part(talk, scripted, ids_of):
    calls = scripted([*ids_of("Ye"), KeyboardInterrupt], ids_of("No."))
    out, err = talk("A?", "B?")
    assert (out, err) == ("Ye\nNo.\n", "")
    assert calls[1][0] == ids_of(
        "### User:\nA?\n\n### Assistant:\nYe<|endoftext|>### User:\nB?\n\n### Assistant:\n"
    )


def test_invalid_utf8_of_a_pipe_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "ascii"))
    assert [*questions()] == ["a\ufffd"]


def test_chat_in_a_terminal_ends_at_ctrl_d(capsys, chat_model, scripted, ids_of, monkeypatch):
    def type_line(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop()

    lines = ["One?", ""]
    scripted(ids_of("Yes."))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", type_line)
    assert main(["chat", str(chat_model)]) == 0
    out, err = capsys.readouterr()
    assert out == "Yes.\n"
    assert "Ctrl-C ends an answer" in err
