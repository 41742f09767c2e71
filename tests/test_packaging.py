"""The wheel works outside a checkout; pyproject.toml declares every import."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanogpt_hf

ROOT = Path(__file__).parents[1]
SHIPPED = ("recipes", "accelerate_configs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# imports with another name than their package
PACKAGE_OF = {"tiktoken_ext": "tiktoken", "yaml": "pyyaml"}
TEST_EXTRAS = ("test-quick", "test", "types", "site")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel of a copy of the repository, unpacked into a folder."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nanogpt_hf", *SHIPPED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    completed = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr
    assert "Warning" not in completed.stderr
    with zipfile.ZipFile(source / "dist" / completed.stdout.split()[-1]) as wheel:
        wheel.extractall(target)
    return target


def run(installed: Path, folder: Path, command: str) -> str:
    """Run a shell command in `folder` with the unpacked wheel and no checkout on the path;
    return its output.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, f"{command}\n{completed.stderr}"
    return completed.stdout


@pytest.mark.long
def test_wheel_holds_every_shipped_file(installed):
    for folder in ("nanogpt_hf", *SHIPPED):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        files = {path for path in files if "__pycache__" not in path.parts}
        assert len(files) > 10
        user_folder = installed if folder == "nanogpt_hf" else installed / "nanogpt_hf"
        assert all(
            (user_folder / path).read_bytes() == (ROOT / path).read_bytes() for path in files
        )
    assert not (installed / "tests").exists()


@pytest.mark.long
def test_wheel_works_outside_a_checkout(installed, tmp_path):
    location = "import nanogpt_hf; print(nanogpt_hf.__file__)"
    assert Path(run(installed, tmp_path, f'python -c "{location}"').strip()).is_relative_to(
        installed
    )
    script = (
        "import sys, importlib.metadata as m; d = m.distribution('nanogpt_hf'); sys.argv[1:] = "
        "['--help'];"
        "print(d.version, flush=True); (program,) = d.entry_points.select(name='nanogpt-hf'); "
        "program.load()()"
    )
    version, help_page = run(installed, tmp_path, f'python -c "{script}"').split("\n", 1)
    assert version == nanogpt_hf.__version__
    assert "pretrain" in help_page
    verdict = (
        "from nanogpt_hf.config.load import load_config; from nanogpt_hf.reports.reference import "
        "find_reference;"
        "print(find_reference(load_config('quickstart')).name)"
    )
    assert run(installed, tmp_path, f'python -c "{verdict}"') == "quickstart\n"


def imported(*files: Path) -> set[str]:
    """The packages outside the standard library that files import, also inside functions."""
    names = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    names -= {*sys.stdlib_module_names, "nanogpt_hf"}
    return {canonicalize_name(PACKAGE_OF.get(name, name)) for name in names}


def declared(*extras: str) -> dict[str, Requirement]:
    """The requirements of the package, or of these extras and the extras that they include."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    requirements = {}
    for need in map(Requirement, lines if extras else PROJECT["dependencies"]):
        if need.name == "nanogpt_hf":
            requirements |= declared(*need.extras)
        else:
            requirements[canonicalize_name(need.name)] = need
    return requirements


def test_imports_and_declared_dependencies_match():
    features = [extra for extra in PROJECT["optional-dependencies"] if extra not in TEST_EXTRAS]
    package = imported(*(ROOT / "nanogpt_hf").rglob("*.py"))
    assert package <= declared().keys() | declared(*features).keys()
    assert declared().keys() <= package
    tests = list((ROOT / "tests").rglob("*.py"))
    scripts = (ROOT / "docs").glob("*.py")
    # a harness imports another one
    ours = {canonicalize_name(path.stem) for path in (*tests, *scripts)}
    assert imported(*tests) - ours <= declared().keys() | declared("test").keys()


def test_constraints_pin_all_test_dependencies_within_range():
    lines = [
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    ]
    pins = {canonicalize_name(name): version for name, version in lines}
    needs = declared() | declared("types")
    assert len(needs) > 25
    assert not {
        name for name, need in needs.items() if not need.specifier.contains(pins.get(name, "0"))
    }
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {package for hook in hooks for package in hook["additional_dependencies"]} == {
        f"ruff=={pins['ruff']}"
    }
