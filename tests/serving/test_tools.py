"""Calls of tools in the answers of the server, as the official client sees them."""

import json
from importlib.util import find_spec

import pytest

from clients import QUESTION, post

if find_spec("openai") is None:
    pytest.skip(
        "the client of the API is not installed: it is in the extra `test`",
        allow_module_level=True,
    )
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "word": "ü"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def server(save_chat_model, tmp_path_factory, running):
    folder = tmp_path_factory.mktemp("models") / "caller"
    save_chat_model(folder, n_positions=1024)
    with running(folder, "caller") as server:
        yield server


def test_a_call_comes_back_as_tool_calls_and_its_result_goes_to_the_template(ask):
    choice = ask(CALL, tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"x": 1, "word": "ü"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    choice = ask("Two.", [QUESTION, choice.message, result], tools=TOOLS)
    assert (choice.finish_reason, choice.message.content) == ("stop", "Two.")
    assert choice.message.tool_calls is None
    assert f"{CALL}<|endoftext|>### Tool:\n2\n\n### Assistant:\n" in ask.prompts[1]


@pytest.mark.parametrize("text", ["Let me see.", "a <", "<tool_cal", ""])
def test_text_comes_before_the_calls_and_each_call_has_an_id(ask, text):
    choice = ask(f"{text}\n{CALL}\n{CALL}", tools=TOOLS)
    assert (choice.message.content or "") == text
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("text", [f"So.\n{CALL}\n{CALL}", CALL, f"{CALL} then"])
def test_a_stream_equals_the_whole_answer(ask, text):
    whole = ask(text, tools=TOOLS)
    content = ""
    calls = []
    reasons = []
    for chunk in ask(text, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reasons += [choice.finish_reason] if choice.finish_reason else []
        assert "tool_call>" not in content
    assert content == (whole.message.content or "")
    assert reasons == [whole.finish_reason] == ["tool_calls"]
    assert [call.index for call in calls] == [*range(len(whole.message.tool_calls))]
    assert [call.function for call in calls] != []
    for call, other in zip(calls, whole.message.tool_calls, strict=True):
        assert (call.function.name, call.function.arguments) == (
            other.function.name,
            other.function.arguments,
        )


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (CALL, {"tool_choice": "none"}, "stop"),
        (CALL, {"tools": []}, "stop"),
        (CALL, {"cut": True}, "length"),
        (CALL[:-20], {}, "stop"),
        (CALL.replace("{", "[", 1), {}, "stop"),
        (CALL, {"stop": ["</tool_call>"]}, "stop"),
        ("a < b </tool_call> <tool", {}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_stays_text(ask, text, options, reason, stream):
    found = ask(text, stream=stream, **{"tools": TOOLS} | options)
    expected = text.removesuffix("</tool_call>") if "stop" in options else text
    if not stream:
        assert (found.message.content, found.finish_reason) == (expected, reason)
        assert found.message.tool_calls is None
        return
    parts = [chunk.choices[0] for chunk in found]
    assert "".join(part.delta.content or "" for part in parts) == expected
    assert [part.finish_reason for part in parts if part.finish_reason] == [reason]
    assert not any(part.delta.tool_calls for part in parts)


def test_completions_have_no_tools(ask, server):
    ask(CALL, tools=TOOLS)
    body = {"prompt": "1+1?", "tools": TOOLS, "max_tokens": 200}
    status, answer = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == CALL
