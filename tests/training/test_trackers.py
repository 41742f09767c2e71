"""What a run tells its trackers and machine.json, and that it goes on in the same tracker run."""

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import GeneralTracker

import nanogpt_hf
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.reports import live
from nanogpt_hf.runs import machine
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import read_starts
from nanogpt_hf.training.tracking import read_metrics

SECRET = "https://me:pa55word@localhost/x.txt?sig=5ignature"


class Notebook(GeneralTracker):
    """A tracker of nobody's: it keeps what it gets."""

    name = "notebook"
    requires_logging_directory = False
    books: list["Notebook"] = []  # noqa: RUF012

    def __init__(self, project: str):
        super().__init__()
        self.project, self.told, self.logged, self.closed = project, None, [], False
        Notebook.books.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.told = values

    def log(self, values, step=None, **options):
        self.logged.append((step, values))

    def finish(self):
        self.closed = True


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setitem(accelerate_tracking.LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "books", [])
    return Notebook


@pytest.fixture
def pretrain(tmp_path, write_recipe, forget_accelerate, monkeypatch):
    """`pretrain` of the tiny recipe in a terminal where the environment and the command line hold secrets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_TOKEN", "t0ken")
    monkeypatch.setattr(live, "draw_run", lambda *_: None)  # which takes most of a tiny run's time

    def run(*arguments: str, **overrides) -> RunFolder:
        forget_accelerate()
        words = ["pretrain", str(write_recipe(**overrides)), "--run-dir", "run", *arguments]
        monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py", *words, "--hub.license", SECRET])
        assert main(words) == 0
        return RunFolder(tmp_path / "run")

    return run


def test_a_tracker_gets_the_recipe_the_machine_and_what_the_metrics_hold(pretrain, notebook):
    run = pretrain(tracking__trackers=["notebook"], tracking__project="tiny", train__max_steps=3)
    (book,) = notebook.books
    assert book.project == "tiny"
    assert book.closed
    lines = [{k: v for k, v in event.items() if "/" in k} for event in read_metrics(run)]
    assert [values for _, values in book.logged] == lines
    assert [step for step, _ in book.logged] == [event["step"] for event in read_metrics(run)]
    (start,) = read_starts(run)
    assert book.told["model.n_embd"] == 16
    assert {f"start.{name}" for name in start if name not in ("versions", "data")} < set(book.told)
    assert book.told["start.versions.torch"] == start["versions"]["torch"]
    assert {name for name in book.told if not name.startswith("start.")} < set(KNOBS)
    assert all(isinstance(value, str | int | float | bool) for value in book.told.values())


def test_metrics_have_the_names_that_the_docs_list_and_sane_values(pretrain, root):
    events = read_metrics(pretrain(train__max_steps=2, tracking__layers=True))
    docs = (root / "docs" / "watching.md").read_text(encoding="utf-8")
    for name in {name for event in events for name in event}:
        assert f"`{re.sub(r'^layers/[^/]+', 'layers/<n>', name)}`" in docs, name
    trained = [event for event in events if "train/loss" in event]
    assert len(trained) == 2
    for event in trained:
        assert {name for name in event if not name.startswith("layers/")} == {
            "step",
            "tokens",
            "seconds",
            "train/loss",
            "train/learning_rate",
            "train/grad_norm",
            "train/clipped_share",
            "train/tokens_per_second",
            "train/data_wait",
            "train/memory_peak_bytes",
        }
        assert 0 < event["train/data_wait"] < 1
        assert event["train/clipped_share"] == float(event["train/grad_norm"] > 1)
        assert 2**26 < event["train/memory_peak_bytes"] < 2**40


def test_each_start_is_written_down_without_secrets(pretrain):
    run = pretrain(train__max_steps=2)
    pretrain("--resume", train__max_steps=4)
    text = run.machine.read_text()
    starts = json.loads(text)["starts"]
    assert starts == read_starts(run)
    assert [start["step"] for start in starts] == [0, 2]
    for start in starts:
        assert list(start) == [
            *(
                "step",
                "time",
                "machine",
                "processes",
                "precision",
                "device",
                "threads",
                "versions",
                "code",
                "command",
                "data",
            )
        ]
        assert datetime.fromisoformat(start["time"]).tzinfo is not None
        assert (start["processes"], start["precision"]) == (1, "fp32")
        assert start["versions"]["nanogpt_hf"] == nanogpt_hf.__version__
        assert start["code"].startswith(nanogpt_hf.__version__)
    assert starts[1]["command"].startswith("cli.py pretrain ")
    assert "--resume" in starts[1]["command"]
    for secret in ("pa55word", "5ignature", "t0ken"):
        assert secret not in text
    assert "'https://localhost/x.txt?sig=...'" in starts[0]["command"]
    run.machine.write_text("[1")  # whoever damages it loses what it told, and no more
    pretrain("--resume", train__max_steps=5)
    assert [start["step"] for start in read_starts(run)] == [4]
    pretrain("--overwrite", train__max_steps=2)
    assert [start["step"] for start in read_starts(run)] == [0]


def test_tensorboard_goes_on_in_the_same_folder_and_shows_each_step_once(pretrain):
    loaders = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    options = {"tracking__trackers": ["tensorboard"], "tracking__project": "tiny"}
    run = pretrain(train__max_steps=4, **options)
    run.checkpoint(4).rename(run.path / "away")  # so it goes on from step 2, and does 3 and 4 again
    pretrain("--resume", train__max_steps=5, **options)
    log = loaders.EventAccumulator(str(run.trackers / "tiny"))
    log.Reload()
    shown = {event.step: event.value for event in log.Scalars("train/loss")}
    assert [event.step for event in log.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert shown == pytest.approx({e["step"]: e["train/loss"] for e in read_metrics(run) if "train/loss" in e})


def test_wandb_goes_on_in_the_same_run_and_is_told_no_secret(root, tmp_path, write_recipe, monkeypatch):
    # in processes of their own: wandb keeps a service, and settings, from one run to the next in a process
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("SOME_TOKEN", "t0ken")
    run = RunFolder(tmp_path / "run")
    for steps, more in (2, []), (4, ["--resume"]):
        recipe = write_recipe(train__max_steps=steps, optim__warmup_steps=1, tracking__trackers=["wandb"])
        words = ["pretrain", recipe, "--run-dir", run.path, "--data.text_column", SECRET, *more]
        done = subprocess.run([sys.executable, root / "cli.py", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    kept = json.loads((run.trackers / "runs.json").read_text())
    assert len(folders) == 2
    assert all(kept["wandb"] in folder.name for folder in folders)  # "-1" follows where both began in one second
    written = b"".join(path.read_bytes() for path in (run.path / "wandb").rglob("*") if path.is_file())
    assert b"train/clipped_share" in written
    assert b"pa55word" not in written
    assert b"t0ken" not in written


def test_a_tracker_that_does_not_start_is_one_clear_line(pretrain, notebook, monkeypatch, write_recipe, capsys):
    def refuse(self):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(notebook, "start", refuse)
    assert main(["pretrain", str(write_recipe(tracking__trackers=["notebook"])), "--run-dir", "other"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "notebook did not start (ConnectionError: no network at all); repair that, or leave it out" in said
    assert not Path("other").exists()  # so that the next try needs no --overwrite


def test_quiet_says_nothing_and_a_terminal_gets_a_bar_and_a_summary(pretrain, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = pretrain("-q", train__max_steps=2)
    assert capsys.readouterr() == ("", "")
    assert len(read_metrics(run)) == 2 + 2
    pretrain("--overwrite", train__max_steps=4)
    said = capsys.readouterr()
    assert "4/4" in said.err
    assert "best validation loss" in said.err
    assert "done: 4 steps, 512 tokens in " in said.out
    assert "tokens/s, evaluations included" in said.out
    best = min((e["val/loss"], e["step"]) for e in read_metrics(run) if e.get("val/loss") and e["step"])
    assert f"  best validation loss {best[0]:.4f} at step {best[1]}\n" in said.out
    assert "next: python cli.py sample run --prompt" in said.out
    assert "\r" not in said.out


def test_a_plain_log_has_a_line_now_and_then_and_no_bar(pretrain, capsys):
    pretrain(train__max_steps=6)
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("train loss") == 1  # one in ten seconds
    assert said.out.count("validation loss ") == 3 + 1
    assert logging.getLogger("nanogpt_hf").handlers == []


def test_the_code_is_the_version_and_in_a_checkout_the_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.nanogpt_hf, "__file__", str(tmp_path / "nanogpt_hf" / "__init__.py"))
    answers = {"rev-parse": "1a2b3c4d5e6f", "status": ""}
    monkeypatch.setattr(machine, "_git", lambda folder, command, *rest: answers[command])
    version = machine.code_version.__wrapped__  # without what it remembers
    assert version() == nanogpt_hf.__version__  # installed: a folder above may be anybody's checkout
    (tmp_path / ".git").touch()
    assert version() == f"{nanogpt_hf.__version__} (commit 1a2b3c4d5e6f)"
    answers["status"] = " M nanogpt_hf/generate.py"
    assert version() == f"{nanogpt_hf.__version__} (commit 1a2b3c4d5e6f, dirty)"
    monkeypatch.setattr(machine, "_git", lambda *a: machine.subprocess.run(["no-such-git"], check=True))
    assert version() == nanogpt_hf.__version__
