"""push as a user types it, over real HTTP against a Hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, save

from nanogpt_hf.commands import main
from nanogpt_hf.export import hub as hub_module
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

MODEL_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
RUN_FILES = {"recipe.yaml", "metrics.jsonl", "loss.png"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_recipe):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["pretrain", str(make_recipe(folder / "tiny.yaml")), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A run folder of this test's own."""
    return shutil.copytree(trained, tmp_path / "run")


def push(capsys, *arguments: object) -> list[str]:
    capsys.readouterr()
    assert main(["push", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def refused(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["push", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("lfs", [False, True])
def test_a_run_is_one_commit_with_all_that_tells_of_it(capsys, hub, run, lfs):
    hub.lfs = lfs
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tok')  # a run is in the middle of a line
    (said,) = push(capsys, run, "tester/tiny", "--message", "the first")
    (commit,) = hub.commits("tester/tiny")
    assert commit["title"] == "the first"
    assert f"{hub.url}/tester/tiny/commit/{commit['oid']}" in said
    assert "a new repository" in said
    files = hub.repositories["tester/tiny"].files()
    assert set(files) >= MODEL_FILES | RUN_FILES
    assert not hub.repositories["tester/tiny"].private
    for name in RUN_FILES - {"metrics.jsonl"}:
        assert files[name] == (run / name).read_bytes()
    assert [json.loads(line)["step"] for line in files["metrics.jsonl"].splitlines()][-1] == 6
    assert files["model.safetensors"] == (run / "best" / "model.safetensors").read_bytes()
    assert bool(hub.objects) == lfs
    card = files["README.md"].decode()
    assert card.count('from_pretrained("tester/tiny")') == 2
    assert "path/to" not in card
    assert ModelCard(card).data.eval_results
    assert hub.token.encode() not in b"".join(files.values())
    assert [path.name for path in run.iterdir() if path.name.startswith(".push")] == []

    (again,) = push(capsys, run, "tester/tiny")
    assert "all of it was there already" in again
    assert len(hub.commits("tester/tiny")) == 1


TAKE_BACK = """
import sys, torch
from nanogpt_hf import GPTForCausalLM
from nanogpt_hf.commands import main
from transformers import AutoModelForCausalLM
theirs = GPTForCausalLM.from_pretrained("tester/tiny")
ours = GPTForCausalLM.from_pretrained(sys.argv[1])
for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
    assert torch.equal(a, b)
assert type(AutoModelForCausalLM.from_pretrained("tester/tiny")).__name__ == "GPT2LMHeadModel"
ours.push_to_hub("tester/direct")
again = GPTForCausalLM.from_pretrained("tester/direct")
assert torch.equal(again.transformer.wte.weight, ours.transformer.wte.weight)
assert main(["sample", "tester/tiny", "--prompt", "The ", "--max-new-tokens", "5"]) == 0
short = ["--train.max_steps", "2", "--eval.every", "2"]
sys.exit(main(["finetune", "--from", "tester/tiny", "--data", sys.argv[2], "--run-dir", "tuned", *short]))
"""


def test_what_was_pushed_is_taken_back_by_its_name(capsys, hub, trained, text_file, tmp_path):
    hub.lfs = True
    push(capsys, trained, "tester/tiny", "--private")
    done = subprocess.run(
        [sys.executable, "-c", TAKE_BACK, trained / "best", text_file], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "tuned" / "best" / "README.md").read_text()
    assert "base_model: tester/tiny" in card
    assert "The " in done.stdout
    assert hub.repositories["tester/tiny"].private
    assert json.loads(hub.repositories["tester/direct"].files()["config.json"])["model_type"] == "gpt2"


def test_final_a_branch_and_what_is_left_out(capsys, hub, run):
    (run / "final" / "optimizer.pt").write_bytes(b"pickle")
    (run / "final" / ".env").write_text("secret")
    hub.add("tester/tiny").files()["model-00001-of-00002.safetensors"] = b"of another time"
    said = push(capsys, run / "final", "tester/tiny", "--revision", "trial")
    assert said[0] == "left out, being no files of a model: .env, optimizer.pt"
    assert said[1].endswith("perhaps stale: model-00001-of-00002.safetensors")
    files = hub.repositories["tester/tiny"].files("trial")
    assert set(files) >= MODEL_FILES | RUN_FILES | {"model-00001-of-00002.safetensors"}
    assert 'from_pretrained("tester/tiny", revision="trial")' in files["README.md"].decode()
    assert hub.commits("tester/tiny") == []
    assert "all of it was there already" in push(capsys, run / "final", "tester/tiny", "--revision", "trial")[-1]
    assert len(hub.commits("tester/tiny", "trial")) == 1


def test_a_model_folder_without_a_card_gets_a_plain_one_and_an_adapter_goes_as_it_is(capsys, hub, tmp_path):
    config = GPTConfig(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    GPTForCausalLM(config).save_pretrained(tmp_path / "model")
    push(capsys, tmp_path / "model", "tester/model")
    card = hub.repositories["tester/model"].files()["README.md"].decode()
    assert "# model\n" in card
    assert "whose training is not recorded here" in card
    assert "license" not in ModelCard(card).data.to_dict()

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in {
        "adapter_config.json": b'{"base_model_name_or_path": "gpt2"}',
        "adapter_model.safetensors": save({"a": torch.ones(2)}),
        "README.md": b"---\nbase_model: gpt2\n---\n",
    }.items():
        (adapter / name).write_bytes(content)
    push(capsys, adapter, "tester/adapter")
    files = hub.repositories["tester/adapter"].files()
    assert set(files) == {".gitattributes", *(path.name for path in adapter.iterdir())}
    assert all(files[path.name] == path.read_bytes() for path in adapter.iterdir())


def test_no_login_a_wrong_token_and_one_that_may_only_read(capsys, hub, trained, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    err = refused(capsys, trained, "tester/tiny")
    assert "the Hub does not accept your token" in err
    assert "hf_wrong" not in err
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "not logged in to the Hub; run `hf auth login`" in refused(capsys, trained, "tester/tiny")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.role = "read"
    assert "may only read" in refused(capsys, trained, "tester/tiny")
    assert hub.repositories == {}


def test_what_is_somebody_elses_or_public(capsys, hub, trained):
    hub.add("club/theirs")
    for repo_id, reason in (
        (
            "other/tiny",
            "other is somebody else's name; you are logged in as tester and may push to tester/..., club/...",
        ),
        ("club/theirs", "your token may not write there: you don't have the right to do that"),
        ("club/new", "your token may not write there"),
    ):
        err = refused(capsys, trained, repo_id)
        assert err.startswith(f"{repo_id}: {reason}")
        assert err.endswith("nothing was pushed\n")
    hub.add("tester/open")
    assert "exists and is public" in refused(capsys, trained, "tester/open", "--private")
    assert all(not hub.commits(repo_id) for repo_id in hub.repositories)


def test_no_network_and_offline_mode(capsys, hub, trained, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(capsys, trained, "tester/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    err = refused(capsys, trained, "tester/tiny")
    assert "the Hub (http://127.0.0.1:9) does not answer: " in err
    assert err.endswith("check the network; nothing was pushed\n")


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("/preupload/", 403, "your token may not write there"),
        ("/commit/", 413, "the Hub said 413: as the test wants it"),
        ("/objects/", 400, "the Hub said 400: as the test wants it"),
    ],
)
def test_a_push_that_breaks_off_leaves_nothing_but_the_empty_repository_it_made(
    capsys, hub, run, fault, status, reason
):
    hub.lfs, hub.faults = True, {fault: status}
    err = refused(capsys, run, "tester/tiny")
    assert reason in err
    assert err.endswith("nothing was pushed; the repository tester/tiny was made and is empty\n")
    assert hub.commits("tester/tiny") == []
    assert not list(run.glob(".push*"))
    hub.faults = {}
    push(capsys, run, "tester/tiny")
    assert len(hub.commits("tester/tiny")) == 1


def test_a_card_that_the_hub_does_not_take(capsys, hub, run):
    (run / "best" / "README.md").write_text("---\nlicense: nonsense\n---\n")
    assert 'Invalid metadata in README.md. - "license" must be one of' in refused(capsys, run, "tester/tiny")


def test_a_hub_that_takes_the_connection_and_never_answers(capsys, hub, trained, monkeypatch):
    hub.silent = True
    monkeypatch.setattr(hub_module, "_PATIENCE", 0.2)
    started = time.monotonic()
    assert "does not answer" in refused(capsys, trained, "tester/tiny")
    assert time.monotonic() - started < 20


def test_a_token_in_what_would_be_pushed_stops_it(capsys, hub, run):
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text() + f"# {hub.token}\n")
    err = refused(capsys, run, "tester/tiny")
    assert "recipe.yaml: holds a token of the Hub or a private key; take it out first; nothing was pushed" in err
    assert hub.token not in err
    assert hub.repositories == {}
    assert hub.token not in refused(capsys, run / "final", "tester/tiny", "--message", hub.token)


def test_a_model_that_is_replaced_while_it_is_read_goes_whole(capsys, hub, run, monkeypatch):
    # the run's best/ becomes another folder between two of its files
    newer = shutil.copytree(run / "best", run / "newer")
    for path in (newer / "README.md", newer / "model.safetensors"):
        path.write_bytes(path.read_bytes())
    model = GPTForCausalLM.from_pretrained(newer)
    torch.nn.init.ones_(model.transformer.ln_f.weight.data.mul_(3))
    model.save_pretrained(newer)
    (newer / "README.md").write_text("---\ntags: [newer]\n---\n")
    copy, seen = hub_module._link_or_copy, []

    def replacing(path, target):
        copy(path, target)
        seen.append(path)
        if len(seen) == 2:
            (run / "best").rename(run / ".best.old")
            newer.rename(run / "best")

    monkeypatch.setattr(hub_module, "_link_or_copy", replacing)
    push(capsys, run, "tester/tiny")
    files = hub.repositories["tester/tiny"].files()
    assert b"newer" in files["README.md"]
    assert files["model.safetensors"] == (run / "best" / "model.safetensors").read_bytes()
    assert torch.equal(load(files["model.safetensors"])["transformer.ln_f.weight"], torch.ones(16))


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_model_in_a_folder_that_cannot_be_written_is_pushed_all_the_same(capsys, hub, run, monkeypatch):
    monkeypatch.setattr(hub_module, "staging_folder", lambda folder, process: run / "nowhere" / "stage")
    push(capsys, run, "tester/tiny")
    assert len(hub.commits("tester/tiny")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "tester/x"], "nowhere: no such folder; push takes a run, model or adapter folder"),
        (["recipes", "tester/x"], "recipes: holds no weights as safetensors, GGUF or ONNX; nothing was pushed"),
        (["recipes", "x"], "expected user/name, got 'x'"),
        (["recipes", "tester/x", "--train.seed", "3"], "a push has no recipe to set knobs of"),
    ],
)
def test_mistakes_are_one_clear_line(capsys, hub, root, monkeypatch, arguments, message):
    monkeypatch.chdir(root)
    assert message in refused(capsys, *arguments)
    assert hub.repositories == {}
