"""Thoughts in the `chat` command: apart from the answer, and sent back as `serve` does."""

import contextlib
import io
import json
import sys

import pytest
from transformers import AutoTokenizer

from chat_templates import CALLING
from nanogpt_hf.commands import main

LAST = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
THINKS = CALLING["hermes that thinks"]
TEMPLATES = {
    "thinks": THINKS,
    "prompt thinks": CALLING["hermes whose prompt thinks"],
    # Qwen 3's template writes only the thoughts after the last question.
    "drops": LAST
    + THINKS.replace(
        "{% if m.reasoning_content %}",
        "{% if m.reasoning_content and loop.index0 > last.user %}",
    ),
    "plain": CALLING["hermes"],
    "marks are tokens": THINKS,
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
SHOWN = '(calculator({"expression": "1+1"}) = 2)\n'


@pytest.fixture(scope="module")
def folders(tmp_path_factory, save_chat_model):
    """A model for each template, by its name."""
    found = {}
    for name, template in TEMPLATES.items():

        def change(model, tokenizer, name=name, template=template):
            tokenizer.chat_template = template.replace("<|im_end|>", "<|endoftext|>")
            if name == "marks are tokens":
                marks = {"additional_special_tokens": ["<think>", "</think>"]}
                tokenizer.add_special_tokens(marks)
                model.resize_token_embeddings(len(tokenizer))

        found[name] = tmp_path_factory.mktemp("models") / "model"
        save_chat_model(found[name], change, n_positions=1024)
    return found


@pytest.fixture
def talk(folders, scripted, monkeypatch, capsys):
    """Ask as many questions, by default one for each turn that the model writes; return stdout,
    stderr, and the prompts as text. Where a turn has ^C, Ctrl-C interrupts it.
    """

    def talk(name, *answers, arguments=(), questions=None):
        model = folders[name]
        tokenizer = AutoTokenizer.from_pretrained(model)
        end = tokenizer.eos_token_id

        def ids_of(text):
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        scripts = []
        for answer in answers:
            text, _, interrupted = answer.partition("^C")
            is_cut = "--max-new-tokens" in arguments
            stop = [KeyboardInterrupt] if "^C" in answer else [] if is_cut else [end]
            scripts.append([*ids_of(text), *stop, *ids_of(interrupted)])
        prompts = scripted(*scripts)
        count = len(answers) if questions is None else questions
        lines = "".join(f"{number}?\n" for number in range(count))
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["chat", str(model), *map(str, arguments)]) == 0
        return (*capsys.readouterr(), [tokenizer.decode(ids) for ids, _ in prompts])

    return talk


# What the model writes -> thought, text.
ANSWERS = {
    "<think>\nTwo.\n</think>\n\nFour.": ("Two.", "Four."),
    "<think>Two.</think>Four.": ("Two.", "Four."),
    " \n<think> a\n\n b </think> \n c \n": ("a\n\n b", "c \n"),
    "<think>\n\n</think>\n\nFour.": ("", "Four."),
    "<think></think>": ("", ""),
    "Four.": ("", "Four."),
    "": ("", ""),
    "  Four. <think>Two.</think>": ("", "  Four. <think>Two.</think>"),
    "<thi": ("", "<thi"),
    "<thinking>x</thinking>": ("", "<thinking>x</thinking>"),
    "<think>\nTwo and": ("Two and", ""),
    "<think>\nTwo </thin": ("Two </thin", ""),
    "<think>\nü 🤔 <b> </thinker> {": ("ü 🤔 <b> </thinker> {", ""),
    "<think>a</think>b</think>c": ("a", "b</think>c"),
    "<think>a<think>b</think>c": ("a<think>b", "c"),
    "<think>a</think><think>b</think>c": ("a", "<think>b</think>c"),
    f"<think>\n{CALL}\n</think>\n\nFour.": (CALL, "Four."),
    f"<think>x</think>{CALL}": ("x", CALL),
    "<think>\x1b[31ma)\x07</think>b": ("\x1b[31ma)\x07", "b"),
}


def escaped(text: str) -> str:
    return text.replace("\x1b", "\\x1b").replace("\x07", "\\x07")


@pytest.mark.parametrize("text", ANSWERS)
def test_thought_goes_to_stderr_without_a_terminal(talk, text):
    thought, answer = ANSWERS[text]
    out, err, prompts = talk("thinks", text, "Bye.")
    assert out == f"{answer}\nBye.\n"
    assert err == (f"(thought: {escaped(thought)})\n" if thought else "")
    written = f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer
    broken = written.replace("<|", "< |")
    assert prompts[1].endswith(
        f"assistant\n{broken}<|endoftext|>\n<|im_start|>user\n1?<|endoftext|>\n"
        "<|im_start|>assistant\n"
    ), prompts[1]


@pytest.mark.parametrize("text", ANSWERS)
def test_thought_is_dimmed_on_a_terminal(talk, monkeypatch, text):
    thought, answer = ANSWERS[text]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, err, _ = talk("thinks", text)
    assert err == ""
    parts = out.split("\x1b[2m")
    assert all(part.count("\x1b[22m") == 1 for part in parts[1:])
    assert "\x1b" not in parts[0]
    dimmed = [part.partition("\x1b[22m") for part in parts[1:]]
    assert "".join(part[0] for part in dimmed) == escaped(thought)
    # Nothing between its parts; an empty line, if there is an answer.
    assert all(part[2] == "" for part in dimmed[:-1])
    rest = dimmed[-1][2] if dimmed else out
    line = f"{escaped(answer)}\n"
    assert rest == (line if not thought else f"\n\n{line}" if answer else "\n")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminal_without_styles_gets_a_note(talk, monkeypatch, name, value):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv(name, value)
    assert talk("thinks", "<think>a</think>b")[:2] == ("b\n", "(thought: a)\n")


