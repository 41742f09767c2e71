"""Draw the imports between packages in CONTRIBUTING.md as a mermaid graph; `make docs` runs it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGE = ROOT / "nanogpt_hf"
BEGIN = "<!-- What follows is written by docs/structure.py (`make docs`). -->\n"
END = "<!-- End of what is written. -->\n"


def imported_rooms(path: Path) -> set[str]:
    """The packages and single modules of nanogpt_hf that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}.")}


def imports_of_rooms() -> dict[str, set[str]]:
    """The rooms that each room imports; the entry points `__init__` and `__main__` are left out."""
    rooms: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        rooms.setdefault(room, set()).update(imported_rooms(path) - {room})
    return {room: rooms[room] & rooms.keys() for room in rooms if not room.startswith("__")}


def below(room: str, rooms: dict[str, set[str]]) -> set[str]:
    """All rooms that a room imports, directly or not."""
    return rooms[room].union(*(below(other, rooms) for other in rooms[room]))


def graph() -> str:
    """The graph; an import that follows from others is left out."""
    rooms = imports_of_rooms()
    lines = []
    for room, imported in rooms.items():
        indirect = set().union(*(below(other, rooms) for other in imported))
        lines += [f"  {room} --> {other}" for other in sorted(imported - indirect)]
    return "\n".join(["", "```mermaid", "graph TD", *lines, "```", "", ""])


def updated() -> str:
    """CONTRIBUTING.md with what is between its two marks replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + graph() + END + after


if __name__ == "__main__":
    PAGE.write_text(updated(), encoding="utf-8")
