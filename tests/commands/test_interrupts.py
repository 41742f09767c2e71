"""Ctrl-C ends the program with one line and status 130, also while Python imports something."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nanogpt_hf
from nanogpt_hf.errors import EXIT_STOPPED
from nanogpt_hf.interrupts import EXIT_INTERRUPTED, ctrl_c_waits

ROOT = Path(__file__).resolve().parents[2]

# Runs the program in this process. At the import of each named module, and of every 40th one, a
# fork gets SIGINT; the program continues when the fork has ended. Writes how the forks ended: the
# module -> [status, output].
HARNESS = """
import json, os, runpy, signal, sys

program, named, out, *words = json.loads(sys.argv[1])
ended = {}
asked = 0

def interrupt(name):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        sys.meta_path.remove(Finder)
        os.kill(os.getpid(), signal.SIGINT)
        return
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as text:
        output = text.read()
    ended[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output]

class Finder:
    def find_spec(name, path=None, target=None):
        global asked
        # Until `__main__` has begun, Python's own handler is in force.
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            asked += 1
            if name in named or not asked % 40:
                interrupt(name)

sys.meta_path.insert(0, Finder)
sys.argv = [program, *words]
try:
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
finally:
    if Finder in sys.meta_path:
        with open(out, "w") as file:
            json.dump(ended, file)
"""

LIGHT = [
    "nanogpt_hf.interrupts",
    "nanogpt_hf.commands",
    "argparse",
    "yaml",
    "nanogpt_hf.config.load",
]
HEAVY = ["numpy", "numpy._core._multiarray_umath", "torch", "torch._C", "accelerate"]


def interrupted(folder: Path, program: str, modules: list[str], *words: object) -> dict:
    """How the program ended that was interrupted at these imports and at others."""
    out = folder / "ended.json"
    arguments = json.dumps([program, modules, str(out), *map(str, words)])
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    subprocess.run(
        [sys.executable, "-c", HARNESS, arguments],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        timeout=300,
        check=True,
    )
    return json.loads(out.read_text())


def check(ended: dict, modules: list[str]) -> None:
    assert set(modules) <= ended.keys()
    # Before the program has a handler of its own, nothing is printed.
    silent = [-signal.SIGINT, ""]
    assert ended.pop("nanogpt_hf.interrupts", silent) == silent
    expected = [EXIT_INTERRUPTED, "interrupted\n"]
    assert {name: end for name, end in ended.items() if end != expected} == {}


@pytest.mark.parametrize("program", [str(ROOT / "cli.py"), "nanogpt_hf", "nanogpt_hf.__main__"])
def test_ctrl_c_while_the_commands_are_imported(tmp_path, program):
    check(interrupted(tmp_path, program, LIGHT, "knobs"), LIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["estimate", "launch"])
def test_ctrl_c_while_libraries_are_imported(tmp_path, write_recipe, command):
    script = tmp_path / "script.py"
    script.touch()
    words = {"estimate": [write_recipe()], "launch": ["--cpu", "--num_processes", "1", script]}
    also = ["accelerate.commands.launch" if command == "launch" else "transformers"]
    ended = interrupted(tmp_path, str(ROOT / "cli.py"), HEAVY + also, command, *words[command])
    check(ended, HEAVY + also)
    assert len(ended) > 30


BEGIN = """
import atexit, os, signal, sys
from nanogpt_hf import __main__, commands, interrupts
from nanogpt_hf.commands import launch
def interrupt(number=signal.SIGINT): os.kill(os.getpid(), number)
"""
AT_WORK = "commands.entry_point = interrupt; __main__.run_program()"
TWICE = "commands.entry_point = interrupt; atexit.register(interrupt); __main__.run_program()"
AT_THE_END = "sys.argv[1:] = ['--version']; atexit.register(interrupt); __main__.run_program()"
# Python drops what is raised in these.
IN_A_DEL = "type('', (), {'__del__': interrupt})()"
IN_A_WEAKREF = "import weakref; x = {1}; y = weakref.ref(x, interrupt); del x"
IN_A_COLLECTION = "import gc; gc.callbacks.append(lambda *_: interrupt()); gc.collect()"
DROPPED = """
def drop(*_):
    {}
    import time; time.sleep(60)
