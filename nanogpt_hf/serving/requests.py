"""Parse and check the requests of OpenAI's API, and its error objects."""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from nanogpt_hf.errors import did_you_mean

MAX_CHOICES = 16  # sequences per request
_MAX_STOPS, _MAX_STOP_LENGTH = 4, 1000

# Name -> type, inclusive bounds and default.
_NUMBERS: dict[str, tuple[type, float, float, float | None]] = {
    "temperature": (float, 0, 2, 1.0),
    "top_p": (float, 0, 1, None),
    "top_k": (int, 1, 2**31, None),  # not in OpenAI's API; `sample` has it
    "seed": (int, -(2**63), 2**63 - 1, None),
    "n": (int, 1, MAX_CHOICES, 1),
    "max_tokens": (int, 1, 2**31, None),
}
# of chat completions: the newer name of `max_tokens`
_NEWER_NAME = "max_completion_tokens"
# no effect on text
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Parameters of the API that are not supported, and the values that are accepted because they change
# nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ApiError(Exception):
    """An error that the client gets: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        # The name of a parameter may hold half of a surrogate pair, which cannot be sent.
        texts = (str(self), self.param)
        message, param = (text and text.encode(errors="replace").decode() for text in texts)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def _wrong(name: str, problem: str) -> ApiError:
    """The error for a parameter, or for a part of it such as messages[0].role."""
    return ApiError(400, f"{name}: {problem}", re.split(r"[\[.]", name)[0])


@dataclass(frozen=True)
class Request:
    """A checked request for completions. Chat completions have `messages`, the others `prompts`."""

    messages: list[dict[str, str]]
    prompts: list[str]
    truncate: bool  # drop the oldest messages if they do not fit into the context
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    n: int
    max_tokens: int | None
    stop: list[str]
    stream: bool
    include_usage: bool


def parse_request(body: bytes, model: str, chat: bool) -> Request:
    """The request in a JSON body. Raises ApiError with the name of a wrong parameter.

    `model` is the name of the model that is served; a request may leave it out. null means the
    default.
    """
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError(400, f"the body is not a JSON object but {_short(tree)}")
    given = {name: value for name, value in tree.items() if value is not None}
    text = "messages" if chat else "prompt"
    known = {"model", text, "stop", "stream", "stream_options"}
    known |= {*_NUMBERS, *_IGNORED, *_UNSUPPORTED, *((_NEWER_NAME, "truncation") if chat else ())}
    for name in given.keys() - known:
        raise _wrong(name[:100], f"unknown parameter{did_you_mean(name[:100], known)}")
    if given.get("model", model) != model:
        message = f"model: {_short(given['model'])} does not exist; this server has {model!r} only"
        raise ApiError(404, message, "model", "model_not_found")
    for name, values in _UNSUPPORTED.items():
        value = given.get(name)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            message = f"{name}: this server does not support it; leave it out"
            raise ApiError(400, message, name, "unsupported_parameter")
    if text not in given:
        raise _wrong(text, "is missing")
    numbers = {name: _number(given, name, *bounds) for name, bounds in _NUMBERS.items()}
    if _NEWER_NAME in given:
        numbers["max_tokens"] = _number(given, _NEWER_NAME, *_NUMBERS["max_tokens"])
    if numbers["seed"] is None:
        numbers["seed"] = secrets.randbelow(2**62)
    truncation = given.get("truncation", "disabled")
    if truncation not in ("disabled", "auto"):
        raise _wrong("truncation", f"expected disabled or auto, got {_short(truncation)}")
    stream_options = given.get("stream_options", {})
    if not isinstance(stream_options, dict):
        raise _wrong("stream_options", f"expected an object, got {_short(stream_options)}")
    limit = MAX_CHOICES // numbers["n"]
    return Request(
        **numbers,
        messages=_messages(given["messages"]) if chat else [],
        prompts=[] if chat else _texts(given["prompt"], "prompt", limit),
        truncate=truncation == "auto",
        stop=_stops(given.get("stop", [])),
        stream=_flag(given, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
    )


def _short(value: object) -> str:
    return f"{value!r:.60}"


def _text(text: object, name: str) -> str:
    """`text` if it is text that a tokenizer can read; else raises ApiError."""
    if not isinstance(text, str):
        raise _wrong(name, f"expected text, got {_short(text)}")
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise _wrong(name, "holds half of a surrogate pair, which is no character")
    return text


def _texts(value: object, name: str, limit: int) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts or (isinstance(texts[0], int | list)):
        raise _wrong(name, f"expected text or a list of texts, got {_short(value)}")
    if len(texts) > limit:
        raise _wrong(name, f"{len(texts)} texts are more than this server's limit of {limit}")
    return [_text(text, name) for text in texts]


def _stops(value: object) -> list[str]:
    stops = _texts(value, "stop", _MAX_STOPS) if value != [] else []
    if any(not 0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
        raise _wrong("stop", f"expected texts of 1 to {_MAX_STOP_LENGTH} characters")
    return stops


def _number(
    given: dict[str, Any], name: str, kind: type, low: float, high: float, default: float | None
) -> Any:
    value = given.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, f"expected a number, got {_short(value)}")
    if kind is int and value % 1:
        raise _wrong(name, f"expected a whole number, got {_short(value)}")
    if not low <= value <= high:
        raise _wrong(name, f"must be at least {low} and at most {high}, got {_short(value)}")
    return kind(value)


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, f"expected true or false, got {_short(value)}")
    return value


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        expected = "expected a list of objects with role and content"
        raise _wrong("messages", f"{expected}, got {_short(value)}")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(message: object, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(name, f"expected an object with role and content, got {_short(message)}")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("system", "user", "assistant"):
        raise _wrong(f"{name}.role", f"expected system, user or assistant, got {_short(role)}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(f"{name}.content", f"expected text, got {_short(part)}")
    return {
        "role": role,
        "content": "".join(_text(part.get("text"), f"{name}.content") for part in parts),
    }
