"""JSON schema of recipes, with which editors complete and check them."""

from typing import Any

from nanogpt_hf.config.schema import SECTIONS, knob_schema, section_summary

# types of knobs -> JSON's
_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "null": "null",
    "list": "array",
    "mapping": "object",
}


def recipe_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a recipe: sections, and for each knob its types, choices,
    bounds, default and meaning.

    It knows one knob at a time; rules over several are checked by `--dry-run`.
    """
    sections: dict[str, Any] = {
        name: {
            "type": "object",
            "description": section_summary(name),
            "additionalProperties": False,
            "properties": {},
        }
        for name in SECTIONS
    }
    for key, facts in knob_schema().items():
        section, _, name = key.partition(".")
        sections[section]["properties"][name] = _knob(facts)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of nanogpt_hf",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
    }


def _knob(facts: dict[str, Any]) -> dict[str, Any]:
    """The schema of a knob. A knob with choices may have other types, too: a number or `auto`."""
    types = [_TYPES[kind] for kind in facts["types"]]
    described: dict[str, Any] = {"description": facts["meaning"], "default": facts["default"]}
    ways: list[dict[str, Any]] = []
    if types:
        values: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
        # Bounds of JSON hold for numbers only, so a knob of numbers or null can have them.
        if facts["low"] is not None:
            values["minimum"] = facts["low"]
        if facts["high"] is not None:
            values["maximum"] = facts["high"]
        ways.append(values)
    if facts["choices"]:
        ways.append({"enum": facts["choices"]})
    return described | (ways[0] if len(ways) == 1 else {"anyOf": ways})
