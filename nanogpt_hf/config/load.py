"""Load a recipe and command-line overrides into a checked Config, and write a Config as a recipe."""

import contextlib
import dataclasses
import logging
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogpt_hf.config.checks import find_conflicts
from nanogpt_hf.config.dial import DIAL_INPUTS, dial_choices
from nanogpt_hf.config.schema import (
    KNOBS,
    LARGEST,
    REMOVED_KNOBS,
    SECTIONS,
    Config,
    Knob,
    kind_options,
    replace_knobs,
)
from nanogpt_hf.config.shipped import find_recipe, shipped_recipes
from nanogpt_hf.errors import ConfigError, did_you_mean, one_line

logger = logging.getLogger(__name__)

_WANTED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of names",
}
_WANTED[dict[str, Any]] = "a mapping such as {tie_word_embeddings: true}"
_LARGEST_RECIPE = 1_000_000  # characters
_MAX_NODES = 100_000  # of a recipe with its aliases expanded
_SHORT = reprlib.Repr()  # for wrong values: with aliases, a few lines of YAML stand for gigabytes
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 3, 3, 80, 80
_NOT_TEXT = re.compile(r"[\0\ud800-\udfff]")  # NUL and lone surrogates
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+")  # as messages write numbers: 491,520


class _RecipeLoader(yaml.SafeLoader):
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


def _mapping(loader: _RecipeLoader, node: yaml.MappingNode) -> dict:
    written = set()
    for key, _ in node.value:
        if str(key.value) in written:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value} occurs twice", key.start_mark)
        written.add(str(key.value))
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_RecipeLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_flow_list(text: str) -> list[Any]:
    """`a, "b, c", [d]` -> its values, read as a recipe reads them. Raises ValueError if it is no YAML."""
    try:
        return yaml.load(f"[{text}]", Loader=_RecipeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(str(getattr(error, "problem", error)))) from None


def _flow_mapping(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_RecipeLoader)
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
        got = "nothing" if value is None else _SHORT.repr(value)
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
        raise ValueError(f"has a character that a file cannot contain: {_SHORT.repr(value)}")
    return result


