"""The `export` command; the folders open without this package."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from arguments import argv
from assertions import run_without_this_package
from nanogpt_hf.commands import main
from nanogpt_hf.commands.convert import _use_of_export
from nanogpt_hf.data.hf_tokenizer import encode_ordinary, load_tokenizer
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.export.card import card_without_run
from nanogpt_hf.export.model_folder import fixed_input, logits_of, write_model_folder
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

SIZES = {"vocab_size": 5, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
SIZES |= {"bias": False, "activation_function": "gelu"}
CONFIG = GPTConfig(**SIZES, bos_token_id=None, eos_token_id=None)


@pytest.fixture
def model(tmp_path, monkeypatch) -> GPTForCausalLM:
    """A model that is saved in the working folder as `model`, with a tokenizer and a card."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = GPTForCausalLM(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokenizer = char_tokenizer(list("\n act")).hf
    write_model_folder(tmp_path / "model", CONFIG, model.state_dict(), tokenizer, "the card")
    return model


def export(capsys, options: str = "") -> list[str]:
    assert main(argv(f"export model out {options}")) == 0
    lines = capsys.readouterr().out.splitlines()
    # printed by DeepSpeed if it is installed
    return [line for line in lines if not line.startswith("[")]


def last_number(line: str) -> float:
    return float(line.rpartition(" ")[2])


def test_export_prints_difference_of_logits(capsys, model):
    lines = export(capsys)
    assert lines[0] == "out: model as plain GPT-2, float32"
    assert lines[1].startswith("  opened again with transformers: logits up to ")
    assert lines[2].startswith("next: ")
    assert last_number(lines[1]) < 1e-5
    assert Path("out/README.md").read_text() == "the card"
    exported = AutoModelForCausalLM.from_pretrained("out")
    torch.testing.assert_close(logits_of(exported), logits_of(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_half_precision(capsys, model, option, dtype):
    assert 0 < last_number(export(capsys, f"--dtype {option}")[1]) < 0.5
    exported = AutoModelForCausalLM.from_pretrained("out")
    assert {weight.dtype for weight in exported.parameters()} == {dtype}


OPEN = """
import sys, torch, transformers
expected = torch.load(sys.argv[1], weights_only=True)
for folder, (ids, logits, text_ids) in expected.items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a cat")["input_ids"] == text_ids, folder
    print(type(model).__name__, (model(ids).logits - logits).abs().max().item() < 1e-5)
"""


@pytest.mark.long
def test_model_folders_open_without_this_package(capsys, model, tmp_path, write_recipe):
    run = tmp_path / "run"
    recipe = write_recipe(data__tokenizer="bpe", data__vocab_size=280)
    assert main(argv("pretrain {} --run-dir {}", recipe, run)) == 0
    export(capsys, "--dtype bf16")
    expected = {}
    for folder in (run / "best", run / "final", tmp_path / "out"):
        model = GPTForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = encode_ordinary(load_tokenizer(folder), "a cat")
        expected[str(folder)] = fixed_input(model.config), logits_of(model), ids
    torch.save(expected, tmp_path / "expected.pt")
    output = run_without_this_package(OPEN, tmp_path, str(tmp_path / "expected.pt"))
    assert output.splitlines() == ["GPT2LMHeadModel True"] * 3


def test_export_gguf(capsys, model, refused):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    lines = export(capsys, "--format gguf")
    assert last_number(lines[1]) < 1e-5
    # a folder for other programs
    assert "cannot be loaded as a language model" in refused("sample", "out")


# A conversion to ONNX takes three seconds.
KINDS = ["safetensors", "gguf", pytest.param("onnx", marks=pytest.mark.slow)]


@pytest.mark.long
def test_export_onnx(capsys, model, refused):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    assert "--dtype: " in refused(*argv("export model out --format onnx --dtype bf16"))
    lines = export(capsys, "--format onnx")
    assert lines[1].startswith("  opened again with onnxruntime: ")
    assert last_number(lines[1]) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_export_to_a_full_disk_is_one_line_and_leaves_nothing(
    model, volume, capsys, kind, monkeypatch
):
    for package in {"gguf": ["gguf"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}.get(kind, []):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    usage = os.statvfs(volume)
    (volume / "ballast").write_bytes(bytes(usage.f_bavail * usage.f_frsize - 9000))
    assert main(argv("export model {} --format {}", volume / "new" / "out", kind)) == 2
    _, err = capsys.readouterr()
    assert err == f"{volume}/new/out: cannot be written: No space left on device\n"
    assert [path.name for path in volume.iterdir()] == ["ballast"]


def test_failed_export_leaves_no_new_parent(model, tmp_path, refused):
    (tmp_path / "file").write_text("")
    (tmp_path / "kept").mkdir()
    for folder in ("./nothing", "./file"):
        for out in ("new/a/b", "kept/a/b", "file/a"):
            refused("export", folder, out)
    assert "file/a: cannot be written: Not a directory" in refused("export", "model", "file/a")


@pytest.fixture(scope="module")
def convert_once(tmp_path_factory):
    """A function like `export_onnx` that converts the model once, and later copies the files."""
    from nanogpt_hf.export.onnx import export_onnx

    converted = tmp_path_factory.mktemp("onnx")
    differences = []

    def convert(folder, model, tokenizer):
        if not differences:
            differences.append(export_onnx(converted, model, tokenizer))
        shutil.copytree(converted, folder, dirs_exist_ok=True)
        return differences[0]

    return convert


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("card", [None, "the card", "of a run", "of an adapter"])
def test_every_export_has_a_card(model, capsys, monkeypatch, request, kind, card):
    for package in {"gguf": ["gguf"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}.get(kind, []):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    if kind == "onnx":
        convert = request.getfixturevalue("convert_once")
        monkeypatch.setattr("nanogpt_hf.export.onnx.export_onnx", convert)
    path = Path("model/README.md")
    path.unlink()
    if card and card.startswith("of"):
        library = {"of a run": "transformers", "of an adapter": "peft"}[card]
        card = card_without_run(CONFIG, "made by a test", library)
    if card is not None:
        path.write_text(card)
    export(capsys, f"--format {kind}")
    written = Path("out/README.md").read_text()
    library = {"safetensors": "transformers"}.get(kind, kind)
    if card == "the card":
        assert written.startswith("the card")
    else:
        assert ModelCard(written).data.library_name == library
        assert ("AutoModelForCausalLM" in written) == (library == "transformers")
        assert "peft" not in written.lower()
    assert (f"model.{kind}" in written) == (kind != "safetensors")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("gguf", "gguf"), ("My Model", "my-model"), ("ö6.Q8_0", "6.q8_0"), ("-", "model")],
)
def test_name_for_ollama_has_characters_that_it_accepts(tmp_path, folder, name):
    out = tmp_path / folder
    out.mkdir()
    (out / "Modelfile").touch()
    assert _use_of_export("gguf", out).startswith(f"ollama create {name} -f ")
