"""The `chat` command, and the prompts that the model gets."""

import io
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from nanogpt_hf.commands import main
from nanogpt_hf.commands.chat import questions


@pytest.fixture
def talk(capsys, monkeypatch, chat_model):
    """Pipe lines into `chat`; return its stdout and stderr."""

    def talk(*lines: str, arguments=(), status=0):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", str(chat_model), *map(str, arguments)]) == status
        return capsys.readouterr()

    return talk


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


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "123+456"}}\n</tool_call>'
SHOWN = '(calculator({"expression": "123+456"}) = 579)\n'
TOOLS = ("--tools", "calculator", "--max-new-tokens", 150)


@pytest.fixture
def spoken(tmp_path, save_chat_model, scripted, ids_of, monkeypatch, capsys):
    """Chat with a model of a larger context that ends the given turns; return what it printed, and
    the text of the prompts.
    """
    folder = tmp_path / "model"
    save_chat_model(folder, n_positions=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id

    def spoken(turns, *lines, arguments=TOOLS):
        calls = scripted(*([*ids_of(turn), end] for turn in turns))
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", str(folder), *map(str, arguments)]) == 0
        return (*capsys.readouterr(), [tokenizer.decode(ids) for ids, _ in calls])

    return spoken


def test_an_answer_calls_a_tool_and_continues_with_its_result(spoken):
    out, err, prompts = spoken([f"Let me see.\n{CALL}", "It is 579.", "Bye."], "123+456?", "So?")
    assert out == "Let me see.\nIt is 579.\nBye.\n"
    assert err == SHOWN
    asked = "### User:\n123+456?\n\n### Assistant:\n"
    result = "<|endoftext|>### Tool:\n579\n\n### Assistant:\n"
    assert prompts[0].endswith(asked)
    assert '"name": "calculator"' in prompts[0]
    assert prompts[1] == f"{prompts[0]}Let me see.\n{CALL}{result}"
    # The next question comes after all turns.
    assert prompts[2] == (f"{prompts[1]}It is 579.<|endoftext|>### User:\nSo?\n\n### Assistant:\n")


def test_a_turn_that_only_calls_has_no_line(spoken):
    out, err, _ = spoken([CALL, "579"], "123+456?")
    assert (out, err) == ("579\n", SHOWN)


def test_without_tools_a_call_is_text(spoken):
    out, err, prompts = spoken([CALL], "123+456?", arguments=TOOLS[2:])
    assert (out, err) == (f"{CALL}\n", "")
    assert "calculator" not in prompts[0]


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (CALL.replace("123+456", "1/0"), " = error: raises ZeroDivisionError: "),
        (CALL.replace("calculator", "calculater"), " = error: there is no tool 'calculater'"),
        (CALL[:-20], "(the call is no JSON: "),
        (CALL.replace("123+456", "\\u001b[2J"), '{"expression": "\\u001b[2J"}) = error: '),
    ],
)
def test_a_call_that_fails_is_read_by_the_model(spoken, call, note):
    out, err, prompts = spoken([call, "Well.", "Yes."], "1?", "2?")
    assert out.endswith("Well.\nYes.\n")
    assert note in err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "### Tool:\nerror: " in prompts[1]


def test_calls_end_after_eight_turns_and_at_the_end_of_the_context(spoken):
    out, err, prompts = spoken([CALL] * 8 + ["Yes."], "1?", "2?")
    assert err.count(SHOWN) == 7
    assert err.endswith("(cut off after 8 turns)\n")
    assert out == "Yes.\n"
    # What ended without an answer is not in the conversation.
    assert "<tool_call>" not in prompts[8]
    # A second turn fits, and its result does not.
    text = "a" * ((2048 - len(prompts[0])) // 2 - len(CALL) - 20)
    arguments = (*TOOLS[:3], 1000)
    out, err, _ = spoken([f"{text}{CALL}", f"{text}{CALL}"], "1?", arguments=arguments)
    assert err == f"{SHOWN}{SHOWN}(cut off: the context has no room for another turn)\n"
    assert out == f"{text}\n{text}\n"


def test_ctrl_c_ends_a_tool(spoken, monkeypatch):
    from nanogpt_hf.tasks import tools

    def interrupted(expression: str) -> str:
        """Wait.

        Args:
            expression: X.
        """
        raise KeyboardInterrupt

    monkeypatch.setitem(tools.BUILT_IN, "calculator", interrupted)
    out, err, prompts = spoken([CALL, "Yes."], "1?", "2?")
    assert (out, err) == ("Yes.\n", "")
    assert "<tool_call>" not in prompts[1]
