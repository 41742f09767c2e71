"""Every parameter of OpenAI's API: null and its default are accepted, any other value is used or
refused by name.
"""

import json
from importlib.util import find_spec

import pytest

from clients import client_of, post

if find_spec("openai") is None:
    pytest.skip(
        "the client of the API is not installed: it is in the extra `test`",
        allow_module_level=True,
    )
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")


# parameter: (values that are accepted, values that are refused); null is always accepted
_TOOL = {"type": "function", "function": {"name": "f"}}
_BOTH: dict[str, tuple[list, list]] = {
    "frequency_penalty": ([0, 0.0], [0.1, -1]),
    "logit_bias": ([{}], [{"5": 10}]),
    "max_tokens": ([1], [0, -1, 1.5, "1", True]),
    "model": ([], ["gpt-4", 5]),
    "n": ([1, 2], [0, 17, 1.5]),
    "presence_penalty": ([0, 0.0], [0.1, 2]),
    "seed": ([0, -1, 2**62], [0.5, 2**63]),
    "stop": (["", [], "x", ["x", "y"]], [5, [""], ["a"] * 5, "a" * 1001]),
    "stream": ([False, True], ["yes", 1]),
    "stream_options": (
        [{}, {"include_usage": True}, {"include_obfuscation": False}, {"include_usage": None}],
        [True, {"include_obfuscation": True}, {"include_usage": 1}],
    ),
    "temperature": ([0, 1, 2.0], [-1, 2.1, "hot"]),
    "top_p": ([0, 1, 0.5], [-0.1, 1.1, "x"]),
    "user": (["ada"], []),
}
_CHAT = _BOTH | {
    "messages": ([], ["hi", [], [5]]),
    "audio": ([], [{"voice": "ash", "format": "wav"}]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "logprobs": ([False], [True]),
    "max_completion_tokens": ([1], [0, "1"]),
    "metadata": ([{}, {"a": "b"}], []),
    "modalities": ([["text"]], [["text", "audio"], ["audio"]]),
    "moderation": ([], [{"model": "m"}]),
    "parallel_tool_calls": ([True, False], ["x"]),
    "prediction": ([], [{"type": "content", "content": "x"}]),
    "prompt_cache_key": (["k"], []),
    "prompt_cache_options": ([{"mode": "implicit"}], []),
    "prompt_cache_retention": (["24h"], []),
    "reasoning_effort": (["none"], ["low", "high"]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, {}]),
    "safety_identifier": (["x"], []),
    "service_tier": (["auto", "default"], []),
    "store": ([False, True], []),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}]),
    "tools": ([[], [_TOOL], [_TOOL, _TOOL]], [[{}], [5], "x", [{"type": "function"}]]),
    "top_logprobs": ([0], [1]),
    "verbosity": (["medium"], ["low", "high"]),
    "web_search_options": ([], [{}, {"search_context_size": "low"}]),
}
_TEXT = _BOTH | {
    "prompt": (["ab", ["ab"], [1, 2], [[1, 2]]], [["a", "b"], [[1], [2]], [11], [-1], 5, [1.5]]),
    "best_of": ([1], [2, 0]),
    "echo": ([False], [True]),
    "logprobs": ([], [0, 1]),
    "suffix": ([""], ["x"]),
}
# not in OpenAI's API, but in those of vLLM and llama.cpp
_OTHERS: dict[str, tuple[list, list]] = {
    "top_k": ([-1, 0, 5], [-2, "x", 2**31]),
    "truncation": (["auto", "disabled"], ["x", 1]),
    "repetition_penalty": ([1, 1.0], [1.1, 0, True]),
    "repeat_penalty": ([1], [1.1]),
    "length_penalty": ([1.0], [2.0]),
    "min_p": ([0], [0.1]),
    "min_tokens": ([0], [1]),
    "ignore_eos": ([False], [True, 0]),
    "use_beam_search": ([False], [True]),
    "skip_special_tokens": ([True], [False]),
    "temprature": ([], [0, 1, "", False, []]),
}


def test_every_parameter_of_the_client_is_in_the_table():
    from openai.types import chat, completion_create_params

    for table, params in (
        (_CHAT, chat.completion_create_params.CompletionCreateParamsBase),
        (_TEXT, completion_create_params.CompletionCreateParamsBase),
    ):
        assert set(params.__annotations__) | {"stream"} == set(table)


