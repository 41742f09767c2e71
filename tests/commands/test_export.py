"""The `export` command; the folders open without this package."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from arguments import argv
from assertions import run_without_this_package
from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import (
    char_tokenizer,
    encode_ordinary,
    gpt2_tokenizer,
    load_tokenizer,
)
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


def save(folder, tokenizer="\nabcd", config=CONFIG) -> GPTForCausalLM:
    torch.manual_seed(0)
    model = GPTForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokenizer = char_tokenizer(list(tokenizer)).hf if tokenizer else None
    write_model_folder(folder, config, model.state_dict(), tokenizer, "the card")
    return model


def export(capsys, *arguments: object) -> list[str]:
    assert main(["export", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # printed by DeepSpeed if it is installed
    return [line for line in lines if not line.startswith("[")]


def test_export_prints_difference_of_logits(capsys, tmp_path):
    model = save(tmp_path / "model")
    lines = export(capsys, tmp_path / "model", tmp_path / "out")
    assert lines[0] == f"{tmp_path / 'out'}: {tmp_path / 'model'} as plain GPT-2, float32"
    assert lines[1] == "  model.safetensors, 0.0 MB"
    assert lines[2].startswith("  opened again with transformers: logits up to ")
    assert float(lines[2].rpartition(" ")[2]) < 1e-5
    assert (tmp_path / "out" / "README.md").read_text() == "the card"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(exported), logits_of(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_half_precision_in_shards(capsys, tmp_path, option, dtype):
    save(tmp_path / "model")
    lines = export(
        capsys, tmp_path / "model", tmp_path / "out", "--dtype", option, "--max-shard-size", "5KB"
    )
    assert 0 < float(lines[2].rpartition(" ")[2]) < 0.5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert {
        weight.dtype
        for weight in AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters()
    } == {dtype}


def test_export_refuses_weight_too_large_for_fp16(capsys, tmp_path):
    model = save(tmp_path / "model")
    model.transformer.wpe.weight.data[0, 0] = 1e6
    write_model_folder(tmp_path / "model", CONFIG, model.state_dict(), None, None)
    assert main(argv("export {} {} --dtype fp16", tmp_path / "model", tmp_path / "out")) == 2
    assert "transformer.wpe.weight is too large for float16; use bf16" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_with_other_logits_is_removed(tmp_path, monkeypatch):
    save(tmp_path / "model")
    wrong = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wrong.transformer.ln_f.weight.data += 0.01
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: wrong)
    with pytest.raises(RuntimeError, match="logits differ by"):
        main(["export", str(tmp_path / "model"), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_without_tokenizer(capsys, tmp_path):
    save(tmp_path / "model", tokenizer="")
    lines = export(capsys, tmp_path / "model", tmp_path / "out")
    assert lines[-1] == f"  no tokenizer: {tmp_path / 'model'} has none"
    assert not list((tmp_path / "out").glob("tokenizer*"))


OPEN = """
import sys, torch, transformers
expected = torch.load(sys.argv[1], weights_only=True)
for folder, (ids, logits, text_ids) in expected.items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a cat")["input_ids"] == text_ids, folder
    print(type(model).__name__, (model(ids).logits - logits).abs().max().item())
"""


@pytest.mark.long
def test_model_folders_open_without_this_package(capsys, tmp_path, write_recipe):
    run = tmp_path / "run"
    recipe = write_recipe(data__tokenizer="bpe", data__vocab_size=280)
    assert main(argv("pretrain {} --run-dir {}", recipe, run)) == 0
    save(tmp_path / "char", tokenizer=list("\n act"))
    folders = [run / "best", run / "final", tmp_path / "exported"]
    export(capsys, tmp_path / "char", folders[-1], "--dtype", "bf16", "--max-shard-size", "5KB")
    gpt2 = GPTConfig(
        **CONFIG.to_diff_dict()
        | {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
    )
    folders.append(tmp_path / "gpt2")  # as written by import-nanogpt with GPT-2's vocabulary
    write_model_folder(
        folders[-1], gpt2, GPTForCausalLM(gpt2).state_dict(), gpt2_tokenizer().hf, ""
    )
    expected = {}
    for folder in folders:
        model = GPTForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = encode_ordinary(load_tokenizer(folder), "a cat")
        expected[str(folder)] = fixed_input(model.config), logits_of(model), ids
    torch.save(expected, tmp_path / "expected.pt")
    output = run_without_this_package(OPEN, tmp_path, str(tmp_path / "expected.pt"))
    lines = [line.split() for line in output.splitlines()]
    assert len(lines) == 4
    for kind, difference in lines:
        assert kind == "GPT2LMHeadModel"
        assert float(difference) < 1e-5


@pytest.mark.parametrize(("kind", "package"), [("gguf", "gguf"), ("onnx", "onnxscript")])
def test_export_format_without_package_names_the_extra(
    capsys, tmp_path, monkeypatch, kind, package
):
    find_spec = importlib.util.find_spec
    missing = ("gguf", "onnx", "onnxscript", "onnxruntime")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name in missing else find_spec(name, *a),
    )
    assert main(argv("export {} {} --format {}", tmp_path, tmp_path / "out", kind)) == 2
    err = capsys.readouterr().err
    assert package in err
    assert f"run `pip install 'nanogpt_hf[{kind}]'`" in err


def test_export_gguf(capsys, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    save(tmp_path / "model")
    lines = export(capsys, tmp_path / "model", tmp_path / "out", "--format", "gguf")
    assert lines[1].startswith("  model.gguf, ")
    assert float(lines[2].rpartition(" ")[2]) < 1e-5
    assert lines[3].startswith(
        "  readers of GGUF compute the tanh form of GELU, this model has the exact one"
    )
    assert 0 < float(lines[3].rpartition(" ")[2]) < 0.1
    # a folder for other programs: one line, no traceback
    assert main(["sample", str(tmp_path / "out")]) == 2
    assert "cannot be loaded as a language model" in capsys.readouterr().err


@pytest.mark.long
def test_export_onnx(capsys, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    save(tmp_path / "model")
    assert (
        main(argv("export {} {} --format onnx --dtype bf16", tmp_path / "model", tmp_path / "out"))
        == 2
    )
    assert "--dtype: an ONNX graph is written in float32 only" in capsys.readouterr().err
    lines = export(capsys, tmp_path / "model", tmp_path / "out", "--format", "onnx")
    assert lines[1].startswith("  model.onnx, ")
    assert lines[2].startswith("  opened again with onnxruntime: ")
    assert float(lines[2].rpartition(" ")[2]) < 1e-4
