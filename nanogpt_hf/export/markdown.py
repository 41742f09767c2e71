"""Markdown of the model card, in which no text of a run becomes markup."""

import re


def fact_table(facts: dict[str, str]) -> str:
    """A table of names and values, escaped here."""
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {escape(name)} | {escape(value)} |" for name, value in facts.items())]
    )


def escape(value: str) -> str:
    """Escape a string for one line of Markdown: no HTML, link, image or end of a table cell."""
    line = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(value.split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def inline_code(value: str) -> str:
    """A string as inline code, between more backticks than it contains, so that it cannot end the code."""
    line = " ".join(value.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{ticks} {line} {ticks}" if "`" in line else f"{ticks}{line}{ticks}"


def fenced(text: str, language: str) -> str:
    """A code block, between more backticks than it contains."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"