@pytest.mark.parametrize("name", sorted(_CHAT | _OTHERS))
def test_a_parameter_of_chat_completions(chat_server, name):
    accepted, refused = (_CHAT | _OTHERS)[name]
    _check(chat_server, "/v1/chat/completions", name, accepted, refused)


@pytest.mark.parametrize("name", sorted(_TEXT | _OTHERS))
def test_a_parameter_of_completions(base_server, name):
    accepted, refused = (_TEXT | _OTHERS)[name]
    _check(base_server, "/v1/completions", name, accepted, refused)


def _check(server, path, name, accepted, refused):
    chat = "chat" in path
    text = {"messages": [{"role": "user", "content": "Why?"}]} if chat else {"prompt": "ab"}
    optional = [] if name in text else [None]
    for value in [*accepted, *optional]:
        body = text | {"max_tokens": 1, "seed": 3, name: value}
        status, answer = post(server, path, json.dumps(body).encode())
        assert status == 200, (value, answer)
    for value in refused:
        body = text | {"max_tokens": 1, "seed": 3, name: value}
        status, answer = post(server, path, json.dumps(body).encode())
        error = json.loads(answer)["error"]
        assert status == (404 if (name, value) == ("model", "gpt-4") else 400), (value, answer)
        assert (error["param"], error["type"]) == (name, "invalid_request_error"), value
        assert error["message"].startswith(name), error


_IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
_TEXT_PART = {"type": "text", "text": "Why?"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt", [-1], "prompt: token -1 is none; ids count from 0"),
        ("prompt", [[1, -2]], "prompt: token -2 is none; ids count from 0"),
        ("content", [_TEXT_PART, _IMAGE], "part 1: type 'image_url' is not supported; send "),
        ("content", [{"text": "Why?"}], "part 0: type None is not supported; send parts of"),
        ("content", ["Why?"], "part 0: what is no object is not supported; send parts of"),
        ("content", [{"type": "text"}], "part 0: text: is missing, or no text"),
        ("content", [_TEXT_PART, {"type": "text", "text": 5}], "part 1: text: is missing, or"),
        ("content", 5, "neither a text nor a list of parts of type text"),
        ("content", _TEXT_PART, "neither a text nor a list of parts of type text"),
    ],
)
def test_what_is_no_text_is_refused_in_plain_words(chat_server, base_server, name, value, message):
    body = {name: value}
    server = base_server
    path = "/v1/completions"
    if name == "content":
        body = {"messages": [{"role": "user", "content": value}]}
        server = chat_server
        path = "/v1/chat/completions"
        message = f"messages: 0: content: {message}"
    status, answer = post(server, path, json.dumps(body).encode())
    error = json.loads(answer)["error"]
    assert status == 400
    assert error["message"].startswith(message), error
    assert error["param"] == ("prompt" if name == "prompt" else "messages")


@pytest.mark.parametrize("form", ["object", "dump", "null fields"])
def test_the_client_sends_its_answer_back(chat_server, form):
    question = {"role": "user", "content": "Why?"}
    options = {"model": "parrot", "max_tokens": 5, "seed": 1}
    with client_of(chat_server) as client:
        answer = client.chat.completions.create(messages=[question], **options).choices[0].message
        dump = answer.model_dump()
        sent = {
            "object": answer,
            "dump": dump,
            "null fields": dump | {"name": None, "annotations": [], "tool_calls": []},
        }[form]
        follow = {"role": "user", "content": "And?", "name": None}
        plain = {"role": "assistant", "content": answer.content}
        second, expected = (
            client.chat.completions.create(messages=[question, message, follow], **options)
            for message in (sent, plain)
        )
    assert second.choices == expected.choices
    assert second.usage == expected.usage


def test_prompts_in_all_their_forms_are_equal(base_server):
    texts = []
    ids = base_server.served.tokenizer("abc")["input_ids"]
    for prompt in ("abc", ["abc"], ids, [ids]):
        body = {"prompt": prompt, "seed": 4, "max_tokens": 9}
        status, answer = post(base_server, "/v1/completions", json.dumps(body).encode())
        assert status == 200
        texts.append(json.loads(answer)["choices"][0]["text"])
    assert len(set(texts)) == 1


def test_a_model_is_retrieved_by_its_name(base_server):
    import openai

    with client_of(base_server) as client:
        (listed,) = client.models.list().data
        assert client.models.retrieve("letters") == listed
        for name in ("gpt-4", "letters/x", "a b"):
            with pytest.raises(openai.NotFoundError, match="letters") as caught:
                client.models.retrieve(name)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
