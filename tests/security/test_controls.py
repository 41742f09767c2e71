"""Control characters in text of a model, file or server are escaped on a terminal."""

import io
import json
import shutil
import sys

import pytest
import torch

from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.formatting import escape_controls
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

CONTROLS = "a\x1b]0;title\x07b\x1b[2Jc\x9b31m\x7f\x00\x08"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_escape_controls_escapes_control_characters():
    for code in (*range(9), *range(11, 32), *range(127, 160)):
        assert chr(code) not in escape_controls(f"a{chr(code)}b"), code


@pytest.fixture(scope="module")
def control_model(tmp_path_factory):
    """A model whose vocabulary is mostly control characters."""
    folder = tmp_path_factory.mktemp("evil")
    characters = sorted({*"a\n", *CONTROLS})
    torch.manual_seed(0)
    no_special_tokens = {"bos_token_id": None, "eos_token_id": None}
    model = GPTForCausalLM(
        GPTConfig(
            vocab_size=len(characters),
            n_positions=32,
            n_embd=8,
            n_layer=1,
            n_head=1,
            **no_special_tokens,
        )
    )
    model.save_pretrained(folder)
    char_tokenizer(characters).hf.save_pretrained(folder)
    return folder


def test_samples_are_escaped_only_on_a_terminal(control_model, monkeypatch, capsys):
    arguments = [
        "sample",
        str(control_model),
        "--prompt",
        "a\x1b[2J",
        "--max-new-tokens",
        "60",
        "--num-samples",
        "2",
    ]
    assert main(arguments) == 0
    raw = capsys.readouterr().out
    assert "\x1b" in raw
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(arguments) == 0
    escaped = terminal.getvalue()
    assert escaped == escape_controls(raw)
    assert "\x1b" not in escaped


def error_of(arguments, capsys) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_error_lines_escape_controls(control_model, tmp_path, capsys, write_recipe):
    recipe = write_recipe()
    lines = recipe.read_text() + '"evil\\e[2J": {"x\\a": 1}\n'
    recipe.write_text(lines)
    model = shutil.copytree(control_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt\x1b[2J"}))
    for arguments in (
        ["prepare", str(recipe)],
        ["sample", str(model)],
        ["sample", "no\x1b[2Jwhere/at/all"],
        ["pretrain", str(recipe), "--a.\x1b[2J", "1"],
        ["report", str(tmp_path), "\x1b[2J"],
    ):
        err = error_of(arguments, capsys)
        assert "\\x1b[2J" in err
        assert not [c for c in err if c != "\n" and not c.isprintable()]
