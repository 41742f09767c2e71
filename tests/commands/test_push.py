"""The push command, over real HTTP against a Hub on this machine."""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import save

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.export import login

MODEL_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
}
RUN_FILES = {"recipe.yaml", "metrics.jsonl", "loss.png"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_recipe, loss_plots):
    folder = tmp_path_factory.mktemp("trained")
    with loss_plots():
        assert (
            main(
                argv("pretrain {} --run-dir {}", make_recipe(folder / "tiny.yaml"), folder / "run")
            )
            == 0
        )
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run folder, for this test to change."""
    return shutil.copytree(trained, tmp_path / "run")


def push(capsys, *arguments: object) -> list[str]:
    capsys.readouterr()
    assert main(["push", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("lfs", [False, True])
def test_push_sends_a_run_in_one_commit(capsys, hub, run, lfs):
    hub.lfs = lfs
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tok')  # a run is in the middle of a line
    (line,) = push(capsys, run, "tester/tiny", "--message", "the first")
    (commit,) = hub.commits("tester/tiny")
    assert commit["title"] == "the first"
    assert f"{hub.url}/tester/tiny/commit/{commit['oid']}" in line
    files = hub.repositories["tester/tiny"].files()
    assert set(files) >= MODEL_FILES | RUN_FILES
    for name in RUN_FILES - {"metrics.jsonl"}:
        assert files[name] == (run / name).read_bytes()
    assert [json.loads(line)["step"] for line in files["metrics.jsonl"].splitlines()][-1] == 6
    assert files["model.safetensors"] == (run / "best" / "model.safetensors").read_bytes()
    assert bool(hub.objects) == lfs
    card = files["README.md"].decode()
    assert card.count('from_pretrained("tester/tiny")') == 2
    assert "path/to" not in card
    assert hub.token.encode() not in b"".join(files.values())

    push(capsys, run, "tester/tiny")  # nothing had changed
    assert len(hub.commits("tester/tiny")) == 1


LOAD_AND_FINETUNE = """
import sys, torch
from transformers import AutoModelForCausalLM
from nanogpt_hf import GPTForCausalLM
from nanogpt_hf.commands import main
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
tune = ["finetune", "--from", "tester/tiny", "--data", sys.argv[2], "--run-dir", "tuned"]
sys.exit(main([*tune, *short]))
"""


@pytest.mark.slow
def test_a_pushed_model_loads_by_its_repo_id(capsys, hub, trained, text_file, tmp_path):
    hub.lfs = True
    push(capsys, trained, "tester/tiny", "--private")
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_FINETUNE, trained / "best", text_file],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "tuned" / "best" / "README.md").read_text()
    assert "base_model: tester/tiny" in card
    assert "The " in done.stdout
    assert done.stderr.count("loading tester/tiny from the Hub\n") == 1
    assert hub.repositories["tester/tiny"].private
    assert (
        json.loads(hub.repositories["tester/direct"].files()["config.json"])["model_type"] == "gpt2"
    )


@pytest.mark.long
def test_push_final_to_a_branch_sends_model_files_only(capsys, hub, run):
    (run / "final" / "optimizer.pt").write_bytes(b"pickle")
    (run / "final" / ".env").write_text("secret")
    push(capsys, run / "final", "tester/tiny", "--revision", "trial")
    files = hub.repositories["tester/tiny"].files("trial")
    assert set(files) >= MODEL_FILES | RUN_FILES
    assert not {".env", "optimizer.pt"} & set(files)
    assert 'from_pretrained("tester/tiny", revision="trial")' in files["README.md"].decode()
    assert hub.commits("tester/tiny") == []
    assert len(hub.commits("tester/tiny", "trial")) == 1


@pytest.mark.long
def test_push_sends_adapters_unchanged(capsys, hub, tmp_path):
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


@pytest.mark.parametrize(
    ("names", "library"),
    [
        (["config.json", "model.safetensors"], "transformers"),
        (["model.gguf"], "gguf"),
        (["config.json", "model.onnx"], "onnx"),
        (["adapter_config.json", "adapter_model.safetensors"], "peft"),
        (["damaged/config.json", "model.safetensors"], "transformers"),
    ],
)
def test_a_pushed_folder_has_a_card(capsys, hub, letter_model, tmp_path, names, library):
    (folder := tmp_path / "folder").mkdir()
    for name in names:
        known = letter_model / name
        content = known.read_bytes() if known.is_file() else b"{}"
        (folder / name.rpartition("/")[2]).write_bytes(content)
    push(capsys, folder, "tester/foreign")
    card = ModelCard(hub.repositories["tester/foreign"].files()["README.md"].decode())
    assert card.data.library_name == library
    assert ('from_pretrained("tester/foreign")' in card.text) == (
        library in ("transformers", "peft")
    )
    assert not (folder / "README.md").exists()


def test_push_refuses_a_missing_wrong_or_read_only_token(
    refused, hub, trained, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    err = refused("push", trained, "tester/tiny")
    assert "Invalid user token" in err
    assert "hf_wrong" not in err
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert "not logged in to the Hub; run `hf auth login`" in refused(
        "push", trained, "tester/tiny"
    )
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.role = "read"
    assert "is read-only" in refused("push", trained, "tester/tiny")
    assert hub.repositories == {}


def test_push_refuses_other_accounts_and_public_repositories(refused, hub, trained):
    hub.add("club/theirs")
    hub.add("tester/open")
    for repo_id, reason in (
        ("other/tiny", "other is not your account; you may push to tester, club"),
        ("club/theirs", "you don't have the right to do that"),
        ("club/new", "you have no rights to create a model there"),
        ("tester/open", "is public"),
    ):
        private = ["--private"] if reason == "is public" else []
        err = refused("push", trained, repo_id, *private)
        assert err.startswith(f"{repo_id}: ")
        assert reason in err
        assert err.endswith("nothing was pushed")
    assert all(not hub.commits(repo_id) for repo_id in hub.repositories)


def test_push_without_network_or_in_offline_mode(refused, hub, trained, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("push", trained, "tester/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refused("push", trained, "tester/tiny").endswith("nothing was pushed")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.silent = True
    monkeypatch.setattr(login, "CONNECTION_TIMEOUT", 0.2)
    started = time.monotonic()
    assert "the network: " in refused("push", trained, "tester/tiny")
    assert time.monotonic() - started < 20


@pytest.mark.long
@pytest.mark.parametrize(("fault", "status"), [("/commit/", 413), ("/objects/", 400)])
def test_a_failed_push_commits_nothing(capsys, refused, hub, run, fault, status):
    hub.lfs = True
    hub.faults = {fault: status}
    err = refused("push", run, "tester/tiny")
    assert "as set by the test" in err
    assert err.endswith("nothing was pushed")
    assert hub.commits("tester/tiny") == []
    assert not list(run.glob(".push*"))
    hub.faults = {}
    push(capsys, run, "tester/tiny")
    assert len(hub.commits("tester/tiny")) == 1


def test_push_refuses_a_token_in_a_file(refused, hub, run):
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text() + f"# {hub.token}\n")
    err = refused("push", run, "tester/tiny")
    assert err.startswith(f"{recipe}: contains a token")
    assert err.endswith("nothing was pushed")
    assert hub.token not in err
    assert hub.repositories == {}


@pytest.mark.long
def test_push_shows_results_on_the_page_of_the_model(capsys, hub, trained, text_file, tmp_path):
    results = tmp_path / "results.json"
    words = ["evaluate", str(trained), "--data", str(text_file), "--json", str(results)]
    assert main(words) == 0
    figures = json.loads(results.read_text())
    figures["metrics"] = {
        "data": "/home/me/rows.jsonl",
        "figures": {"rougeL": 0.25, "nan": None, "words": ["a"], "large": 1e999},
        "revision": "sha256:1",
    }
    results.write_text(json.dumps(figures))
    push(capsys, trained, "tester/tiny", "--results", results)
    card = ModelCard(hub.repositories["tester/tiny"].files()["README.md"].decode())
    found = {result.metric_type: result for result in card.data.eval_results}
    assert found.keys() == {"loss", "perplexity", "bits_per_byte", "rougeL"}
    assert found["loss"].metric_value == figures["text"]["loss"]
    assert found["loss"].dataset_name == text_file.name
    assert found["rougeL"].dataset_name == "rows.jsonl"
    assert card.data.model_name == "tiny"
    # what training wrote is still there
    assert card.data.library_name == "transformers"
    assert "## " in card.text


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object"),
        ("{}", "no figures of a text or of metrics"),
        ('{"text": {"loss": null, "data": "a"}}', "no figures"),
        ('{"text": {"loss": NaN, "data": "a"}}', "no figures"),
        ('{"text": 3}', "not a file that `evaluate --json` has written"),
        ('{"metrics": {"rouge": "high"}}', "not a file that `evaluate --json` has written"),
        ('{"metrics": [1]}', "not a file that `evaluate --json` has written"),
        (None, "No such file"),
    ],
)
def test_push_refuses_results_without_figures(refused, hub, trained, tmp_path, content, reason):
    results = tmp_path / "results.json"
    if content is not None:
        results.write_text(content)
    line = refused("push", trained, "tester/tiny", "--results", results)
    assert reason in line
    assert "nothing was pushed" in line
    assert hub.repositories == {}
