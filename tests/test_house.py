"""How the house stands: imports go down, the pages people read stay short, no drawers."""

import ast
from pathlib import Path

import pytest

# A floor may use those below it. What shares a floor may use each other as long as no circle results.
FLOORS = [
    {"errors", "config", "formatting", "cpu"},
    {"model", "data", "generate"},
    {"optim"},
    {"training", "runs", "distributed", "export", "evaluation", "reports", "bench", "planning", "doctor"},
    {"commands", "__main__"},
]
PACKAGE = Path(__file__).parents[1] / "nanogpt_hf"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = module_name(path.parent / "__init__.py") + "." if node.level else ""
            found.add(home + (node.module or ""))
    return {name for name in found if name.startswith("nanogpt_hf.")}


def floor(module: str) -> int:
    room = module.split(".")[1]
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_is_on_a_floor():
    rooms = {module_name(path).split(".")[1] for path in FILES if path != PACKAGE / "__init__.py"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("path", [f for f in FILES if f != PACKAGE / "__init__.py"], ids=module_name)
def test_imports_go_down_only(path):
    for imported in imports(path):
        assert floor(imported) <= floor(module_name(path)), f"{path.name} imports {imported}"


def test_no_circles():
    modules = {module_name(path): imports(path) for path in FILES}
    assert sum(map(len, modules.values())) > 40

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        for imported in modules.get(module, ()):
            if imported != module:
                visit(imported, (*above, module))

    for module in modules:
        visit(module, ())


def test_the_model_and_the_schedule_know_no_accelerate():
    for path in [*(PACKAGE / "model").glob("*.py"), PACKAGE / "optim" / "schedule.py"]:
        assert "import accelerate" not in path.read_text()
        assert "from accelerate" not in path.read_text()


def test_files_that_travel_with_a_model_import_nothing_of_ours_but_each_other():
    travelling = sorted((PACKAGE / "model").glob("*_gpt.py"))
    assert [path.stem for path in travelling] == ["configuration_gpt", "layout_gpt", "loss_gpt", "modeling_gpt"]
    for path in travelling:
        assert "nanogpt_hf." not in "".join(line for line in path.read_text().splitlines() if "import" in line)


@pytest.mark.parametrize(
    ("name", "most"), [("model/modeling_gpt.py", 300), ("training/loop.py", 200), ("../cli.py", 12)]
)
def test_pages_that_people_come_to_read_stay_short(name, most):
    assert len((PACKAGE / name).read_text().splitlines()) < most


def test_there_are_no_drawers():
    drawers = {"utils", "common", "helpers", "misc", "manager", "registry", "callbacks"}
    assert not [path for path in FILES if path.stem in drawers]
