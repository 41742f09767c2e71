"""The structure of the package: layers of imports, no import cycles, no catch-all modules; and the
division of tables between `make test` and `make test-ci`.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
# From the bottom up. A package imports only what is before it in this list, the table of PAGE.
_rows = re.findall(
    r"^\| (`.*?) \|",
    PAGE.read_text(encoding="utf-8").split("## Structure")[1].split("\n\n")[2],
    re.MULTILINE,
)
LAYERS = [*re.findall(r"`(\w+)(?:/|\.py)`", " ".join(_rows))[::-1], "__main__"]
PACKAGE = Path(__file__).parents[1] / "nanogpt_hf"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path.parent / "__init__.py") + "." if node.level else ""
            module = package + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names & MODULES - {"nanogpt_hf", module_name(path)}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def test_every_package_has_a_layer():
    assert {module.split(".")[1] for module in MODULES - {"nanogpt_hf"}} == set(LAYERS)


def test_imports_only_lower_layers():
    for path in set(FILES) - {PACKAGE / "__init__.py"}:
        package = module_name(path).split(".")[1]
        for imported in imports(path):
            below = layer(imported) < layer(module_name(path))
            assert below or imported.split(".")[1] == package, f"{path.name} imports {imported}"


def test_no_import_cycles():
    graph = {module_name(path): imports(path) for path in FILES}
    assert sum(map(len, graph.values())) > 40
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_tilde_is_expanded_by_a_path():
    # Path.expanduser raises a RuntimeError for the ~ of an unknown user; os.path's leaves it.
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr == "expanduser":
                assert ast.unparse(node) == "os.path.expanduser", path.name


def test_files_saved_with_a_model_import_only_each_other():
    saved = sorted((PACKAGE / "model").glob("*_gpt.py"))
    assert [path.stem for path in saved] == [
        "configuration_gpt",
        "head_gpt",
        "layout_gpt",
        "loss_gpt",
        "modeling_gpt",
    ]
    for path in saved:
        assert "nanogpt_hf." not in "".join(
            line for line in path.read_text().splitlines() if "import" in line
        )


def is_private(name: str) -> bool:
    return name.startswith("_") and name.isidentifier() and not name.endswith("_")


@functools.cache
def defined_names(path: Path) -> set[str]:
    """The names that a file defines itself: functions, classes, variables, fields of `self`."""
    names = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


@functools.cache
def all_defined_names() -> set[str]:
    return set().union(*map(defined_names, FILES))


# Underscores of Python's own that are documented.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}


def library_privates(path: Path) -> set[str]:
    """The private names of libraries that a file uses.

    Fields of `self` may be inherited from another file, and what a string names, such as a function
    that is replaced, may be defined in another file. Every other private name that the file does
    not define itself is a library's, also if another file defines one of this name.
    """
    used = set()
    inherited = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                used |= {*module.split("."), *(alias.name for alias in aliases)}
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                inherited.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]):
                inherited.add(name)
            case ast.Tuple(elts=[ast.Name(), ast.Constant(value=str(name))]):
                inherited.add(name)
    names = used - defined_names(path) | inherited - all_defined_names()
    return {*filter(is_private, names)} - DOCUMENTED


def rows_of_private_names() -> list[tuple[set[str], set[str]]]:
    """The files and the private names of each row of PAGE's table."""
    table = PAGE.read_text(encoding="utf-8").split("## Private names")[1].split("\n## ")[0]
    rows = [
        line.split("|") for line in table.splitlines() if line.startswith("|") and ".py`" in line
    ]
    return [
        (
            {*re.findall(r"`([\w/]+\.py)`", row[2])},
            {*filter(is_private, re.findall(r"`(\w+)`", row[3]))},
        )
        for row in rows
    ]


def test_private_names_of_libraries_are_listed_with_their_files():
    listed = {
        (file, name) for files, names in rows_of_private_names() for file in files for name in names
    }
    used = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in FILES
        for name in library_privates(path)
    }
    assert len(used) > 40
    assert used <= listed, used - listed
    # An overridden method is defined here, so it is no use that library_privates finds.
    assert not {
        (file, name) for file, name in listed - used if name not in defined_names(PACKAGE / file)
    }


# Sizes of a recipe have GPT-2's names (config.model.n_positions); those of a model have
# transformers' names.
GPT2_CLASSES = {"GPTConfig", "GPTForCausalLM", "GPTModel", "GPT2Config", "GPT2LMHeadModel"}
GPT2_PARTS = {"transformer", "wte", "wpe"}
GPT2_SIZES = {"n_positions", "n_embd", "n_layer", "n_head"}
GPT2_FILES = {"export/gguf.py", "export/nanogpt.py"}  # formats that are GPT-2's only


def gpt2_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names} & GPT2_CLASSES
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            is_size = node.attr in GPT2_SIZES and owner not in ("model", "section")
            names |= {node.attr} if node.attr in GPT2_CLASSES | GPT2_PARTS or is_size else set()
    return names


def test_only_model_and_gpt2_formats_name_gpt2():
    outside = [path for path in FILES if path.parent not in (PACKAGE, PACKAGE / "model")]
    naming = {str(path.relative_to(PACKAGE)) for path in outside if gpt2_names(path)}
    assert naming == GPT2_FILES, "ask model/architecture.py"


class Row:
    """What the division of tables reads of a collected test."""

    def __init__(self, mark: pytest.Mark, **values: str):
        self.nodeid = f"test_table[{'-'.join(values.values())}]"
        self.callspec = SimpleNamespace(params=values)
        self.mark = mark
        self.is_slow = False

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark if name == "one_row_per" else None

    def add_marker(self, name: str) -> None:
        assert name == "slow"
        self.is_slow = True


@pytest.mark.parametrize(
    ("mark", "quick"),
    [
        (pytest.mark.one_row_per, ["rl plain"]),
        (pytest.mark.one_row_per("method"), ["rl plain", "align plain"]),
        (pytest.mark.one_row_per("method", "layout"), ["rl plain", "rl tp", "align plain"]),
        (pytest.mark.one_row_per(layout=len), ["rl plain", "rl tp"]),
    ],
    ids=["table", "parameter", "parameters", "function"],
)
def test_one_row_of_each_kind_is_not_slow(pytestconfig, mark, quick):
    plugins = pytestconfig.pluginmanager.get_plugins()
    conftest = next(each for each in plugins if hasattr(each, "leave_one_row_of_each"))
    table = ["rl plain", "rl tp", "align plain", "align tp"]
    rows = [
        Row(mark.mark, **dict(zip(("method", "layout"), row.split(), strict=True))) for row in table
    ]
    conftest.leave_one_row_of_each(rows)
    assert [name for name, row in zip(table, rows, strict=True) if not row.is_slow] == quick
