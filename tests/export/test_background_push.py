"""Pushing as a run goes: the Hub gets the best model, and nothing that the Hub does stops a run."""

import json
import threading
import time

import pytest
from huggingface_hub import constants

from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.export import background_push
from nanogpt_hf.export import hub as hub_module
from nanogpt_hf.export.background_push import BackgroundPush
from nanogpt_hf.runs.folder import RunFolder

HUB = ["--hub.push", "best", "--hub.repo", "tester/tiny"]


@pytest.fixture
def pretrain(write_recipe, tmp_path, capfd):
    """Run `pretrain` on the tiny recipe; return its exit status and all it printed."""

    def pretrain(*options: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(["pretrain", str(write_recipe()), "--run-dir", str(tmp_path / "run"), *options])
        return status, "".join(capfd.readouterr())

    return pretrain


def test_the_best_model_is_on_the_hub_when_the_run_is_done(hub, pretrain, tmp_path):
    hub.lfs = True
    status, said = pretrain(*HUB, "--hub.private", "true", "--hub.license", "mit")
    assert status == 0
    repository = hub.repositories["tester/tiny"]
    files, run = repository.files(), RunFolder(tmp_path / "run")
    assert repository.private
    assert files["model.safetensors"] == (run.best / "model.safetensors").read_bytes()
    assert files["metrics.jsonl"] == run.metrics.read_bytes()
    assert files["recipe.yaml"] == run.recipe.read_bytes()
    assert b"license: mit" in files["README.md"]
    assert f"hub: {run.best} -> {hub.url}/tester/tiny/commit/" in said
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    for text in (said.encode(), written, b"".join(files.values())):
        assert hub.token.encode() not in text
    assert not list(run.path.glob(".push*"))


def test_the_last_model_only(hub, pretrain, tmp_path):
    status, _ = pretrain("--hub.push", "final", "--hub.repo", "tester/tiny")
    assert status == 0
    (commit,) = hub.commits("tester/tiny")
    assert commit["files"]["model.safetensors"] == (tmp_path / "run" / "final" / "model.safetensors").read_bytes()


def test_a_hub_that_fails_does_not_stop_the_run_and_is_said(hub, pretrain, tmp_path):
    hub.faults = {"/commit/": 413}
    status, said = pretrain(*HUB)
    assert status == 0
    assert "tester/tiny: the Hub said 413: as the test wants it; nothing was pushed" in said
    assert f"by hand: python cli.py push {tmp_path / 'run' / 'best'} tester/tiny" in said
    assert "done: 6 steps" in said


def test_a_run_that_cannot_push_is_refused_before_it_starts(hub, pretrain, tmp_path, monkeypatch):
    for token, options, reason in (
        ("", HUB, "hub.repo: tester/tiny: not logged in to the Hub"),
        ("hf_wrong", HUB, "hub.repo: tester/tiny: the Hub does not accept your token"),
        (hub.token, [*HUB[:3], "other/tiny"], "hub.repo: other/tiny: other is somebody else's name"),
        (hub.token, HUB[:2], "--hub.push: needs hub.repo: user/name"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
        status, said = pretrain(*options)
        assert status == 2
        assert reason in said
        assert "nothing was started" in said
        assert not (tmp_path / "run").exists()
    assert hub.repositories == {}


def test_a_hub_that_does_not_answer_at_first_is_no_reason_not_to_start(hub, monkeypatch):
    hub.silent = True
    line = hub_module.check_login("tester/tiny", patience=0.2)
    assert "does not answer" in line
    assert "training goes on" in line
    hub.silent = False
    assert hub_module.check_login("tester/tiny") is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in hub_module.check_login("tester/tiny")


# Stands in for `python -m nanogpt_hf push`: notes the model's content and does as the file `do` says.
CHILD = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
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
def stand_in(tmp_path, monkeypatch, caplog):
    """A BackgroundPush whose pushes are CHILD, and the lines it says."""
    (tmp_path / "nanogpt_hf.py").write_text(CHILD)
    (tmp_path / "best").mkdir()
    monkeypatch.setattr(background_push.nanogpt_hf, "__file__", str(tmp_path / "nanogpt_hf" / "__init__.py"))
    caplog.set_level("INFO", "nanogpt_hf")
    return BackgroundPush(HubSection(push="best", repo="tester/tiny"), RunFolder(tmp_path)), caplog


def step(pushing: BackgroundPush, folder, model: str, do: str, until) -> None:
    """A new best model, and reports until something is so."""
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


def test_one_push_at_a_time_and_the_newest_is_the_next(stand_in, tmp_path):
    ours, said = stand_in
    step(ours, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    for model in "234":
        step(ours, tmp_path, model, "wait", lambda: True)
    ours.new_model(tmp_path / "final")  # none of its business
    (tmp_path / "do").write_text("well")
    wait(ours, lambda: len(pushed(tmp_path)) == 2)
    ours.finish(done=False)
    assert pushed(tmp_path) == ["1", "4"]
    assert said.messages[0] == "hub: well"


def test_an_error_is_said_once_until_it_is_another(stand_in, tmp_path):
    ours, said = stand_in
    for number, do in enumerate(["bad network", "bad network", "bad token", "bad network", "well", "bad network"]):
        step(ours, tmp_path, str(number), do, lambda: ours._process is None)
    assert said.messages == [
        *("hub: bad network; training goes on", "hub: bad token; training goes on"),
        *("hub: well", "hub: bad network; training goes on"),
    ]
    assert [record.levelname for record in said.records] == [
        "WARNING",
        "WARNING",
        "INFO",
        "WARNING",
    ]  # -q says failures


def test_the_end_of_a_run_waits_for_a_bounded_time(stand_in, tmp_path, monkeypatch):
    ours, said = stand_in
    monkeypatch.setattr(background_push, "_PATIENCE", 0.3)
    step(ours, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    process = ours._process
    stage = tmp_path / f".push-{process.pid}"
    stage.mkdir()
    ours.finish(done=True)
    assert process.poll() is not None
    assert not stage.exists()
    by_hand = f"by hand: python cli.py push {tmp_path / 'best'} tester/tiny"
    assert said.messages == [
        f"hub: pushing {tmp_path / 'best'} to tester/tiny; Ctrl-C leaves it",
        f"hub: the last push was given up; {by_hand}",
    ]


def test_ctrl_c_leaves_the_last_push(stand_in, tmp_path):
    import _thread

    ours, said = stand_in
    step(ours, tmp_path, "1", "wait", lambda: pushed(tmp_path) == ["1"])
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    ours.finish(done=True)
    timer.join()
    assert "the last push was given up" in said.messages[-1]
