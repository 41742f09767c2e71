"""Tools that a model may call: the calculator, and Python functions of the user's own."""

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema

from nanogpt_hf.data.call_format import Call
from nanogpt_hf.errors import UserError, did_you_mean, is_utf8, one_line
from nanogpt_hf.tasks.calculator import calculator
from nanogpt_hf.tasks.own_modules import code_digest
from nanogpt_hf.tasks.user_code import UserCodeError, is_deferred, run_file, user_code

# Tools by the name that stands for them in `rl.tools`.
BUILT_IN = {"calculator": calculator}
# What functools.cache makes of a function.
_CACHED = type(cache(len))
_BY_POSITION = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}
# Characters of a result that are put into the conversation.
_LONGEST = 10_000


class ToolResult(NamedTuple):
    """What a call gave, as a text for the model."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tools:
    """The functions that a model may call, by their names."""

    functions: Mapping[str, Callable[..., Any]]
    # The chat template gets them in this form.
    schemas: list[dict[str, Any]]
    seconds: float  # the time limit of a call
    revision: str  # identifies the functions, so that a resumed run notices when they have changed

    def call(self, call: Call) -> ToolResult:
        """Call a function with the arguments that a model has written. Does not raise: an error is
        a result that the model reads.
        """
        function = call["function"]
        known = self.functions.get(function["name"])
        if known is None:
            names = ", ".join(self.functions)
            near = did_you_mean(function["name"], self.functions)
            return _failure(f"there is no tool {function['name']!r:.60}{near}; there are: {names}")
        try:
            with user_code(self.seconds):
                # The text of a result is made here, since it runs the user's code, too.
                # The conversation has the arguments, which the function may change.
                text = _text_of(known(**copy.deepcopy(function["arguments"])))
        except UserCodeError as error:
            return _failure(str(error))
        if not is_utf8(text):
            return _failure("returns half a character, which UTF-8 cannot encode")
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]} … (cut: {len(text):,} characters)"
        return ToolResult(text)


def _failure(reason: str) -> ToolResult:
    text = f"error: {reason}"
    return ToolResult(text if is_utf8(text) else ascii(text)[1:-1], failed=True)


def _text_of(value: Any) -> str:
    """A result as text: a text as it is, anything else as JSON."""
    if isinstance(value, str):
        return str.__str__(value)
    return json.dumps(value, ensure_ascii=False)


def load_tools(specs: Sequence[str], seconds: float, where: str = "rl.tools") -> Tools:
    """Load tools by their specifications: `calculator`, or a Python file whose functions are tools.

    A file is code of the user's own, never read from the Hub. Its tools are the functions that it
    defines, without a leading underscore, each with a docstring in Google's style and type hints,
    as transformers' `get_json_schema` reads them. Raises UserError if there is no such file, or a
    function cannot be a tool.
    """
    functions: dict[str, Callable[..., Any]] = {}
    revisions = []
    for spec in map(str.strip, specs):
        found, revision = _functions_of(spec, where)
        if twice := functions.keys() & found.keys():
            raise UserError(f"{where}: {spec}: there are two tools {min(twice)!r}; rename one")
        functions |= found
        revisions.append(revision)
    schemas = [_schema_of(name, function, where) for name, function in functions.items()]
    return Tools(functions, schemas, seconds, ", ".join(revisions))


def _functions_of(spec: str, where: str) -> tuple[dict[str, Callable[..., Any]], str]:
    if spec in BUILT_IN:
        return {spec: BUILT_IN[spec]}, f"{spec} 1"
    path = Path(os.path.expanduser(spec))
    if path.suffix != ".py":
        raise UserError(
            f"{where}: {spec!r:.80}: expected {', '.join(BUILT_IN)} or a Python file, such as "
            f"my_tools.py{did_you_mean(spec, BUILT_IN)}"
        )
    names = run_file(where, path)
    found = {
        name: value
        for name, value in names.items()
        if isinstance(name, str) and not name.startswith("_") and _is_defined_in(value, path)
    }
    if not found:
        raise UserError(f"{where}: {path}: defines no function without a leading underscore")
    return found, f"{spec} {code_digest(where, path)}"


def _is_defined_in(value: Any, path: Path) -> bool:
    """Whether a name of a file is a function that it defines, and not one that it imports."""
    function = value.__wrapped__ if isinstance(value, _CACHED) else value
    return inspect.isfunction(function) and function.__globals__.get("__file__") == str(path)


def _schema_of(name: str, function: Callable[..., Any], where: str) -> dict[str, Any]:
    """The description of a function for the model."""
    if is_deferred(function):
        raise UserError(f"{where}: {name}: is asynchronous or a generator; return the result")
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if kinds & _BY_POSITION:
        raise UserError(
            f"{where}: {name}: takes arguments by position; a model gives them by name, so leave "
            "out `/` and `*args`"
        )
    try:
        schema = get_json_schema(function)
        json.dumps(schema)
    # transformers' own errors, and what evaluating the type hints raises.
    except Exception as error:
        raise UserError(
            f"{where}: {name}: cannot be described to a model: {one_line(error, 200)}; give it a "
            "docstring with `Args:` that describes each argument, and type hints"
        ) from None
    # A model reads the name under which the function is found.
    schema["function"]["name"] = name
    return schema
