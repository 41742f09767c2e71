"""Code that comes with a model, tokenizer or data set never runs, without a prompt."""

import ast
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from forked import Forked

PACKAGE = Path(__file__).parents[2] / "nanogpt_hf"
# `load_dataset_builder` of datasets 5 runs no code and has no such parameter
_LOADERS = ("from_pretrained", "from_config", "load_dataset", "pipeline", "HFLM")
# `from_pretrained` of these loads no code and has no trust_remote_code
_NO_PARAMETER = ("Embedding", "GenerationConfig", "PeftConfig")


def loads_remote_content(call: ast.Call) -> bool:
    """True for `X.from_pretrained(...)`, `AutoX.from_config(...)`, `load_dataset(...)` and the
    like.
    """
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return False  # an override passes on its arguments
        case ast.Attribute(
            value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="from_pretrained"
        ):
            return owner not in _NO_PARAMETER
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _LOADERS
    return False


def is_safe(call: ast.Call) -> bool:
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    flag = arguments.get("trust_remote_code")
    return isinstance(flag, ast.Constant) and flag.value is False


def test_every_loading_call_has_trust_remote_code_false():
    calls = [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and loads_remote_content(node)
    ]
    assert len(calls) >= 8
    assert [f"{path.name}:{node.lineno}" for path, node in calls if not is_safe(node)] == []


@pytest.fixture
def with_code(tiny_base, tmp_path):
    """A model folder whose config.json names code in the folder, which writes the file `ran`."""
    folder = shutil.copytree(tiny_base, tmp_path / "model")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n"
    (folder / "evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoTokenizer": ["evil.Tokenizer", None],
        "AutoModelForCausalLM": "evil.Config",
    }
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config | {"bias": True}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
        "tokenizer_class": "Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_remote_code_never_runs_in_a_terminal(with_code, text_file, write_recipe, tmp_path):
    import pty

    for arguments in (
        ["prepare", write_recipe(), "--data.tokenizer", with_code],
        ["sample", with_code, "--max-new-tokens", 2],
        ["finetune", "--from", with_code, "--data", text_file, "--run-dir", "run"],
    ):
        leader, follower = pty.openpty()
        process = Forked(arguments, folder=tmp_path, terminal=os.ttyname(follower))
        os.close(follower)
        os.write(leader, b"y\ny\ny\n")  # a user who agrees
        output = b""
        while True:
            try:
                block = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            output += block
        os.close(leader)
        assert process.wait(60) == 2, output
        lines = [
            line for line in output.decode().replace("\r", "").splitlines() if line not in ("", "y")
        ]
        assert len(lines) == 1, output
        assert "tokenizer" in lines[0]
        assert "[y/N]" not in output.decode()
    assert not (tmp_path / "ran").exists()
