"""Trackers, machine.json and console of a run; a resumed run continues its tracker run."""

import json
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import GeneralTracker

import nanogpt_hf
from assertions import column, file_contents, replace_step
from forked import Forked
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import read_starts
from nanogpt_hf.training.step import train_step
from nanogpt_hf.training.trackers import _read_ids, _tracker_options
from nanogpt_hf.training.tracking import Tracking, start_tracking

pytestmark = pytest.mark.long

SECRET = "https://me:pa55word@localhost/x.txt?sig=5ignature"


class Notebook(GeneralTracker):
    """A tracker that records what it receives."""

    name = "notebook"
    requires_logging_directory = False
    books: list["Notebook"] = []  # noqa: RUF012

    def __init__(self, project: str):
        super().__init__()
        self.project = project
        self.config = None
        self.logged = []
        self.closed = False
        Notebook.books.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

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
    """`pretrain` of the tiny recipe, with secrets in the environment and on the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_TOKEN", "t0ken")

    def run(*arguments: str, **overrides) -> RunFolder:
        forget_accelerate()
        arguments = ["pretrain", str(write_recipe(**overrides)), "--run-dir", "run", *arguments]
        monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py", *arguments, "--hub.license", SECRET])
        assert main(arguments) == 0
        return RunFolder(tmp_path / "run")

    return run


def test_trackers_receive_recipe_machine_and_metrics(tmp_path, write_recipe, notebook):
    """One that the recipe names, and an object from Python."""
    names = {"tracking__trackers": ["notebook"], "tracking__project": "tiny"}
    config = load_config(write_recipe(**names, train__max_steps=3))
    mine = Notebook("mine")
    run = nanogpt_hf.train(nanogpt_hf.prepare_run(config, tmp_path / "run", trackers=[mine]))
    (start,) = read_starts(run)
    events = read_metrics(run)
    assert {book.project for book in notebook.books} == {"mine", "tiny"}
    for book in notebook.books:
        assert book.closed
        steps = [(e["step"], {k: v for k, v in e.items() if "/" in k}) for e in events]
        assert book.logged == steps
        assert book.config["model.n_embd"] == 16
        assert {f"start.{name}" for name in start.keys() - {"data"}} < set(book.config)
        assert json.loads(book.config["start.versions"]) == start["versions"]
        assert {name for name in book.config if not name.startswith("start.")} < set(KNOBS)
        assert all(isinstance(value, str | int | float | bool) for value in book.config.values())


def test_a_tracker_names_a_run_by_its_folder(tmp_path):
    """The runs of a sweep share a recipe, and its name."""
    for name in ("learning_rate=0.001", "learning_rate=0.003"):
        run = SimpleNamespace(folder=RunFolder(tmp_path / "sweep" / name))
        assert _tracker_options(run, "mlflow", 0) == {"run_name": name}
        assert _tracker_options(run, "trackio", 0)["name"].startswith(f"{name}-")


def test_the_time_left_follows_from_several_reports(write_recipe):
    config = load_config(write_recipe(train__max_steps=10))
    tokens = config.train.tokens_per_step
    # 2, 6 and 4 seconds for a step: 4 on average, for the 7 that are left.
    recent = [(2.0, tokens), (6.0, tokens), (4.0, tokens)]
    run = SimpleNamespace(state=SimpleNamespace(tokens=3 * tokens))
    assert Tracking._time_left(SimpleNamespace(_recent=recent, config=config, run=run)) == "28 s"


def test_metrics_are_documented_and_plausible(pretrain, root):
    events = read_metrics(pretrain(train__max_steps=2, tracking__layers=True))
    docs = (root / "docs" / "watching.md").read_text(encoding="utf-8")
    for name in {name for event in events for name in event}:
        assert f"`{re.sub(r'^layers/[^/]+', 'layers/<n>', name)}`" in docs, name
    step_events = [event for event in events if "train/loss" in event]
    assert len(step_events) == 2
    for event in step_events:
        assert event["train/clipped_share"] == float(event["train/grad_norm"] > 1)
        assert 0 < event["train/data_wait"] < 1
        assert 2**26 < event["train/memory_peak_bytes"] < 2**40


def test_machine_json_lists_starts_without_secrets(pretrain):
    run = pretrain(train__max_steps=2)
    pretrain("--resume", train__max_steps=4)
    text = run.machine.read_text()
    starts = json.loads(text)["starts"]
    assert starts == read_starts(run)
    assert [start["step"] for start in starts] == [0, 2]
    assert (starts[1]["processes"], starts[1]["precision"]) == (1, "fp32")
    assert starts[1]["versions"]["nanogpt_hf"] == nanogpt_hf.__version__
    assert starts[1]["code"].startswith(nanogpt_hf.__version__)
    assert starts[1]["command"].startswith("cli.py pretrain ")
    assert "--resume" in starts[1]["command"]
    for secret in ("pa55word", "5ignature", "t0ken"):
        assert secret not in text
    assert "'https://localhost/x.txt?...'" in starts[0]["command"]
    pretrain("--overwrite", train__max_steps=2)
    assert [start["step"] for start in read_starts(run)] == [0]


def test_tensorboard_continues_and_has_each_step_once(pretrain):
    loaders = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    options = {"tracking__trackers": ["tensorboard"], "tracking__project": "tiny"}
    run = pretrain(train__max_steps=4, **options)
    run.checkpoint(4).rename(run.path / "away")  # so it resumes from step 2 and repeats 3 and 4
    pretrain("--resume", train__max_steps=5, **options)
    log = loaders.EventAccumulator(str(run.trackers / "tiny"))
    log.Reload()
    values_by_step = {event.step: event.value for event in log.Scalars("train/loss")}
    assert [event.step for event in log.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert values_by_step == pytest.approx(column(run, "train/loss"))


def test_wandb_continues_the_run_without_secrets(tmp_path, write_recipe, monkeypatch, text_file):
    # in new processes: wandb keeps a service and settings within a process
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("SOME_TOKEN", "t0ken")
    run = RunFolder(tmp_path / "run")
    rows = tmp_path / "rows.jsonl"
    lines = text_file.read_text().splitlines()
    rows.write_text("".join(json.dumps({SECRET: line}) + "\n" for line in lines))
    knobs = {"data__source": str(rows), "optim__warmup_steps": 1, "tracking__trackers": ["wandb"]}
    for steps, flags in (2, []), (4, ["--resume"]):
        recipe = write_recipe(train__max_steps=steps, **knobs)
        options = ["--run-dir", run.path, "--data.text_column", SECRET, *flags]
        assert Forked(["pretrain", recipe, *options]).wait(120) == 0
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    run_ids = json.loads((run.trackers / "runs.json").read_text())
    assert len(folders) == 2
    # "-1" is appended if both started in the same second
    assert all(run_ids["wandb"] in folder.name for folder in folders)
    written = b"".join(file_contents(run.path / "wandb").values())
    assert b"train/clipped_share" in written
    assert b"pa55word" not in written
    assert b"t0ken" not in written


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"wandb": 5}', b"\xff", b"[" * 100_000, None],
    ids=["empty", "cut", "list", "null", "number", "bytes", "nested", "folder"],
)
def test_damaged_ids_of_trackers_start_new_runs_with_one_warning(tmp_path, caplog, content):
    path = tmp_path / "runs.json"
    path.write_text('{"wandb": "a", "other": "b"}')
    assert _read_ids(path) == {"wandb": "a"}
    path.unlink()
    assert _read_ids(path) == {}
    assert caplog.text == ""
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert _read_ids(path) == _read_ids(path) == {}
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(f"{path}: ")
    assert message.endswith("; the trackers start new runs")


def test_run_resumes_though_the_ids_of_its_trackers_are_damaged(pretrain, notebook, capsys):
    options = {"tracking__trackers": ["notebook"]}
    run = pretrain(train__max_steps=2, **options)
    (run.trackers / "runs.json").write_text("{")
    pretrain("--resume", train__max_steps=4, **options)
    assert capsys.readouterr().err.count("the trackers start new runs") == 1
    assert json.loads((run.trackers / "runs.json").read_text()) == {}
    assert [step for step, _ in notebook.books[1].logged][-1] == 4


def test_tracker_that_fails_to_start_is_one_line(
    pretrain, notebook, monkeypatch, write_recipe, capsys
):
    def refuse(self):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(notebook, "start", refuse)
    recipe = str(write_recipe(tracking__trackers=["notebook"]))
    assert main(["pretrain", recipe, "--run-dir", "other"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "notebook did not start (ConnectionError: no network at all)" in stderr
    assert not Path("other").exists()  # so that the next attempt needs no --overwrite


def test_quiet_prints_nothing_and_terminal_shows_bar_and_summary(pretrain, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = pretrain("-q", train__max_steps=2)
    assert capsys.readouterr() == ("", "")
    assert len(read_metrics(run)) == 2 + 2
    pretrain("--overwrite", train__max_steps=4)
    captured = capsys.readouterr()
    assert "4/4" in captured.err
    assert "done: 4 steps, 512 tokens in " in captured.out
    losses = column(run, "val/loss")
    best = min((loss, step) for step, loss in losses.items() if step)
    assert f"  best validation loss {best[0]:.4f} at step {best[1]}\n" in captured.out
    assert f"next: {program()} sample run --prompt" in captured.out
    assert "\r" not in captured.out


def test_log_without_terminal_is_sparse_and_has_no_bar(pretrain, capsys):
    pretrain(train__max_steps=6)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("train loss") == 1  # one per ten seconds
    assert captured.out.count("validation loss ") == 3 + 1
    assert logging.getLogger("nanogpt_hf").handlers == []


class Pager(Notebook):
    """A tracker whose run has alerts, as wandb and trackio have them."""

    def __init__(self, project: str, fails: bool = False):
        super().__init__(project)
        self.alerts = []
        self.fails = fails

    def alert(self, title: str, text: str) -> None:
        if self.fails:
            raise ConnectionError("no network")
        assert len(title) < 64  # wandb's limit
        self.alerts.append((title, text))


def spiking(step):
    return step._replace(loss=step.loss * 10)


def without_gradient(step):
    return step._replace(grad_norm=step.grad_norm * math.nan)


@pytest.mark.one_row_per("fails", "alerts")
@pytest.mark.parametrize(
    ("knobs", "change", "alerts"),
    [
        ({}, None, []),
        (
            {"train__rollback_ratio": 2.0, "checkpoint__every": 2},
            (5, spiking),
            [("Loss spike", "step 6: the loss is above 2 times its running average; rolling")],
        ),
        ({}, (3, without_gradient), [("No finite gradient", "step 4: 1 steps had no finite")]),
        (
            {"eval__patience": 1, "eval__every": 1, "optim__learning_rate": 0.0}
            | {"optim__min_learning_rate": 0.0},
            None,
            [("Stopped early", "stopped at step 2: no better in 1 evaluations (eval.patience)")],
        ),
    ],
    ids=["none", "spike", "gradient", "patience"],
)
@pytest.mark.parametrize("fails", [False, True], ids=["", "tracker fails"])
def test_alerts_are_sent_by_trackers_that_have_them(
    knobs, change, alerts, fails, tmp_path, write_recipe, monkeypatch, caplog
):
    if change is not None:
        at, changed = change

        def take_step(run, step, learning_rate):
            result = train_step(run, step, learning_rate)
            return changed(result) if step == at else result

        replace_step(monkeypatch, take_step)
    pager = Pager("pager", fails)
    notebook = Notebook("notebook")
    config = load_config(write_recipe(train__max_steps=8, **knobs))
    nanogpt_hf.train(nanogpt_hf.prepare_run(config, tmp_path / "run", trackers=[pager, notebook]))
    expected = [] if fails else alerts
    assert [title for title, _ in pager.alerts] == [title for title, _ in expected]
    for (_, text), (_, begin) in zip(pager.alerts, expected, strict=True):
        assert text.startswith(begin)
    warning = "notebook: the alert was not sent: no network"
    assert (warning in caplog.text) == (fails and bool(alerts))


def test_alert_hides_secrets(tmp_path, write_recipe):
    pager = Pager("pager")
    run = nanogpt_hf.prepare_run(load_config(write_recipe()), tmp_path / "run", trackers=[pager])
    start_tracking(run).alert("Loss spike", "at https://me:secret@example.org/x")
    run.folder.unlock()
    assert pager.alerts == [("Loss spike", "at https://example.org/x")]
