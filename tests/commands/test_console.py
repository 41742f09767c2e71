"""Console output: log levels, ranks, progress bars, closed pipes, full disks."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from arguments import argv
from forked import Forked
from nanogpt_hf import console
from nanogpt_hf.commands import main
from nanogpt_hf.errors import Stopped, explain
from nanogpt_hf.own_files import log_once, notice_once
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder

LOGGER = logging.getLogger("nanogpt_hf.training.somewhere")


@pytest.mark.parametrize(
    ("log_level", "rank", "out", "err"),
    [
        (None, 0, ["info"], ["warning", "error"]),
        ("debug", 0, ["debug", "info"], ["warning", "error"]),
        ("warning", 0, [], ["warning", "error"]),
        (None, 3, [], ["warning", "error"]),
    ],
)
def test_log_level_and_rank_filter_messages(capsys, log_level, rank, out, err):
    start = f"[rank {rank}] " if rank else ""
    with console.configure_logging(log_level, rank):
        for level in ("debug", "info", "warning", "error"):
            getattr(LOGGER, level)(f"our {level}, 100 % of it")
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"our {level}, 100 % of it" for level in out]
    assert captured.err.splitlines() == [f"{start}our {level}, 100 % of it" for level in err]


@pytest.mark.parametrize("name", ["DeepSpeed", "huggingface_hub.utils._http"])
def test_useless_library_warnings_are_not_shown(monkeypatch, name):
    library = logging.getLogger(name)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    monkeypatch.setattr(library, "handlers", [handler])
    with console.configure_logging(None):
        # An import sets this level.
        library.setLevel(logging.WARNING)
        library.warning("no GPU")
        library.error("a defect")
    assert messages == ["a defect"]


def test_log_line_is_printed_above_a_progress_bar(capsys):
    with console.configure_logging(None), tqdm(total=3, file=sys.stderr, ncols=40) as bar:
        bar.update()
        LOGGER.info("a line")
        bar.update()
    captured = capsys.readouterr()
    assert captured.out == "a line\n"
    # the bar was erased before the line and drawn again after it
    assert "\r" + " " * 30 in captured.err
    assert captured.err.count("2/3") == 1


# --- closed pipes, full disks
# ----------------------------------------------------------------------------------------


def command(root, *arguments: object, out) -> subprocess.Popen:
    arguments = [sys.executable, "cli.py", *map(str, arguments)]
    return subprocess.Popen(arguments, stdout=out, stderr=subprocess.PIPE, text=True, cwd=root)


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


def test_result_into_closed_pipe_is_141_without_message(root):
    reading, writing = os.pipe()
    os.close(reading)
    process = command(root, "knobs", out=writing)
    os.close(writing)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


@needs_full
def test_result_onto_full_disk_is_one_line(root):
    with open("/dev/full", "w") as full_device:
        process = command(root, "knobs", out=full_device)
    assert process.communicate(timeout=60)[1] == "stdout: No space left on device\n"
    assert process.returncode == 2


@needs_full
def test_output_onto_full_disk_is_named():
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(Path("/dev/full"), {})
    assert explain(caught.value) == "/dev/full: No space left on device"


def test_closed_stdin_is_an_empty_one(root):
    """`<&-`: `chat` reads its questions from it."""
    script = (
        "import sys; from nanogpt_hf.console import survive_closed_streams\n"
        "survive_closed_streams()\n"
        "print(sys.stdin.fileno(), sys.stdin.isatty(), list(sys.stdin))"
    )
    words = ["sh", "-c", '"$@" <&-', "sh", sys.executable, "-c", script]
    assert subprocess.check_output(words, text=True, cwd=root) == "0 False []\n"


@pytest.mark.long
@needs_full
def test_run_survives_closed_stdout_and_full_disk_for_its_log(tmp_path, write_recipe):
    recipe = write_recipe(train__max_steps=2)
    reading, writing = os.pipe()
    os.close(reading)
    for number, out in enumerate((writing, os.open("/dev/full", os.O_WRONLY), None)):
        with (tmp_path / "stderr").open("w") as stderr:
            arguments = argv("pretrain {} --run-dir {}", recipe, tmp_path / str(number))
            process = Forked(arguments, streams={1: out, 2: stderr.fileno()})
            if out is not None:
                os.close(out)
            assert process.wait(120) == 0
        assert "Traceback" not in (tmp_path / "stderr").read_text()
        assert (tmp_path / str(number) / "final" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="controlling terminals are set up as on Linux")
def test_closed_terminal_saves_the_run(tmp_path, write_recipe):
    import pty

    run = RunFolder(tmp_path / "run")
    recipe = write_recipe(train__max_steps=1_000_000, checkpoint__every=1_000_000)
    ours, theirs = pty.openpty()
    process = Forked(
        argv("pretrain {} --run-dir {}", recipe, run.path), terminal=os.ttyname(theirs)
    )
    end = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 5,' in run.metrics.read_text()):
        assert process.poll() is None
        assert time.monotonic() < end
        os.read(ours, 100_000)
    os.close(theirs)
    os.close(ours)
    assert process.wait(60) == 75
    assert int(run.newest_checkpoint().name.removeprefix("step_")) >= 5
    assert run.report.exists()


def test_warning_about_a_command_is_printed_before_a_quiet_run_trains(
    write_recipe, monkeypatch, capsys
):
    def train(run):
        assert capsys.readouterr().err == "the recipe is damaged\n"
        raise Stopped("stopped")

    def prepare_run(*_, **__):
        notice_once("the recipe is damaged", logging.WARNING)

    log_once.cache_clear()
    monkeypatch.setattr("nanogpt_hf.training.start.prepare_run", prepare_run)
    monkeypatch.setattr("nanogpt_hf.training.loop.train", train)
    assert main(["pretrain", str(write_recipe()), "-q"]) == 75