@pytest.mark.parametrize(
    ("name", "text", "thought", "answer"),
    [
        ("prompt thinks", "Two.\n</think>\n\nFour.", "Two.", "Four."),
        ("prompt thinks", "Two.", "Two.", ""),
        ("prompt thinks", "</think>Four.", "", "Four."),
        ("prompt thinks", "", "", ""),
        ("marks are tokens", "<think>\nTwo.\n</think>\n\nFour.", "Two.", "Four."),
        ("marks are tokens", "<think></think>Four.", "", "Four."),
        ("marks are tokens", "Four.</think>", "", "Four.</think>"),
        ("drops", "<think>Two.</think>Four.", "Two.", "Four."),
        # Without thoughts the marks are text.
        ("plain", "<think>\nTwo.\n</think>\n\nFour.", "", "<think>\nTwo.\n</think>\n\nFour."),
        ("plain", " \n<think>a", "", " \n<think>a"),
    ],
)
def test_marks_are_those_of_the_template(talk, name, text, thought, answer):
    out, err, _ = talk(name, text)
    assert (out, err) == (f"{answer}\n", f"(thought: {thought})\n" if thought else "")


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>Two ^C more", "Two", ""),
        ("<think>^C", "", ""),
        ("<th^C", "", "<th"),
        ("<think>a</thi^C", "a</thi", ""),
        ("<think>a</think>^C", "a", ""),
        ("<think>a</think>b^C", "a", "b"),
    ],
)
def test_ctrl_c_in_a_thought_keeps_what_was_written(talk, text, thought, answer):
    out, err, prompts = talk("thinks", text, "Bye.")
    assert out == f"{answer}\nBye.\n"
    assert err == (f"(thought: {thought})\n" if thought else "")
    assert ("<think>" in prompts[1]) == bool(thought)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("<think>Two", "(thought: Two)\n(cut off after 10 tokens, within its thought)\n"),
        ("<think>a</think>b", "(thought: a)\n(cut off after 17 tokens)\n"),
        ("<think>a</think>", "(thought: a)\n(cut off after 16 tokens)\n"),
        ("Four.", "(cut off after 5 tokens)\n"),
    ],
)
def test_note_on_the_limit_says_whether_the_thought_was_cut(talk, text, note):
    assert talk("thinks", text, arguments=["--max-new-tokens", len(text)])[1] == note


@pytest.mark.parametrize("name", ["thinks", "drops", "marks are tokens"])
def test_thoughts_between_calls_of_tools(talk, name):
    """The next turn has the very tokens of the one before; the next question has the messages."""
    called = f"<think>\nSum.\n</think>\n\nSo.\n{CALL}"
    turns = (called, "<think>Easy.</think>It is 2.", "Bye.")
    out, err, prompts = talk(name, *turns, arguments=["--tools", "calculator"], questions=2)
    assert out == "So.\nIt is 2.\nBye.\n"
    assert err == f"(thought: Sum.)\n{SHOWN}(thought: Easy.)\n"
    assert called in prompts[1]
    assert ("<think>\nSum.\n</think>\n\nSo.<tool_call>" in prompts[2]) == (name != "drops")
    assert ("<think>\nEasy.\n</think>\n\nIt is 2." in prompts[2]) == (name != "drops")
    assert "It is 2." in prompts[2]


def test_a_turn_that_only_thinks_and_calls_has_no_line(talk):
    turns = (f"<think>Sum.</think>{CALL}", "2")
    out, err, _ = talk("thinks", *turns, arguments=["--tools", "calculator"], questions=1)
    assert (out, err) == ("2\n", f"(thought: Sum.)\n{SHOWN}")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["<think>\nTwo.\n</think>\n\nFour.", "Two.</think>Four.", "Four."])
def test_prompt_of_the_next_question_is_that_of_serve(talk, folders, name, text):
    """`serve` divides the answer in the same way, and its client sends it back as it got it."""
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    from nanogpt_hf.data.answer_stream import AnswerSplitter, ThoughtTokens
    from nanogpt_hf.generate import TextStream
    from nanogpt_hf.model.load import load_model
    from nanogpt_hf.serving.generation import Choice, Served
    from nanogpt_hf.serving.requests import parse_request

    out, err, prompts = talk(name, text, "Bye.")
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    served = Served("m", load_model(str(folders[name])), tokenizer, contextlib.nullcontext)
    form = served.form.without_calls()
    stream = TextStream(tokenizer, (), form)
    choice = Choice(iter(()), 999, stream, [], AnswerSplitter(form, None), ThoughtTokens(form))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [choice.add(token) for token in (*tokens, None)]
    thought, content = ("".join(part) for part in zip(*parts, strict=True))
    answer = {"role": "assistant", "content": content}
    answer |= {"reasoning_content": thought, "reasoning": thought} if thought else {}
    first, second = ({"role": "user", "content": f"{number}?"} for number in (0, 1))
    body = json.dumps({"messages": [first, answer, second]}).encode()
    ids, _ = served._encode(parse_request(body, "m", True))
    assert tokenizer.decode(ids) == prompts[1]
    assert out.startswith(f"{content}\n")
    assert err.startswith(f"(thought: {thought})\n") == bool(thought)
