"""Code that comes with a model, tokenizer or data set never runs, and nobody is asked whether it may."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nanogpt_hf"
_LOADERS = ("from_pretrained", "from_config", "load_dataset", "load_dataset_builder", "pipeline", "HFLM")
_NO_PARAMETER = ("Embedding", "PeftConfig")  # `from_pretrained` of these loads no code and has no such parameter


def loads_a_model(call: ast.Call) -> bool:
    """Whether it is `X.from_pretrained(...)`, `AutoX.from_config(...)`, `load_dataset(...)` or the like."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return False  # an override: it passes on what it got
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="from_pretrained"):
            return owner not in _NO_PARAMETER
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _LOADERS
    return False


def is_safe(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    flag = given.get("trust_remote_code")
    return isinstance(flag, ast.Constant) and flag.value is False


def test_every_call_that_could_load_code_says_that_it_must_not():
    calls = [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and loads_a_model(node)
    ]
    assert len(calls) >= 9
    assert [f"{path.name}:{node.lineno}" for path, node in calls if not is_safe(node)] == []


def test_the_check_sees_a_call_without_it():
    bad = ["AutoTokenizer.from_pretrained(x)", "datasets.load_dataset(x)", "a.b.AutoModel.from_pretrained(x, **kw)"]
    bad.append("AutoConfig.from_pretrained(x, trust_remote_code=None)")
    for text in bad:
        call = ast.parse(text, mode="eval").body
        assert loads_a_model(call)
        assert not is_safe(call)


@pytest.fixture
def with_code(tiny_base, tmp_path):
    """A model folder whose config.json names code beside it, which leaves a file `ran` if it is ever run."""
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
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    return folder


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_in_a_terminal_nothing_is_asked_and_nothing_runs(with_code, text_file, write_recipe, tmp_path, root):
    import pty

    commands = [
        ["prepare", str(write_recipe()), "--data.tokenizer", str(with_code)],
        ["sample", str(with_code), "--max-new-tokens", "2"],
        ["finetune", "--from", str(with_code), "--data", str(text_file), "--run-dir", "run"],
    ]
    environment = os.environ | {"PYTHONPATH": str(root)}
    for words in commands:
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, str(root / "cli.py"), *words],
            stdin=follower, stdout=follower, stderr=follower, cwd=tmp_path, env=environment,
        )  # fmt: skip
        os.close(follower)
        os.write(leader, b"y\ny\ny\n")  # what a trusting user answers
        seen = b""
        while True:
            try:
                block = os.read(leader, 4096)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            seen += block
        os.close(leader)
        assert process.wait(timeout=60) == 2, seen
        lines = [line for line in seen.decode().replace("\r", "").splitlines() if line not in ("", "y")]
        assert len(lines) == 1, seen
        assert "tokenizer" in lines[0]
        assert "[y/N]" not in seen.decode()
    assert not (tmp_path / "ran").exists()
