"""export as a user types it; what it writes opens where this package is not installed."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import char_tokenizer, encode_ordinary, gpt2_tokenizer, load_tokenizer
from nanogpt_hf.export.model_folder import fixed_input, logits_of, write_model_folder
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

CONFIG = GPTConfig(
    vocab_size=5,
    n_positions=12,
    n_embd=16,
    n_layer=2,
    n_head=2,
    bias=False,
    activation_function="gelu",
    bos_token_id=None,
    eos_token_id=None,
)


def save(folder, tokenizer=True, config=CONFIG) -> GPTForCausalLM:
    torch.manual_seed(0)
    model = GPTForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokenizer = char_tokenizer(list("\nabcd")).hf if tokenizer else None
    write_model_folder(folder, config, model.state_dict(), tokenizer, "the card")
    return model


def export(capsys, *arguments: object) -> list[str]:
    assert main(["export", *map(str, arguments)]) == 0
    said = capsys.readouterr().out.splitlines()
    return [line for line in said if not line.startswith("[")]  # deepspeed's, where it is installed


def test_a_model_is_written_anew_and_the_difference_said(capsys, tmp_path):
    model = save(tmp_path / "model")
    said = export(capsys, tmp_path / "model", tmp_path / "out")
    assert said[0] == f"{tmp_path / 'out'}: {tmp_path / 'model'} as plain GPT-2, float32"
    assert said[1] == "  model.safetensors, 0.0 MB"
    assert said[2].startswith("  opened again with transformers: logits up to ")
    assert float(said[2].rpartition(" ")[2]) < 1e-5
    assert (tmp_path / "out" / "README.md").read_text() == "the card"
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(opened), logits_of(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_in_several_files(capsys, tmp_path, option, dtype):
    save(tmp_path / "model")
    said = export(capsys, tmp_path / "model", tmp_path / "out", "--dtype", option, "--max-shard-size", "5KB")
    assert 0 < float(said[2].rpartition(" ")[2]) < 0.5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert {weight.dtype for weight in AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters()} == {dtype}


def test_a_weight_too_large_for_half_precision_is_said(capsys, tmp_path):
    model = save(tmp_path / "model")
    model.transformer.wpe.weight.data[0, 0] = 1e6
    write_model_folder(tmp_path / "model", CONFIG, model.state_dict(), None, None)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "fp16"]) == 2
    assert "transformer.wpe.weight is too large for float16; use bf16" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_computes_something_else_is_not_left_behind(tmp_path, monkeypatch):
    save(tmp_path / "model")
    wrong = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wrong.transformer.ln_f.weight.data += 0.01
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: wrong)
    with pytest.raises(RuntimeError, match="logits differ by"):
        main(["export", str(tmp_path / "model"), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_a_tokenizer_is_exported_without_one(capsys, tmp_path):
    save(tmp_path / "model", tokenizer=False)
    said = export(capsys, tmp_path / "model", tmp_path / "out")
    assert said[-1] == f"  no tokenizer: {tmp_path / 'model'} has none"
    assert not list((tmp_path / "out").glob("tokenizer*"))


OPEN = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "nanogpt_hf", "nanogpt_hf was imported"
sys.meta_path.insert(0, Blocked())
import torch, transformers
expected = torch.load(sys.argv[1], weights_only=True)
for folder, (ids, logits, text_ids) in expected.items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a cat")["input_ids"] == text_ids, folder
    print(type(model).__name__, (model(ids).logits - logits).abs().max().item())
"""


@pytest.mark.long
def test_every_kind_of_model_folder_opens_in_a_process_without_this_package(capsys, tmp_path, write_recipe):
    run = tmp_path / "run"
    assert main(["pretrain", str(write_recipe()), "--run-dir", str(run)]) == 0
    folders = [run / "best", run / "final"]
    for options in ([], ["--dtype", "bf16", "--max-shard-size", "5KB"]):
        folders.append(tmp_path / f"exported{len(options)}")
        export(capsys, run, folders[-1], *options)
    gpt2 = GPTConfig(**CONFIG.to_diff_dict() | {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256})
    folders.append(tmp_path / "gpt2")  # what import-nanogpt writes of a model with GPT-2's vocabulary
    write_model_folder(folders[-1], gpt2, GPTForCausalLM(gpt2).state_dict(), gpt2_tokenizer().hf, "")
    expected = {}
    for folder in folders:
        model = GPTForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = encode_ordinary(load_tokenizer(folder), "a cat")
        expected[str(folder)] = fixed_input(model.config), logits_of(model), ids
    torch.save(expected, tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "expected.pt")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 5
    for kind, difference in lines:
        assert kind == "GPT2LMHeadModel"
        assert float(difference) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["--max-shard-size", "big"], "argument --max-shard-size: expected a size such as 500MB or 5GB, got 'big'"),
        (["--train.seed", "3"], "--train.seed: this command reads no recipe and has no knobs"),
    ],
)
def test_mistakes_on_the_command_line_are_one_clear_line(capsys, tmp_path, options, message):
    assert main(["export", str(tmp_path), str(tmp_path / "out"), *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_that_is_full_or_no_model_is_one_clear_line(capsys, tmp_path):
    save(tmp_path / "model")
    for model, out, message in (
        ("model", "model", "model: exists already; choose another OUT, or remove it first"),
        ("nothing", "out", "nothing: no such folder; a path is not looked up on the Hub"),
        (".", "out", "not a model folder"),
    ):
        assert main(["export", str(tmp_path / model), str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("kind", "package"), [("gguf", "gguf"), ("onnx", "onnxscript")])
def test_a_format_whose_package_is_missing_says_how_to_get_it(capsys, tmp_path, monkeypatch, kind, package):
    find = importlib.util.find_spec
    gone = ("gguf", "onnx", "onnxscript", "onnxruntime")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else find(name, *a))
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--format", kind]) == 2
    err = capsys.readouterr().err
    assert package in err
    assert f"run `pip install 'nanogpt_hf[{kind}]'`" in err


def test_gguf(capsys, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    save(tmp_path / "model")
    said = export(capsys, tmp_path / "model", tmp_path / "out", "--format", "gguf")
    assert said[1].startswith("  model.gguf, ")
    assert float(said[2].rpartition(" ")[2]) < 1e-5
    assert said[3].startswith("  readers of GGUF compute the tanh form of GELU, this model has the exact one")
    assert 0 < float(said[3].rpartition(" ")[2]) < 0.1
    assert main(["sample", str(tmp_path / "out")]) == 2  # a folder for other programs: said, no traceback
    assert "cannot be loaded as a GPT-2 model" in capsys.readouterr().err


@pytest.mark.long
def test_onnx(capsys, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "onnx", "--dtype", "bf16"]) == 2
    assert "--dtype: an ONNX graph is written in float32 only" in capsys.readouterr().err
    said = export(capsys, tmp_path / "model", tmp_path / "out", "--format", "onnx")
    assert said[1].startswith("  model.onnx, ")
    assert said[2].startswith("  opened again with onnxruntime: ")
    assert float(said[2].rpartition(" ")[2]) < 1e-4
