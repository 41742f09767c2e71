"""The schema of a recipe for readers: JSON, and the table of knobs in `--help`."""

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


def knob_lines() -> list[str]:
    """The table of knobs in `--help`: name, meaning, choices and default, by section."""
    lines = []
    for section, knobs in groupby(knob_schema().items(), lambda item: item[0].partition(".")[0]):
        lines += ["", f"{section}:"]
        for key, knob in knobs:
            choices = f" [{'|'.join(knob['choices'])}]" if len(knob["choices"]) > 1 else ""
            default = "" if knob["default"] in (None, "") else f" (default {knob['default']})"
            lines.append(f"  --{key:<32} {knob['meaning']}{choices}{default}")
    return lines[1:]
