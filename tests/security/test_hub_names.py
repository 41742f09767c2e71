"""A path that does not exist is never looked up on the Hub, and a look-up is printed first."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config import hub_name
from nanogpt_hf.data.tokenizer import load_tokenizer
from nanogpt_hf.errors import UserError

PATHS = [
    "runs/quickstart",
    "./mine",
    "../mine",
    "/no/where",
    "~/no/where",
    "a/b/c",
    "best/",
    "taken/best",
    "user\\name",
]


@pytest.fixture
def stranger(hub, letter_model, tmp_path, monkeypatch):
    """A Hub where a stranger owns repositories named as our paths are; the working folder holds `taken`."""
    hub_name._announce.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    files = {path.name: path.read_bytes() for path in letter_model.iterdir()}
    for repository in ("runs/quickstart", "taken/best", "tester/letters"):
        hub.add(repository).files().update(files)
    return hub


COMMANDS = [
    ["sample", "MODEL"],
    ["chat", "MODEL"],
    ["evaluate", "MODEL", "--data", "TEXT"],
    ["export", "MODEL", "out"],
    ["push", "MODEL", "tester/x"],
    ["finetune", "--from", "MODEL", "--data", "TEXT"],
    ["estimate", "RECIPE", "--finetune.model", "MODEL"],
    ["prepare", "RECIPE", "--data.tokenizer", "MODEL"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_path_that_is_not_there_is_one_line_and_asks_nobody(command, stranger, text_file, write_recipe, capsys):
    for path in PATHS:
        names = {"MODEL": path, "TEXT": str(text_file), "RECIPE": str(write_recipe())}
        capsys.readouterr()
        assert main([names.get(word, word) for word in command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{os.path.expanduser(path)}: no such folder" in err
        assert err.count("\n") == 1
    assert stranger.requests == []


def test_a_name_on_the_hub_is_loaded_after_one_line(stranger, tmp_path, root):
    # in a process of its own: this one read "offline" when it imported the libraries
    words = [sys.executable, str(root / "cli.py"), "sample", "tester/letters", "--prompt", "abc"]
    done = subprocess.run([*words, "--max-new-tokens", "4"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("abc")
    assert done.stderr.startswith("loading tester/letters from the Hub\n")
    assert done.stderr.count("loading tester") == 1
    assert any("tester/letters" in request for request in stranger.requests)


def test_the_base_of_an_adapter_is_no_exception(stranger, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for base in ("runs/quickstart", "/no/where"):
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        assert main(["sample", "adapter"]) == 2
        err = capsys.readouterr().err
        assert f"{base}: no such folder; a path is not looked up on the Hub" in err
        assert err.count("\n") == 1
    assert stranger.requests == []


def test_what_is_there_wins_and_a_tilde_is_the_home(letter_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(letter_model, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/mine", "~/runs/mine", "./runs/mine"):
        assert len(load_tokenizer(name)) == 11
        assert main(["sample", name, "--max-new-tokens", "1"]) == 0
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer("~/runs/other")
