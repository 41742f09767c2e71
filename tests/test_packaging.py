"""The wheel holds what a user needs outside a checkout; pyproject.toml declares what the package imports."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nanogpt_hf

ROOT = Path(__file__).parents[1]
SHIPPED = ("recipes", "accelerate_configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel of a copy of the repository, unpacked into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nanogpt_hf", *SHIPPED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    with zipfile.ZipFile(source / "dist" / done.stdout.split()[-1]) as wheel:
        wheel.extractall(target)
    return target


def run(installed: Path, folder: Path, command: str) -> str:
    """What a shell command prints in `folder`, where python and accelerate know the unpacked wheel and no checkout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
def test_the_wheel_holds_every_file_that_ships(installed):
    for folder in ("nanogpt_hf", *SHIPPED):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        files = {path for path in files if "__pycache__" not in path.parts}
        assert len(files) > 10
        home = installed if folder == "nanogpt_hf" else installed / "nanogpt_hf"
        assert all((home / path).read_bytes() == (ROOT / path).read_bytes() for path in files)
    assert not (installed / "tests").exists()


@pytest.mark.long
def test_the_wheel_works_outside_a_checkout(installed, tmp_path):
    where = "import nanogpt_hf; print(nanogpt_hf.__file__)"
    assert Path(run(installed, tmp_path, f'python -c "{where}"').strip()).is_relative_to(installed)
    script = (
        "import sys, importlib.metadata as m; d = m.distribution('nanogpt_hf'); sys.argv[1:] = ['--help'];"
        "print(d.version); (program,) = d.entry_points.select(name='nanogpt-hf'); program.load()()"
    )
    version, help_page = run(installed, tmp_path, f'python -c "{script}"').split("\n", 1)
    assert version == nanogpt_hf.__version__
    assert "pretrain" in help_page
    verdict = (
        "from nanogpt_hf.config.load import load_config; from nanogpt_hf.reports.reference import find_reference;"
        "print(find_reference(load_config('quickstart')).name)"
    )
    assert run(installed, tmp_path, f'python -c "{verdict}"') == "quickstart\n"


@pytest.mark.long
def test_the_readmes_commands_for_an_installed_package_are_right_as_far_as_a_dry_run_tells(installed, tmp_path):
    (block,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    commands = block.splitlines()
    assert len(commands) >= 3
    for command in commands:
        printed = run(
            installed,
            tmp_path,
            command.replace("nanogpt-hf ", "python -m nanogpt_hf ") + " --dry-run" * ("pretrain" in command),
        )
        assert "nothing was started" in printed or command.startswith("cp ")
    assert (tmp_path / "accelerate_configs" / "cpu.yaml").is_file()
