"""A missing path is never looked up on the Hub; a lookup is printed first."""

import json
import os
import shutil

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config import names
from nanogpt_hf.data.hf_tokenizer import load_tokenizer
from nanogpt_hf.errors import UserError

PATHS = ["runs/quickstart", "./mine", "/no/where", "~/no/where", "a/b/c", "taken/best"]


@pytest.fixture
def hub_of_stranger(hub, letter_model, tmp_path, monkeypatch):
    """A Hub where a stranger owns repositories with the names of our paths; the working folder
    holds `taken`.
    """
    names._announce.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    files = {path.name: path.read_bytes() for path in letter_model.iterdir()}
    for repository in ("runs/quickstart", "taken/best", "tester/letters"):
        hub.add(repository).files().update(files)
    return hub


COMMANDS = [
    ["sample", "MODEL"],
    ["evaluate", "MODEL", "--data", "TEXT"],
    ["push", "MODEL", "tester/x"],
    ["finetune", "--from", "MODEL", "--data", "TEXT"],
    ["estimate", "RECIPE", "--finetune.model", "MODEL"],
    ["prepare", "RECIPE", "--data.tokenizer", "MODEL"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda arguments: arguments[0])
def test_missing_path_is_one_line_without_a_request(
    command, hub_of_stranger, text_file, write_recipe, capsys
):
    for path in PATHS if command[0] == "sample" else PATHS[:2]:  # one function judges them all
        names = {"MODEL": path, "TEXT": str(text_file), "RECIPE": str(write_recipe())}
        capsys.readouterr()
        assert main([names.get(argument, argument) for argument in command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{os.path.expanduser(path)}: no such folder" in err
        assert err.count("\n") == 1
    assert hub_of_stranger.requests == []


def test_missing_adapter_base_is_one_line(hub_of_stranger, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    for base in ("runs/quickstart", "/no/where"):
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        assert main(["sample", "adapter"]) == 2
        err = capsys.readouterr().err
        assert f"{base}: no such folder; a path is not looked up on the Hub" in err
        assert err.count("\n") == 1
    assert hub_of_stranger.requests == []


def test_existing_path_comes_first_and_tilde_is_home(letter_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(letter_model, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/mine", "~/runs/mine", "./runs/mine"):
        assert len(load_tokenizer(name)) == 11
        assert main(["sample", name, "--max-new-tokens", "1"]) == 0
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer("~/runs/other")
