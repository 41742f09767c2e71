"""forks.py: files of tests in forks of one process, also if one of them dies."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import os, sys
from pathlib import Path

import pytest

from forks import pytest_addoption, pytest_runtestloop

(Path(__file__).parent / "collected").open("a").write(f"{os.getpid()}\\n")

@pytest.fixture(scope="module", autouse=True)
def of_a_file(request, tmp_path_factory):
    yield
    line = f"{request.module.__name__} {os.getpid()} {tmp_path_factory.getbasetemp().name}\\n"
    (Path(__file__).parent / "files").open("a").write(line)
"""
FILE = """
import os, time, warnings

import pytest

def test_one(capfd):
    os.write(1, b"one")
    assert capfd.readouterr().out == "one"

def test_two(tmp_path):
    print(f"printed by {__name__}")
    warnings.warn("a warning")
    if __name__ == "test_fails":
        time.sleep(0.5)  # meanwhile others read what they have printed
    assert __name__ != "test_fails"

def test_three():
    if __name__ == "test_dies":
        os._exit(5)

@pytest.mark.skip(reason="for a reason")
def test_four():
    pass

def test_five():
    pass
"""
NAMES = ("dies", "fails", "passes", "passes_too")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as on Linux")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name in NAMES:
        (folder / f"test_{name}.py").write_text(FILE)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--forks=2", "-rfs", *options],
        cwd=folder,
        env={"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_all_tests_are_reported_and_collected_once(tmp_path):
    done = run(tmp_path, "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert "2 failed, 14 passed, 4 skipped, 4 warnings" in last
    assert sorted(line for line in lines if line.startswith("FAILED")) == [
        "FAILED test_dies.py::test_three - the process that ran this test ended with status 5",
        "FAILED test_fails.py::test_two - AssertionError: assert 'test_fails' != 'test_fails'",
    ]
    # what a test has printed and its warnings, but for those of another one
    assert lines.count("printed by test_fails") == 1
    assert "printed by test_passes" not in done.stdout
    assert done.stdout.count("::test_five PASSED") == len(NAMES)
    assert done.stdout.count(": UserWarning: a warning") == 4
    (parent,) = (tmp_path / "collected").read_text().split()
    files = [line.split() for line in (tmp_path / "files").read_text().splitlines()]
    # each file in one process; what is left of the file in which one died is in another
    assert sorted(name for name, _, _ in files) == sorted(f"test_{name}" for name in NAMES)
    assert parent not in {process for _, process, _ in files}
    places = {(process, folder) for _, process, folder in files}
    assert len(places) == len({folder for _, folder in places}) == 2


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_it_stops_at_the_first_failure_if_asked(tmp_path, handler):
    """Also in a background job, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        done = run(tmp_path, "-x", "test_fails.py")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 warning in" in done.stdout
    assert "stopping after 1 failures" in done.stdout
