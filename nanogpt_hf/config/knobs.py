"""The schema of a recipe for readers: JSON, `--help`, the tables of docs/recipes.md."""

from itertools import groupby
from types import NoneType
from typing import Any, get_origin

from nanogpt_hf.config.schema import KNOBS, kind_options

_NAMES = {NoneType: "null", list: "list", dict: "mapping"}


def knob_schema() -> dict[str, dict[str, Any]]:
    """Every knob: its types, values that are names, default, inclusive bounds and meaning."""
    schema = {}
    for key, knob in KNOBS.items():
        options = kind_options(knob.kind)
        kinds = [get_origin(o) or o for o in options if not isinstance(o, str)]
        schema[key] = {
            "types": [_NAMES.get(kind) or kind.__name__ for kind in kinds],
            "choices": [option for option in options if isinstance(option, str)],
            "default": knob.default,
            "low": knob.low,
            "high": knob.high,
            "meaning": knob.meaning,
        }
    return schema


def _sections() -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    pairs = groupby(knob_schema().items(), key=lambda item: item[0].partition(".")[0])
    return [(section, list(knobs)) for section, knobs in pairs]


def knob_lines() -> list[str]:
    """The table of knobs in `--help`: name, meaning, choices and default, by section."""
    lines = []
    for section, knobs in _sections():
        lines += ["", f"{section}:"]
        for key, knob in knobs:
            choices = f" [{'|'.join(knob['choices'])}]" if len(knob["choices"]) > 1 else ""
            default = "" if knob["default"] in (None, "") else f" (default {knob['default']})"
            lines.append(f"  --{key:<32} {knob['meaning']}{choices}{default}")
    return lines[1:]


def knob_tables() -> str:
    """One Markdown table per section: knob, default, values, meaning."""
    lines = []
    for section, knobs in _sections():
        lines += ["", f"### {section}", ""]
        lines += ["| knob | default | values | meaning |", "|---|---|---|---|"]
        for key, knob in knobs:
            meaning = knob["meaning"].replace("|", "\\|")
            lines.append(f"| `{key}` | {_default(knob)} | {_values(knob)} | {meaning} |")
    return "\n".join([*lines, "", ""])


def _default(knob: dict[str, Any]) -> str:
    default = knob["default"]
    if default in (None, "", [], {}):
        return ""
    if isinstance(default, list):
        default = ", ".join(default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(knob: dict[str, Any]) -> str:
    """The types and names that a knob accepts, and its bounds."""
    kinds, low, high = knob["types"], knob["low"], knob["high"]
    words = [kind for kind in kinds if kind != "null"]
    words += [f"`{choice}`" for choice in knob["choices"]]
    if "float" in kinds and low is not None and high is not None:
        words[0] += f" {low:g} to {high:g}"
    elif low is not None:
        words[0] += f" ≥ {low:g}"
    return ", ".join(words)
