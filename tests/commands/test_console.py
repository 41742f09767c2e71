"""What is printed: by level, by process, above a bar, and nothing of it left behind."""

import argparse
import io
import logging
import os
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager

import pytest
from tqdm import tqdm

from nanogpt_hf.commands import COMMANDS, console, main
from nanogpt_hf.runs.folder import RunFolder

OURS = logging.getLogger("nanogpt_hf.training.somewhere")


def say_everything() -> None:
    for level in ("debug", "info", "warning", "error"):
        getattr(OURS, level)(f"our {level}, 100 % of it")
    warnings.warn("something is old", FutureWarning, stacklevel=1)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("log_level", "out", "err"),
    [
        (None, ["info"], ["warning", "error", "old"]),
        ("debug", ["debug", "info"], ["warning", "error", "old"]),
        ("info", ["info"], ["warning", "error", "old"]),
        ("warning", [], ["warning", "error", "old"]),
        ("error", [], ["error"]),
    ],
)
def test_each_level_prints_itself_and_what_is_above_it(capsys, log_level, out, err):
    with console.configure_logging(log_level):
        say_everything()
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"our {level}, 100 % of it" for level in out]
    lines = said.err.splitlines()
    ours = [f"our {level}, 100 % of it" for level in err if level != "old"]
    assert lines[: len(ours)] == ours
    assert ("FutureWarning: something is old" in said.err) == ("old" in err)
    assert "[rank" not in said.out + said.err


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("log_level", [None, "debug"])
def test_other_processes_only_warn_and_give_their_rank(capsys, monkeypatch, log_level):
    monkeypatch.setenv("RANK", "3")
    library = logging.getLogger("a_library")
    handler = logging.StreamHandler(sys.stderr)
    library.addHandler(handler)
    with console.configure_logging(log_level):
        say_everything()
        library.warning("theirs: %s", "slow")
    library.removeHandler(handler)
    said = capsys.readouterr()
    assert said.out == ""
    for line in ("our warning, 100 % of it", "our error, 100 % of it", "theirs: slow"):
        assert f"[rank 3] {line}" in said.err.splitlines()
    assert any(line.startswith("[rank 3] ") and "something is old" in line for line in said.err.splitlines())
    assert not any(level in said.err for level in ("debug", "info"))


