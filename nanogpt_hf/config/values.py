"""Values of knobs: YAML whose scalars stay text, and the conversion of text to a knob's type."""

import contextlib
import math
import re
import reprlib
from typing import Any

import yaml

from nanogpt_hf.config.schema import LARGEST, Knob, kind_options
from nanogpt_hf.errors import one_line

_WANTED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of names",
}
_WANTED[dict[str, Any]] = "a mapping such as {tie_word_embeddings: true}"
_WANTED[list[dict[str, Any]]] = "a list of sources"
_MAX_NODES = 100_000  # of a recipe with its aliases expanded
SHORT = reprlib.Repr()  # for wrong values: with aliases, a few lines of YAML stand for gigabytes
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict, SHORT.maxstring, SHORT.maxother = 2, 3, 3, 80, 80
_NOT_TEXT = re.compile(r"[\0\ud800-\udfff]")  # NUL and lone surrogates
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+")  # as messages write numbers: 491,520


class RecipeLoader(yaml.SafeLoader):
    """yaml.safe_load, except that scalars stay text, and a key that occurs twice is an error.

    `convert` then reads the text by the knob's type, as on the command line. YAML 1.1 would guess: it reads 6e-4 as
    text, 010 as eight, the revision 1.10 as 1.1 and `project: on` as true.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:
        sizes: dict[int, int] = {}  # of a node with its aliases expanded

        def size(node: yaml.Node) -> int:
            if id(node) not in sizes:
                sizes[id(node)] = _MAX_NODES + 1  # while it is counted, since a node may contain itself
                parts = node.value if isinstance(node, yaml.CollectionNode) else []
                parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
                sizes[id(node)] = 1 + sum(map(size, parts))
            return sizes[id(node)]

        if size(node) > _MAX_NODES:
            raise yaml.constructor.ConstructorError(None, None, "its aliases expand to too much", node.start_mark)
        return super().construct_document(node)


def _mapping(loader: RecipeLoader, node: yaml.MappingNode) -> dict:
    written = set()
    for key, _ in node.value:
        if str(key.value) in written:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value} occurs twice", key.start_mark)
        written.add(str(key.value))
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


RecipeLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_flow_list(text: str) -> list[Any]:
    """`a, "b, c", [d]` -> its values, read as a recipe reads them. Raises ValueError if it is no YAML."""
    try:
        return yaml.load(f"[{text}]", Loader=RecipeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(str(getattr(error, "problem", error)))) from None


def _flow_mapping(text: str) -> Any:
    try:
        return yaml.load(text, Loader=RecipeLoader)
    except (yaml.YAMLError, RecursionError):
        raise ValueError from None


def _typed(value: Any) -> Any:
    """The text in a tree from YAML as null, booleans, numbers or text, by YAML's later version 1.2."""
    if isinstance(value, dict):
        return {key: _typed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_typed(part) for part in value]
    for option in (type(None), bool, int, float):
        if isinstance(value, str) and not (option is int and not re.fullmatch(r"[+-]?\d+", value)):
            with contextlib.suppress(ValueError):
                return _as(option, value)
    return value


def _as(option: Any, value: Any) -> Any:
    """`value` (text, or a list or None from YAML) as a plain type or literal. Raises ValueError if it is not one."""
    if option is type(None):
        if value is None or (isinstance(value, str) and value.lower() in ("null", "none", "~")):
            return None
    elif option == dict[str, Any]:
        mapping = _flow_mapping(value) if isinstance(value, str) else value
        if isinstance(mapping, dict) and all(isinstance(key, str) for key in mapping):
            return _typed(mapping)
    elif option == list[dict[str, Any]]:  # its entries are checked where they are read (config/sources.py)
        if isinstance(value, str) and re.fullmatch(r"\[\s*\{.*\}\s*\]", value.strip(), re.DOTALL):
            return parse_flow_list(value.strip()[1:-1])
        if isinstance(value, list):
            return value
    elif option == list[str] and isinstance(value, list):
        if all(isinstance(part, str) for part in value):
            return value
    elif not isinstance(value, str):
        pass
    elif option == list[str]:
        return [part.strip() for part in value.strip("[]").split(",") if part.strip()]
    elif option is bool:
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif option is int:
        if _THOUSANDS.fullmatch(value):
            value = value.replace(",", "")
        with contextlib.suppress(ValueError):
            return int(value)  # first, because float() loses digits above 2**53
        if float(value).is_integer():
            return int(float(value))
    elif option is float:
        if math.isfinite(float(value)):
            return float(value)
    elif option is str or value == option:  # any text, or a literal
        return value
    raise ValueError


def convert(knob: Knob, value: Any) -> Any:
    """`value` (text from a recipe or the command line) as the knob's type, within its bounds.

    Raises ValueError with a message such as "expected an integer, got 'ten'".
    """
    options = kind_options(knob.kind)
    if knob.default == "":  # null leaves such a knob out, as it does one whose default is null
        options = (type(None), *options)
    for option in sorted(options, key=lambda option: option is str):  # str last, so that `null` is None
        try:
            result = _as(option, value)
            break
        except ValueError:
            continue
    else:
        plain = [_WANTED[o] for o in options if o in _WANTED]
        literal = [str(o) for o in options if o not in _WANTED and o is not type(None)]
        got = "nothing" if value is None else SHORT.repr(value)
        expected = [*plain, ", ".join(literal)] if literal else plain
        raise ValueError(f"expected {' or '.join(expected)}, got {got}")
    if result is None and knob.default == "":
        return ""
    if isinstance(result, int | float) and not isinstance(result, bool):
        high = LARGEST if knob.high is None and isinstance(result, int) else knob.high
        if knob.low is not None and result < knob.low:
            raise ValueError(f"must be at least {knob.low:g}, got {result!s:.40}")
        if high is not None and result > high:
            raise ValueError(f"must be at most {f'{high:,}' if isinstance(high, int) else high}, got {result!s:.40}")
    texts = result if isinstance(result, list) else [result]
    if any(isinstance(text, str) and _NOT_TEXT.search(text) for text in texts):
        raise ValueError(f"has a character that a file cannot contain: {SHORT.repr(value)}")
    return result
