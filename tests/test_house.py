"""The structure of the package: layers of imports, no import cycles, short files, no catch-all modules."""

import ast
from pathlib import Path

import pytest

# From the bottom up. A package imports only what is before it in this list.
LAYERS = [
    "formatting",
    "errors",
    "cpu",
    "time_limit",
    "config",
    "model",
    "data",
    "tasks",
    "optim",
    "runs",
    "distributed",
    "generate",
    "completions",
    "serving",
    "evaluation",
    "reports",
    "export",
    "planning",
    "rl",
    "training",
    "doctor",
    "bench",
    "commands",
    "__main__",
]
PACKAGE = Path(__file__).parents[1] / "nanogpt_hf"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


@pytest.mark.parametrize("path", [f for f in FILES if f != PACKAGE / "__init__.py"], ids=module_name)
def test_imports_only_lower_layers(path):
    package = module_name(path).split(".")[1]
    for imported in imports(path):
        below = layer(imported) < layer(module_name(path))
        assert below or imported.split(".")[1] == package, f"{path.name} imports {imported}"


def test_no_import_cycles():
    modules = {module_name(path): imports(path) for path in FILES}
    assert sum(map(len, modules.values())) > 40

    def visit(module: str, importers: tuple[str, ...]) -> None:
        assert module not in importers, " -> ".join([*importers, module])
        for imported in modules.get(module, ()):
            visit(imported, (*importers, module))

    for module in modules:
        visit(module, ())


def test_model_and_schedule_do_not_import_accelerate():
    for path in [*(PACKAGE / "model").glob("*.py"), PACKAGE / "optim" / "schedule.py"]:
        assert "import accelerate" not in path.read_text()
        assert "from accelerate" not in path.read_text()


def test_files_saved_with_a_model_import_only_each_other():
    saved = sorted((PACKAGE / "model").glob("*_gpt.py"))
    assert [path.stem for path in saved] == ["configuration_gpt", "layout_gpt", "loss_gpt", "modeling_gpt"]
    for path in saved:
        assert "nanogpt_hf." not in "".join(line for line in path.read_text().splitlines() if "import" in line)


@pytest.mark.parametrize(
    ("name", "max_lines"), [("model/modeling_gpt.py", 300), ("training/loop.py", 200), ("../cli.py", 12)]
)
def test_files_stay_short(name, max_lines):
    assert len((PACKAGE / name).read_text().splitlines()) < max_lines


def test_no_catch_all_modules():
    catch_all = {"utils", "common", "helpers", "misc", "manager", "registry", "callbacks"}
    assert not [path for path in FILES if path.stem in catch_all]


# Sizes of a recipe have GPT-2's names (config.model.n_positions); those of a model have transformers' names.
GPT2_CLASSES = {"GPTConfig", "GPTForCausalLM", "GPTModel", "GPT2Config", "GPT2LMHeadModel"}
GPT2_PARTS = {"transformer", "wte", "wpe"}
GPT2_SIZES = {"n_positions", "n_embd", "n_layer", "n_head"}
GPT2_FILES = {"export/gguf.py", "export/nanogpt.py"}  # formats that are GPT-2's only


def gpt2_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names} & GPT2_CLASSES
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            is_size = node.attr in GPT2_SIZES and owner not in ("model", "section")
            names |= {node.attr} if node.attr in GPT2_CLASSES | GPT2_PARTS or is_size else set()
    return names


@pytest.mark.parametrize("path", [f for f in FILES if f.parent not in (PACKAGE, PACKAGE / "model")], ids=module_name)
def test_only_model_and_gpt2_formats_name_gpt2(path):
    if str(path.relative_to(PACKAGE)) in GPT2_FILES:
        assert gpt2_names(path)
    else:
        assert not gpt2_names(path), "ask model/architecture.py"