def test_the_libraries_get_the_level_only_when_it_is_given(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")  # what a user has set
    library = logging.getLogger("datasets")
    before = library.level
    with console.configure_logging(None):
        assert library.level == before
        assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "critical"
    with console.configure_logging("debug"):
        assert library.level == logging.getLogger("transformers").level == logging.DEBUG
        assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "debug"  # for those that are imported later
    assert library.level == before
    assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "critical"


@pytest.mark.parametrize(("log_level", "said"), [(None, False), ("warning", False), ("debug", True)])
def test_kernels_of_torchao_that_cannot_be_loaded_are_debugging(log_level, said):
    torchao = logging.getLogger("torchao")
    before = torchao.isEnabledFor(logging.WARNING)
    with console.configure_logging(log_level):
        assert torchao.isEnabledFor(logging.WARNING) == said
    assert torchao.isEnabledFor(logging.WARNING) == before


def test_logging_is_left_as_it_was(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    ours, factory, show = logging.getLogger("nanogpt_hf"), logging.getLogRecordFactory(), warnings.showwarning
    before = ours.level, list(ours.handlers)
    with pytest.raises(ZeroDivisionError), console.configure_logging("error"):
        _ = 1 / 0
    assert (ours.level, ours.handlers) == before
    assert (logging.getLogRecordFactory(), warnings.showwarning) == (factory, show)


def test_a_line_stands_above_a_live_bar(capsys):
    with console.configure_logging(None), tqdm(total=3, file=sys.stderr, ncols=40) as bar:
        bar.update()
        OURS.info("a line")
        bar.update()
    said = capsys.readouterr()
    assert said.out == "a line\n"
    # the bar was wiped from its line before, and drawn again after
    assert "\r" + " " * 30 in said.err
    assert said.err.count("2/3") == 1


def test_every_command_takes_the_options(capsys):
    for name in COMMANDS.keys() - {"launch"}:  # which hands them to the command
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert "-q, --quiet" in out, name
        assert "--log-level {debug,info,warning,error}" in out, name


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-q", "--log-level", "info"], "argument --log-level: not allowed with argument -q/--quiet"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, options, complaint):
    assert main(["prepare", "recipe.yaml", *options]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_quiet_is_the_level_warning():
    parser = argparse.ArgumentParser()
    console.add_arguments(parser)
    assert parser.parse_args(["-q"]) == parser.parse_args(["--log-level", "warning"])


# --- a reader that leaves, a disk that is full -----------------------------------------------------------------------


@contextmanager
def nobody_reads(monkeypatch):
    """sys.stdout and sys.stderr as pipes without a reader, after `survive_closed_pipes`."""
    streams = {}
    for name in ("stdout", "stderr"):
        reading, writing = os.pipe()
        os.close(reading)
        raw = io.FileIO(writing, "w")
        raw.name = f"<{name}>"
        streams[name] = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        monkeypatch.setattr(sys, name, streams[name])
    monkeypatch.setattr(logging, "raiseExceptions", True)
    console.survive_closed_pipes()
    try:
        yield
    finally:
        monkeypatch.undo()
    for stream in streams.values():
        stream.close()


def test_nobody_needs_to_read_the_log_the_warnings_and_the_bars(monkeypatch):
    with nobody_reads(monkeypatch), console.configure_logging("info"):
        for _ in range(3):
            OURS.info("a line")
            OURS.warning("a warning")
            tqdm.write("above the bar", file=sys.stderr)
        print("what comes after it goes nowhere", flush=True)


def test_a_library_that_logs_by_itself_prints_no_traceback(monkeypatch):
    with nobody_reads(monkeypatch):
        logging.StreamHandler(sys.stdout).handle(OURS.makeRecord("library", 30, "", 0, "a line", (), None))
        assert not logging.raiseExceptions


def test_an_answer_that_nobody_reads_ends_the_command_once(monkeypatch):
    with nobody_reads(monkeypatch):
        with pytest.raises(console.OutputLost) as lost:
            print("an answer", flush=True)
        assert console.status_of(lost.value) == 141
        print("and what cleans up may still say so", flush=True)
        assert console.flush() == 0


def test_why_a_command_ended_needs_no_reader(monkeypatch):
    with nobody_reads(monkeypatch):
        assert main(["pretain"]) == 2
        console.show_end("stopped")


def command(root, *words: object, out, **options) -> subprocess.Popen:
    arguments = [sys.executable, "cli.py", *map(str, words)]
    return subprocess.Popen(arguments, stdout=out, stderr=subprocess.PIPE, text=True, cwd=root, **options)


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")


@pytest.mark.parametrize("words", [["--help"], ["prepare", "--help"]])
def test_an_answer_without_a_reader_is_141_and_no_word(root, words):
    reading, writing = os.pipe()
    os.close(reading)
    process = command(root, *words, out=writing)
    os.close(writing)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


@needs_full
def test_an_answer_on_a_full_disk_is_one_line(root):
    with open("/dev/full", "w") as full:
        process = command(root, "--help", out=full)
    assert process.communicate(timeout=60)[1] == "stdout: cannot be written: No space left on device\n"
    assert process.returncode == 2


@needs_full
@pytest.mark.long
def test_a_run_needs_no_reader_and_no_room_for_its_log(root, tmp_path, write_recipe):
    recipe = write_recipe(train__max_steps=2)
    reading, writing = os.pipe()
    os.close(reading)
    for number, out in enumerate((writing, os.open("/dev/full", os.O_WRONLY))):
        process = command(root, "pretrain", recipe, "--run-dir", tmp_path / str(number), out=out)
        os.close(out)
        assert "Traceback" not in process.communicate(timeout=120)[1]
        assert process.returncode == 0
        assert (tmp_path / str(number) / "final" / "model.safetensors").exists()


IN_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests were started by nohup
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)  # the first that a session opens is its own
for descriptor in range(3):
    os.dup2(terminal, descriptor)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a session's terminal is taken as Linux does it")
@pytest.mark.long
def test_a_terminal_that_is_closed_makes_a_run_save(root, tmp_path, write_recipe):
    import pty

    run = RunFolder(tmp_path / "run")
    recipe = write_recipe(train__max_steps=1_000_000, checkpoint__every=1_000_000)
    ours, theirs = pty.openpty()
    words = [os.ttyname(theirs), "cli.py", "pretrain", str(recipe), "--run-dir", str(run.path)]
    with subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL, *words], cwd=root) as process:
        end = time.monotonic() + 120
        while not (run.metrics.exists() and '"step": 5,' in run.metrics.read_text()):
            assert process.poll() is None
            assert time.monotonic() < end
            os.read(ours, 100_000)
        os.close(theirs)
        os.close(ours)
        try:
            assert process.wait(timeout=60) == 75
        finally:
            process.kill()
    assert int(run.newest_checkpoint().name.removeprefix("step_")) >= 5
    assert run.report.exists()


USELESS = {
    "DeepSpeed": "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
    "transformers.modeling_utils": "GPTForCausalLM LOAD REPORT from: m",
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than the specified maximum",
}


@pytest.mark.parametrize("name", USELESS)
@pytest.mark.parametrize(("log_level", "useless"), [(None, False), ("warning", False), ("debug", True)])
def test_a_useless_warning_of_a_library_is_debugging_and_its_other_ones_are_not(name, log_level, useless):
    library, heard = logging.getLogger(name), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    with console.configure_logging(log_level):
        library.addHandler(handler)
        before, library.level = library.level, logging.WARNING  # as DeepSpeed sets it when it is imported
        library.warning(USELESS[name])
        library.warning("another")
        library.error(USELESS[name])
        library.removeHandler(handler)
        library.level = before
    assert heard == [USELESS[name]] * useless + ["another", USELESS[name]]
    assert not library.filters
