"""The requests of OpenAI's API, checked by pydantic, and its error objects."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nanogpt_hf.data.messages import THOUGHT, Message
from nanogpt_hf.data.tools import functions_of

MAX_CHOICES = 16  # per request
_ANY = object()
# Parameters that are not supported, with the values that ask for what this server does anyway.
# Clients send many of them with their default. Any other value is refused: an answer that ignores
# it would look as if it had been obeyed.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # Without effect on the text.
    "user": (_ANY,),
    "metadata": (_ANY,),
    "store": (_ANY,),
    "service_tier": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_options": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    # Parameters of OpenAI's API.
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"], []),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": ("medium",),
    # Not in OpenAI's API, but in the APIs of vLLM and llama.cpp.
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}


class ApiError(Exception):
    """An error that the client gets: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def _stops(value: Any) -> Any:
    """Make a list of `stop`, which may be one text."""
    if value == "":
        return []
    return value if isinstance(value, list) else [value]


def _one_prompt(value: Any) -> Any:
    """Take the prompt out of a list of one prompt; a list of numbers is one prompt of tokens."""
    # OpenAI's API has one answer per prompt of a list; here a request has one prompt.
    if isinstance(value, list) and any(isinstance(part, str | list) for part in value):
        if len(value) > 1:
            raise ValueError(f"one prompt per request, not {len(value)}")
        value = value[0]
    # `type` and not isinstance: true and false are ints to Python.
    is_tokens = isinstance(value, list) and all(type(part) is int for part in value)
    if not isinstance(value, str) and not is_tokens:
        raise ValueError("neither a text nor a list of token ids")
    if isinstance(value, list) and min(value, default=0) < 0:
        raise ValueError(f"token {min(value)} is none; ids count from 0")
    return value


def _text_parts(value: Any) -> Any:
    """Check a content: a text, or a list whose parts are of type text. Images and sound are refused
    by the number of their part.
    """
    if not isinstance(value, str | list):
        raise ValueError("neither a text nor a list of parts of type text")
    for number, part in enumerate(value if isinstance(value, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"type {kind!r:.40}" if isinstance(part, dict) else "what is no object"
            raise ValueError(f"part {number}: {what} is not supported; send parts of type text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number}: text: is missing, or no text")
    return value


def _same(value: Any, default: Any) -> bool:
    """Whether two values of JSON are equal; unlike in Python, `false` is not 0."""
    return isinstance(value, bool) == isinstance(default, bool) and value == default


class _Strict(BaseModel):
    """An object of JSON. Unknown fields are refused, unless their value asks for nothing; null
    means the default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    defaults: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, given: Any) -> Any:
        # pydantic refuses what is no object, with a message of its own.
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            defaults = cls.defaults.get(name, ())
            asks = not any(default is _ANY or _same(value, default) for default in defaults)
            if value is not None and asks:
                kept[name] = value
        return kept


_Functions = Annotated[list[dict[str, Any]] | None, AfterValidator(functions_of)]


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    # A client sends an answer back as it got it.
    defaults = {"annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[_Part], Field(fail_fast=True)] | None, BeforeValidator(_text_parts)
    ] = None
    name: str = ""
    tool_calls: _Functions = None
    tool_call_id: str = ""
    # Servers have both names for the thought of an answer, and this one sends both.
    reasoning_content: str = ""
    reasoning: str = ""

    @model_validator(mode="after")
    def _with_one_thought(self) -> Self:
        thought = self.reasoning_content or self.reasoning
        if thought and self.role != "assistant":
            raise ValueError("reasoning_content: only an answer of the assistant has a thought")
        if self.reasoning and self.reasoning != thought:
            raise ValueError("reasoning: differs from reasoning_content; send one of them")
        return self

    @model_validator(mode="after")
    def _with_content(self) -> Self:
        # An answer that only calls functions has no content.
        if self.content is None and not (self.tool_calls and self.role == "assistant"):
            raise ValueError("content: is missing")
        return self

    def for_template(self) -> Message:
        """The message as chat templates expect it: one text, only the fields that are given."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # OpenAI's newer name of the system's role, which no chat template knows.
        role = "system" if self.role == "developer" else self.role
        others = {name: getattr(self, name) for name in ("name", "tool_calls", "tool_call_id")}
        others[THOUGHT] = (self.reasoning_content or self.reasoning).strip()
        given = {name: value for name, value in others.items() if value}
        return {"role": role, "content": content} | given


def _in_order(messages: list[_Message]) -> list[_Message]:
    """Refuse a tool's message that follows no answer: most chat templates would render it wrongly,
    without an error.
    """
    for number, message in enumerate(messages):
        before = messages[number - 1].role if number else None
        if message.role == "tool" and before not in ("assistant", "tool"):
            raise ValueError(f"{number}: role: a message of a tool follows an answer")
    return messages


class _StreamOptions(_Strict):
    # Obfuscation adds random characters to the events, against an eavesdropper who measures their
    # lengths. This server adds none.
    defaults = {"include_obfuscation": (False,)}

    include_usage: bool = False


class Request(_Strict):
    """A request for completions or, if it has `messages`, for chat completions."""

    defaults = _DEFAULTS

    model: str | None = None
    prompt: Annotated[
        str | Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)],
        BeforeValidator(_one_prompt),
    ] = ""
    messages: Annotated[list[_Message], Field(fail_fast=True), AfterValidator(_in_order)] = []
    tools: _Functions = None
    tool_choice: Literal["none", "auto"] = "auto"
    truncation: Literal["auto", "disabled"] = "disabled"  # auto drops the oldest messages
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    # Not in OpenAI's API; `sample` has it. 0 and -1 turn it off in other servers.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    # A request without a seed gets a random one, so that its answers differ.
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**62), ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        BeforeValidator(_stops),
        Field(max_length=4),
    ] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    @property
    def offered_tools(self) -> list[Any] | None:
        """The tools that the model may call: none in a text without messages."""
        return None if self.tool_choice == "none" or not self.messages else self.tools

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse_request(body: bytes, model: str, chat: bool) -> Request:
    """Parse the request in a JSON body. Raises ApiError with the name of a wrong parameter.

    `model` is the name of the model that is served; a request may leave it out.
    """
    try:
        request = Request.model_validate_json(body)
    except ValidationError as error:
        # The error object of OpenAI's API has one message and one parameter.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = [f"{part:.60}" if isinstance(part, str) else str(part) for part in first["loc"]]
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "is unknown, or has a value that this server does not support"
        message = ": ".join([*where, reason])
        raise ApiError(400, message, where[0] if where else None) from None
    if request.model is not None:
        check_model(request.model, model)
    # Both routes share a class; each has a field that the other has not.
    text, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if not getattr(request, text) or getattr(request, other):
        raise ApiError(400, f"{text}: is missing, or {other} is given", text)
    if request.top_k in (0, -1):
        request.top_k = None
    return request


def check_model(name: str, model: str) -> None:
    """Raises ApiError unless `name` is the model that is served."""
    if name != model:
        message = f"model: {name!r:.60} does not exist; this server has {model!r} only"
        raise ApiError(404, message, "model", "model_not_found")