def interrupt(*_): gc.callbacks.clear(); signal.raise_signal(signal.SIGINT)
import gc
commands.entry_point = drop; __main__.run_program()
"""
LINE = "interrupted\n"
VERSION = f"nanogpt_hf {nanogpt_hf.__version__}\n"


@pytest.mark.parametrize(
    ("script", "rank", "status", "output"),
    [
        (AT_WORK, "", EXIT_INTERRUPTED, LINE),
        (AT_WORK, "0", EXIT_INTERRUPTED, LINE),
        # one line per machine
        (AT_WORK, "1", EXIT_INTERRUPTED, ""),
        (AT_THE_END, "", EXIT_INTERRUPTED, VERSION + LINE),
        (TWICE, "", EXIT_INTERRUPTED, LINE),
        (DROPPED.format(IN_A_DEL), "", EXIT_INTERRUPTED, LINE),
        (DROPPED.format(IN_A_WEAKREF), "", EXIT_INTERRUPTED, LINE),
        (DROPPED.format(IN_A_COLLECTION), "", EXIT_INTERRUPTED, LINE),
        # the command that has started this one says it
        ("os.environ[interrupts.SAID_BY_PARENT] = '1';" + AT_WORK, "", EXIT_INTERRUPTED, ""),
        # a job in the background ignores Ctrl-C
        ("signal.signal(signal.SIGINT, signal.SIG_IGN);" + AT_WORK, "", 0, ""),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN);" + AT_THE_END, "", 0, VERSION),
        # before the processes of a launch are started
        ("launch._pass_signals_on(); interrupt()", "", EXIT_INTERRUPTED, LINE),
        ("launch._pass_signals_on(); interrupt(signal.SIGTERM)", "", EXIT_STOPPED, ""),
        # processes that were ended before they could print this
        ("sys.exit(launch._status({0: -15, 1: -15}, stopped=True))", "", EXIT_STOPPED, LINE),
        ("sys.exit(launch._status({0: 130, 1: -15}, stopped=True))", "", EXIT_STOPPED, ""),
        ("sys.exit(launch._status({0: 75, 1: 75}, stopped=True))", "", EXIT_STOPPED, ""),
    ],
)
def test_ctrl_c_at_other_moments(script, rank, status, output):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        env=os.environ | ({"LOCAL_RANK": rank} if rank else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (status, output)


def test_until_the_first_line_of_the_program_only_it_is_imported():
    """Python's own handler prints a traceback in that time."""
    script = """
import signal, sys
sys.argv[1:] = ["--version"]
asked = []
class Finder:
    def find_spec(name, path=None, target=None):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            asked.append(name)
sys.meta_path.insert(0, Finder)
from nanogpt_hf.__main__ import run_program
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "['nanogpt_hf', 'nanogpt_hf.__main__']\n", done.stderr


@pytest.mark.parametrize("words", [["cli.py"], ["-m", "nanogpt_hf"]])
def test_ctrl_c_waits_for_the_handler_of_a_program_that_is_started(words):
    with ctrl_c_waits():
        process = subprocess.Popen(
            [sys.executable, *words, "--version"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (EXIT_INTERRUPTED, LINE)


def test_a_second_ctrl_c_waits_for_the_run_of_a_sweep(tmp_path):
    """The run prints nothing, and its folder is not free before it has ended."""
    run = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, lambda *_: None); "
        "pathlib.Path('started').touch(); time.sleep(1); time.sleep(1); "
        "pathlib.Path('ended').write_text(os.environ['NANOGPT_HF_CTRL_C_SAID_BY_PARENT'])"
    )
    script = f"""
import os, pathlib, signal, sys, threading, time
from nanogpt_hf.distributed.signals import stop_on_signals
from nanogpt_hf.training.sweep import run_process
def twice():
    while not os.path.exists("started"): time.sleep(0.01)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
threading.Thread(target=twice).start()
with stop_on_signals(message="") as stop:
    try:
        run_process([sys.executable, "-c", {run!r}], stop)
    except KeyboardInterrupt:
        print(stop.reason, os.path.exists("ended") and open("ended").read())
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "received SIGINT 1\n", done.stderr


def test_two_ctrl_c_at_once_wait_for_the_run_of_a_sweep(tmp_path):
    """Both come before the sweep has looked whether it should stop."""
    run = (
        "import pathlib, time; pathlib.Path('started').touch(); time.sleep(1); "
        "pathlib.Path('ended').touch()"
    )
    script = f"""
import os, signal, sys
from types import SimpleNamespace
from nanogpt_hf.distributed.signals import stop_on_signals
from nanogpt_hf.training import sweep
def twice(seconds):
    if os.path.exists("started"):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
sweep.time = SimpleNamespace(sleep=twice)
with stop_on_signals(message="") as stop:
    try:
        sweep.run_process([sys.executable, "-c", {run!r}], stop)
    except KeyboardInterrupt:
        print(stop.reason, os.path.exists("ended"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "received SIGINT True\n", done.stderr


def test_a_terminal_has_the_line_below_its_mark():
    ours, theirs = os.openpty()
    with open(theirs, "wb") as terminal:
        done = subprocess.run([sys.executable, "-c", BEGIN + AT_WORK], stderr=terminal, cwd=ROOT)
    # the terminal's own ^C has no end of line
    assert (done.returncode, os.read(ours, 100)) == (EXIT_INTERRUPTED, b"\r\ninterrupted\r\n")
    os.close(ours)
