"""BackgroundPush: models are pushed during training, and no failure of the Hub stops a run."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.export import hub as module
from nanogpt_hf.export import login
from nanogpt_hf.export.hub import BackgroundPush
from nanogpt_hf.export.login import check_login
from nanogpt_hf.runs.folder import RunFolder

HUB = ["--hub.push", "best", "--hub.repo", "tester/tiny"]


@pytest.fixture
def pretrain(write_recipe, tmp_path, capfd):
    """Run `pretrain` on the tiny recipe; return its exit status and output."""

    def pretrain(*options: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(
            ["pretrain", str(write_recipe()), "--run-dir", str(tmp_path / "run"), *options]
        )
        return status, "".join(capfd.readouterr())

    return pretrain


@pytest.mark.long
def test_pretrain_pushes_the_best_model(hub, pretrain, tmp_path):
    hub.lfs = True
    status, output = pretrain(*HUB, "--hub.private", "true", "--hub.license", "mit")
    assert status == 0
    repository = hub.repositories["tester/tiny"]
    files = repository.files()
    run = RunFolder(tmp_path / "run")
    assert repository.private
    assert files["model.safetensors"] == (run.best / "model.safetensors").read_bytes()
    assert files["metrics.jsonl"] == run.metrics.read_bytes()
    assert b"license: mit" in files["README.md"]
    assert f"hub: {run.best} -> {hub.url}/tester/tiny/commit/" in output
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    for text in (output.encode(), written, b"".join(files.values())):
        assert hub.token.encode() not in text
    assert not list(run.path.glob(".push*"))


@pytest.mark.long
def test_pretrain_continues_when_the_hub_fails(hub, pretrain, tmp_path):
    hub.faults = {"/commit/": 413}
    status, output = pretrain(*HUB)
    assert status == 0
    assert "hub: tester/tiny: " in output
    assert "as set by the test" in output
    assert f"push {tmp_path / 'run' / 'best'} tester/tiny" in output
    assert "done: 6 steps" in output


def test_pretrain_is_refused_without_permission_to_push(hub, pretrain, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    status, output = pretrain(*HUB)
    assert status == 2
    assert "hub.repo: tester/tiny: Invalid user token" in output
    assert "nothing was started" in output
    assert not (tmp_path / "run").exists()
    assert hub.repositories == {}


def test_check_login_only_warns_if_the_hub_does_not_answer(hub, monkeypatch):
    assert check_login("tester/tiny") is None
    hub.silent = True
    monkeypatch.setattr(login, "CONNECTION_TIMEOUT", 0.2)
    assert "training continues" in check_login("tester/tiny")


@pytest.fixture
def fake_push(tmp_path, monkeypatch, caplog):
    """A BackgroundPush whose pushes do what `orders` says; `pushed` has the models' content."""
    pushed = []
    orders = queue.Queue()

    def push(folder, repo_id, private):
        pushed.append((folder / "model").read_text())
        return orders.get()

    monkeypatch.setattr(module, "push", push)
    caplog.set_level("INFO", "nanogpt_hf")
    (tmp_path / "best").mkdir()
    hub = HubSection(push="best", repo="tester/tiny")
    pushing = BackgroundPush(hub, RunFolder(tmp_path))
    yield SimpleNamespace(pushing=pushing, pushed=pushed, orders=orders, folder=tmp_path / "best")
    for _ in range(3):  # a thread that waits ends its push
        orders.put("end")
    wait(lambda: not pushing._models.unfinished_tasks)


def train(fake, model: str) -> None:
    (fake.folder / "model").write_text(model)
    fake.pushing.new_model(fake.folder)


def wait(until) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_push_at_a_time_then_the_newest_model(fake_push, caplog, tmp_path):
    train(fake_push, "1")
    wait(lambda: fake_push.pushed == ["1"])
    for model in "234":
        train(fake_push, model)
    fake_push.pushing.new_model(tmp_path / "final")  # not hub.push
    hub = HubSection(push="best", repo="tester/tiny")
    BackgroundPush(hub, RunFolder(tmp_path), is_main=False).finish(done=True)
    for url in ("first", "second"):
        fake_push.orders.put(url)
    fake_push.pushing.finish(done=False)
    assert fake_push.pushed == ["1", "4"]
    pushed = [line for line in caplog.messages if "->" in line]
    assert pushed == [f"hub: {fake_push.folder} -> {url}" for url in ("first", "second")]


def test_finish_gives_up_after_a_timeout_or_ctrl_c(fake_push, caplog, monkeypatch):
    import _thread

    train(fake_push, "1")
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    fake_push.pushing.finish(done=True)
    timer.join()
    monkeypatch.setattr(module, "FINAL_TIMEOUT", 0.2)
    fake_push.pushing.finish(done=True)
    assert fake_push.pushed == ["1"]
    canceled = [line for line in caplog.messages if "canceled" in line]
    assert len(canceled) == 2
    assert f"push {fake_push.folder} tester/tiny" in canceled[0]
