"""The structure of the package: layers of imports, no import cycles, no catch-all modules."""

import ast
import graphlib
import re
from pathlib import Path

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
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(TREES[path]):
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


def test_private_modules_of_libraries_are_in_the_files_that_contributing_lists():
    listed = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in FILES:
        for node in ast.walk(TREES[path]):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            names = [alias.name for alias in node.names] if module else []
            if "._" in f".{module}" or any(name[:1] == "_" != name[-1] for name in names):
                assert f"`{path.relative_to(PACKAGE)}`" in listed, module


# Sizes of a recipe have GPT-2's names (config.model.n_positions); those of a model have
# transformers' names.
GPT2_CLASSES = {"GPTConfig", "GPTForCausalLM", "GPTModel", "GPT2Config", "GPT2LMHeadModel"}
GPT2_PARTS = {"transformer", "wte", "wpe"}
GPT2_SIZES = {"n_positions", "n_embd", "n_layer", "n_head"}
GPT2_FILES = {"export/gguf.py", "export/nanogpt.py"}  # formats that are GPT-2's only


def gpt2_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(TREES[path]):
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