def _read_recipe(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The dotted keys and values of a recipe, and its errors of structure."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST_RECIPE + 1)
        if len(text) > _LARGEST_RECIPE:
            raise ConfigError([f"{path}: longer than {_LARGEST_RECIPE:,} characters, so it is not a recipe"])
        tree = yaml.load(text, Loader=_RecipeLoader)
    except FileNotFoundError:
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("[!.]*.y*ml")) if path.parent.is_dir() else ())
        near = near or did_you_mean(path.stem, shipped_recipes())
        raise ConfigError([f"{path}: no such recipe{near}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"{path}: cannot be read as a recipe: {reason}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = one_line(str(getattr(error, "problem", error)))
        raise ConfigError([f"{path}: {line}not valid YAML: {reason}"]) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected sections ({', '.join(SECTIONS)}), got {type(tree).__name__}"])
    values, problems = {}, []
    for section, body in tree.items():
        if section not in SECTIONS:
            near = did_you_mean(section, SECTIONS) if isinstance(section, str) else ""
            problems.append(f"{path}: {section!s:.80}: unknown section{near}")
        elif body is not None and not isinstance(body, dict):
            problems.append(f"{path}: {section}: expected knobs under it, got {_SHORT.repr(body)}")
        else:
            values |= {f"{section}.{name}": value for name, value in (body or {}).items()}
    return values, problems


def recipe_name(path: Path) -> str:
    """`recipes/gpt2_124m.yaml` -> gpt2_124m; a run folder's own recipe.yaml is named after its folder."""
    name = path.resolve().parent.name if path.stem == "recipe" else path.stem
    if name.strip(".") == "":
        raise ConfigError([f"{path}: a run named after this file would have no name; rename the recipe"])
    return name


def stated_knobs(recipe: Path | str | None, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Dotted key -> value as the recipe or the command line states it, unchecked.

    Raises ConfigError if the recipe cannot be read.
    """
    return (_read_recipe(find_recipe(recipe))[0] if recipe else {}) | dict(overrides)


def load_config(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]] | Mapping[str, Any] = (),
    defaults: dict[str, Any] | None = None,
    name: str = "",
) -> Config:
    """Read a recipe, apply `overrides` to it, and check the result. Unstated knobs have `defaults`, or the schema's.

    `overrides` are pairs of dotted key and text, or a mapping such as {"train.max_steps": 200}.

    `model.depth` chooses other knobs (config/dial.py). A recipe that states the depth overrides its choices by what
    else it states; `overrides` always do.

    `recipe` is a file, or the name of a shipped recipe such as quickstart. Without a recipe, the config has `name`.

    Raises ConfigError with every problem: unknown keys, wrong types, values out of bounds, values that conflict. A rule
    over several knobs is not applied if one of them has a problem already.
    """
    recipe = find_recipe(recipe) if recipe else None
    if isinstance(overrides, Mapping):
        as_text = {key: str(value) for key, value in overrides.items() if not isinstance(value, list | dict | None)}
        overrides = list((dict(overrides) | as_text).items())
    stated, problems = _read_recipe(recipe) if recipe else ({}, [])
    values, bad = dict(defaults or {}), set()
    origins = {}
    overriding = {key for key, _ in overrides}  # knobs that override the size dial
    for origin, pairs in ((f"{recipe}: ", stated.items()), ("--", overrides)):
        if origin == "--" and values.get("model.depth") is not None:
            overriding |= set(stated)
        for key, value in pairs:
            if key in REMOVED_KNOBS:
                default, remedy = REMOVED_KNOBS[key]
                if origin == "--":
                    problems.append(f"{origin}{key}: no longer exists; {remedy}")
                elif value not in (default, str(default)):
                    logger.warning(f"{origin}{key}: no longer exists and is ignored; {remedy}")
                continue
            if (mapping := key.rpartition(".")[0]) in KNOBS and KNOBS[mapping].kind == dict[str, Any]:
                # --model.extra.NAME VALUE sets one field of the mapping
                key, value = mapping, values.get(mapping, {}) | {key.rpartition(".")[2]: value}
            if key not in KNOBS:
                problems.append(f"{origin}{key}: unknown key{did_you_mean(key, KNOBS)}")
                continue
            origins[key] = origin
            bad.discard(key)
            try:
                values[key] = convert(KNOBS[key], value)
            except ValueError as error:
                problems.append(f"{origin}{key}: {error}")
                bad.add(key)
    config = replace_knobs(Config(name=recipe_name(recipe) if recipe else name), values)
    if (depth := config.model.depth) is not None and not bad & DIAL_INPUTS:
        try:
            chosen = dial_choices(config, depth, overriding)
            config = replace_knobs(config, {choice.key: choice.value for choice in chosen} | {"model.depth": None})
            config = dataclasses.replace(config, dial=chosen)
            origins |= {choice.key: origins["model.depth"] for choice in chosen if choice.key not in overriding}
        except ValueError as error:
            problems.append(f"{origins['model.depth']}model.depth: {error}")
            bad |= set(KNOBS)  # the knobs are not chosen yet: skip the rules over them
    for conflict in find_conflicts(config):
        if not bad & set(conflict.keys):
            key = conflict.keys[0]
            origin = origins.get(key, f"{recipe}: " if recipe else "--")
            problems.append(f"{origin}{key}: {conflict.message}")
    if problems:
        raise ConfigError(problems)
    resolved = {
        "data.dir": os.path.expanduser(config.data.dir or f"data/{config.name}"),
        "data.tokenizer": os.path.expanduser(config.data.tokenizer),
    }
    if config.model.architecture == "gpt2" and config.model.init == "own":
        resolved["model.init"] = "gpt2"
    return replace_knobs(config, resolved)


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> knob -> value, every knob resolved."""
    return {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS}


def config_to_yaml(config: Config) -> str:
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def knob_lines() -> list[str]:
    """The table of knobs in `--help`: name, meaning, choices and default, by section."""
    lines, section = [], ""
    for key, knob in KNOBS.items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"{section}:"]
        literals = [str(o) for o in kind_options(knob.kind) if isinstance(o, str)]
        choices = f" [{'|'.join(literals)}]" if len(literals) > 1 else ""
        default = "" if knob.default in (None, "") else f" (default {knob.default})"
        lines.append(f"  --{key:<32} {knob.meaning}{choices}{default}")
    return lines[1:]
