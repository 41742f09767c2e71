"""BackgroundPush: models are pushed during training, and no failure of the Hub stops a run."""

import json
import threading
import time

import psutil
import pytest
from huggingface_hub import constants

from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.export import background_push
from nanogpt_hf.export.background_push import BackgroundPush
from nanogpt_hf.export.hub import check_login
from nanogpt_hf.runs.folder import RunFolder

HUB = ["--hub.push", "best", "--hub.repo", "tester/tiny"]


@pytest.fixture
def pretrain(write_recipe, tmp_path, capfd):
    """Run `pretrain` on the tiny recipe; return its exit status and output."""

    def pretrain(*options: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(["pretrain", str(write_recipe()), "--run-dir", str(tmp_path / "run"), *options])
        return status, "".join(capfd.readouterr())

    return pretrain


def test_pretrain_pushes_the_best_model(hub, pretrain, tmp_path):
    hub.lfs = True
    status, output = pretrain(*HUB, "--hub.private", "true", "--hub.license", "mit")
    assert status == 0
    repository = hub.repositories["tester/tiny"]
    files, run = repository.files(), RunFolder(tmp_path / "run")
    assert repository.private
    assert files["model.safetensors"] == (run.best / "model.safetensors").read_bytes()
    assert files["metrics.jsonl"] == run.metrics.read_bytes()
    assert files["recipe.yaml"] == run.recipe.read_bytes()
    assert b"license: mit" in files["README.md"]
    assert f"hub: {run.best} -> {hub.url}/tester/tiny/commit/" in output
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    for text in (output.encode(), written, b"".join(files.values())):
        assert hub.token.encode() not in text
    assert not list(run.path.glob(".push*"))


def test_pretrain_continues_when_the_hub_fails(hub, pretrain, tmp_path):
    hub.faults = {"/commit/": 413}
    status, output = pretrain(*HUB)
    assert status == 0
    assert "tester/tiny: the Hub answered 413" in output
    assert f"push {tmp_path / 'run' / 'best'} tester/tiny" in output
    assert "done: 6 steps" in output


def test_pretrain_is_refused_without_permission_to_push(hub, pretrain, tmp_path, monkeypatch):
    for token, options, reason in (
        ("", HUB, "hub.repo: tester/tiny: not logged in to the Hub"),
        ("hf_wrong", HUB, "hub.repo: tester/tiny: the Hub rejects your token"),
        (hub.token, [*HUB[:3], "other/tiny"], "hub.repo: other/tiny: other is not your account"),
        (hub.token, HUB[:2], "--hub.push: needs hub.repo: user/name"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
        status, output = pretrain(*options)
        assert status == 2
        assert reason in output
        assert "nothing was started" in output
        assert not (tmp_path / "run").exists()
    assert hub.repositories == {}


def test_check_login_only_warns_if_the_hub_does_not_answer(hub, monkeypatch):
    hub.silent = True
    line = check_login("tester/tiny", timeout=0.2)
    assert "does not answer" in line
    assert "training continues" in line
    hub.silent = False
    assert check_login("tester/tiny") is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in check_login("tester/tiny")


# Replaces `python -m nanogpt_hf push`: records the model's content and does what the file `do` says.
CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
(folder.parent / "pid").write_text(str(os.getpid()))
(folder.parent / "environment").write_text(json.dumps(dict(os.environ)))
with open(folder.parent / "pushed.jsonl", "a") as file:
    file.write(json.dumps((folder / "model").read_text()) + chr(10))
do = folder.parent / "do"
while (order := do.read_text()) in ("wait", ""):  # "": it is being written
    time.sleep(0.02)
print("noise")
print(order)
sys.exit(order.startswith("bad"))
"""


@pytest.fixture
def fake_push(tmp_path, monkeypatch, caplog):
    """A BackgroundPush that runs CHILD, and its log."""
    (tmp_path / "nanogpt_hf.py").write_text(CHILD)
    (tmp_path / "best").mkdir()
    monkeypatch.setattr(background_push.nanogpt_hf, "__file__", str(tmp_path / "nanogpt_hf" / "__init__.py"))
    caplog.set_level("INFO", "nanogpt_hf")
    return BackgroundPush(HubSection(push="best", repo="tester/tiny"), RunFolder(tmp_path)), caplog


def train(pushing: BackgroundPush, folder, model: str, do: str, until) -> None:
    """Write a new best model, and poll until the condition holds."""
    (folder / "do").write_text(do)
    (folder / "best" / "model").write_text(model)
    pushing.new_model(folder / "best")
    wait(pushing, until)


def wait(pushing: BackgroundPush, until) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        pushing.poll()
        time.sleep(0.02)


def pushed(folder) -> list[str]:
    path = folder / "pushed.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_one_push_at_a_time_then_the_newest_model(fake_push, tmp_path):
    pushing, log = fake_push
    train(pushing, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    for model in "234":
        train(pushing, tmp_path, model, "wait", lambda: True)
    pushing.new_model(tmp_path / "final")  # not hub.push
    (tmp_path / "do").write_text("well")
    wait(pushing, lambda: len(pushed(tmp_path)) == 2)
    pushing.finish(done=False)
    assert pushed(tmp_path) == ["1", "4"]
    assert log.messages[0] == "hub: well"


def test_a_run_on_several_processes_pushes_its_final_model_from_one(fake_push, tmp_path, monkeypatch):
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    hub = HubSection(push="final", repo="tester/tiny")
    (tmp_path / "do").write_text("well")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model").write_text("last")
    pushing = BackgroundPush(hub, RunFolder(tmp_path))
    pushing.new_model(tmp_path / "best")
    BackgroundPush(hub, RunFolder(tmp_path), is_main=False).finish(done=True)
    assert not pushed(tmp_path)
    pushing.finish(done=True)
    assert pushed(tmp_path) == ["last"]
    assert not launched.keys() & json.loads((tmp_path / "environment").read_text()).keys()  # the push is no rank


def test_a_repeated_push_error_is_logged_once(fake_push, tmp_path):
    pushing, log = fake_push
    for number, do in enumerate(["bad network", "bad network", "bad token", "bad network", "well", "bad network"]):
        train(pushing, tmp_path, str(number), do, lambda: not pushing.is_pushing)
    logged = [message.partition(";")[0] for message in log.messages]
    assert logged == ["hub: bad network", "hub: bad token", "hub: well", "hub: bad network"]
    assert [record.levelname for record in log.records] == [
        *("WARNING", "WARNING", "INFO", "WARNING")  # -q shows warnings
    ]


def test_finish_cancels_the_push_after_a_timeout(fake_push, tmp_path, monkeypatch):
    pushing, log = fake_push
    monkeypatch.setattr(background_push, "FINAL_TIMEOUT", 0.3)
    train(pushing, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    pid = json.loads((tmp_path / "pid").read_text())
    stage = tmp_path / f".push-{pid}"
    stage.mkdir()
    pushing.finish(done=True)
    assert not psutil.pid_exists(pid)
    assert not pushing.is_pushing
    assert not stage.exists()
    pushing_it, cancelled = log.messages
    assert f"{tmp_path / 'best'} to tester/tiny" in pushing_it
    assert f"push {tmp_path / 'best'} tester/tiny" in cancelled


def test_ctrl_c_cancels_the_last_push(fake_push, tmp_path):
    import _thread

    pushing, log = fake_push
    train(pushing, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    pushing.finish(done=True)
    timer.join()
    assert "push was cancelled" in log.messages[-1]
