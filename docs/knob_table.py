"""Write the table of knobs in docs/recipes.md from config/schema.py: `make docs`."""

from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import KNOBS, Knob, kind_options

PAGE = Path(__file__).with_name("recipes.md")
BEGIN = "<!-- The tables below are written by docs/knob_table.py (`make docs`). -->\n"
END = "<!-- End of the tables. -->\n"


def _default(value: Any) -> str:
    match value:
        case None | [] | "":
            return ""
        case dict():
            return f"`{value}`" if value else ""
        case bool():
            return f"`{str(value).lower()}`"
        case list():
            return f"`{', '.join(value)}`"
        case _:
            return f"`{value}`"


def _values(knob: Knob) -> str:
    """The types and literals that a knob accepts, and its bounds."""
    options = [option for option in kind_options(knob.kind) if option is not type(None)]
    words = [f"`{option}`" if isinstance(option, str) else _type_name(option) for option in options]
    if float in options and knob.low is not None and knob.high is not None:
        words[0] += f" {knob.low:g} to {knob.high:g}"
    elif knob.low is not None:
        words[0] += f" ≥ {knob.low:g}"
    return ", ".join(words)


def _type_name(option: Any) -> str:
    return {list[str]: "list", dict[str, Any]: "mapping"}.get(option) or option.__name__


def knob_tables() -> str:
    """One Markdown table per section of the schema: knob, default, values, meaning."""
    lines, section = [], ""
    for knob in KNOBS.values():
        if knob.key.partition(".")[0] != section:
            section = knob.key.partition(".")[0]
            lines += ["", f"### {section}", "", "| knob | default | values | meaning |", "|---|---|---|---|"]
        meaning = knob.meaning.replace("|", "\\|")
        lines.append(f"| `{knob.key}` | {_default(knob.default)} | {_values(knob)} | {meaning} |")
    return "\n".join([*lines, "", ""])


def updated(page: str) -> str:
    """The page with the tables between its two marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + knob_tables() + END + after


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
