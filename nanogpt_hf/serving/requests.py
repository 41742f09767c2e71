"""The requests of OpenAI's API, checked by pydantic, and its error objects."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

MAX_CHOICES = 16  # per request
# no effect on text
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class ApiError(Exception):
    """An error that the client gets: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str = ""

    def for_template(self) -> dict[str, str]:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _StreamOptions(_Strict):
    include_usage: bool = False


class Request(_Strict):
    """A request for completions or, if it has `messages`, for chat completions."""

    model: str | None = None
    prompt: str = ""
    messages: list[_Message] = []
    truncation: Literal["auto", "disabled"] = "disabled"  # auto drops the oldest messages
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=1, lt=2**31)  # not in OpenAI's API; `sample` has it
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**62), ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        BeforeValidator(_as_list),
        Field(max_length=4),
    ] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, given: Any) -> Any:
        """null means the default, and a parameter that is not supported may have an empty value."""
        if not isinstance(given, dict):
            return given
        unknown = {name for name in given if name not in cls.model_fields}
        empty = {name for name in unknown if name in _IGNORED or not given[name]}
        return {k: value for k, value in given.items() if value is not None and k not in empty}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse_request(body: bytes, model: str, chat: bool) -> Request:
    """The request in a JSON body. Raises ApiError with the name of a wrong parameter.

    `model` is the name of the model that is served; a request may leave it out.
    """
    try:
        request = Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = [str(part) for part in first["loc"]]
        message = ": ".join([*where, first["msg"]])
        raise ApiError(400, message, where[0] if where else None) from None
    if request.model not in (None, model):
        message = f"model: {request.model!r:.60} does not exist; this server has {model!r} only"
        raise ApiError(404, message, "model", "model_not_found")
    text, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if not getattr(request, text) or getattr(request, other):
        raise ApiError(400, f"{text}: is missing, or {other} is given", text)
    return request
