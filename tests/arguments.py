"""Arguments of a command, written as they are typed."""

import shlex


def argv(line: str, *places: object) -> list[str]:
    """`argv("sample {} --top-k 3", folder)` -> ["sample", str(folder), "--top-k", "3"]."""
    values = iter(places)
    return [str(next(values)) if word == "{}" else word for word in shlex.split(line)]
