"""GGUF by llama.cpp's programs: the real ones where they are installed, and scripts in their place
that fail in ways of their own.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'nanogpt_hf[gguf]'")

from nanogpt_hf.commands import main  # noqa: E402
from nanogpt_hf.export.llama_cpp import CONVERTER, QUANTIZER, VARIABLE, find_program  # noqa: E402

pytestmark = pytest.mark.long

_CONVERTER = """\
import sys, gguf, safetensors.numpy
folder, out, kind = sys.argv[1], sys.argv[3], sys.argv[5]
assert kind == "f32"
weights = safetensors.numpy.load_file(folder + "/model.safetensors")
writer = gguf.GGUFWriter(out, "olmo2")
(name,) = [name for name in weights if "embed_tokens" in name]
writer.add_tensor("token_embd.weight", weights[name] + {shift})
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
writer.close()
"""
_QUANTIZER = """\
import sys, gguf
source, out, kind = sys.argv[1:]
assert kind == "Q8_0"
writer = gguf.GGUFWriter(out, "gpt2")
q8 = gguf.GGMLQuantizationType.Q8_0
for tensor in gguf.GGUFReader(source).tensors{some}:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if values.ndim > 1 and values.shape[-1] % 32 == 0:
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, q8), raw_dtype=q8)
    else:
        writer.add_tensor(tensor.name, values)
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
writer.close()
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder in place of llama.cpp; write(converter=..., quantizer=...) fills it."""
    folder = tmp_path / "llama.cpp"
    (folder / "build" / "bin").mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))

    def write(converter: str | None = None, quantizer: str | None = None) -> None:
        if converter is not None:
            (folder / CONVERTER).write_text(converter)
        if quantizer is not None:
            path = folder / "build" / "bin" / QUANTIZER
            path.write_text(f"#!{sys.executable}\n{quantizer}")
            path.chmod(0o755)

    return write


@pytest.fixture(scope="module")
def olmo(tmp_path_factory, byte_tokenizer) -> Path:
    """A model of a type that export/gguf.py does not write."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("olmo") / "olmo"
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "olmo2",
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def export(*words: object) -> int:
    return main(["export", *map(str, words), "--format", "gguf"])


def test_other_architectures_are_converted(programs, olmo, tmp_path, capsys):
    programs(converter=_CONVERTER.format(shift=0))
    out = tmp_path / "out"
    assert export(olmo, out) == 0
    printed = capsys.readouterr().out
    assert f"  written by {CONVERTER}: token embeddings differ by at most 0\n" in printed
    assert f"next: llama-cli -m {out}/model.gguf" in printed
    assert {path.name for path in out.iterdir()} == {"model.gguf", "README.md"}


def test_difference_of_the_embeddings_is_printed(programs, olmo, tmp_path, capsys):
    programs(converter=_CONVERTER.format(shift=0.5))
    assert export(olmo, tmp_path / "out") == 0
    assert "token embeddings differ by at most 0.5\n" in capsys.readouterr().out


def test_our_own_file_is_quantized(programs, letter_model, tmp_path, capsys):
    programs(quantizer=_QUANTIZER.format(some=""))
    plain = tmp_path / "plain"
    small = tmp_path / "small"
    assert export(letter_model, plain) == 0
    assert export(letter_model, small, "--quantize", "q8_0") == 0
    out = capsys.readouterr().out
    assert f"{small}: {letter_model} as GGUF, q8_0" in out
    assert f"quantized by {QUANTIZER}: {(small / 'model.gguf').stat().st_size:,} bytes" in out
    before, after = (
        {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in gguf.GGUFReader(folder / "model.gguf").tensors
        }
        for folder in (plain, small)
    )
    assert before.keys() == after.keys()
    error = np.sqrt(
        sum(np.square(after[name] - before[name]).sum() for name in before)
        / sum(np.square(values).sum() for values in before.values())
    )
    assert f"weights changed by {error:.2%}" in out
    assert 0 < error < 0.01
    assert {path.name for path in small.iterdir()} == {path.name for path in plain.iterdir()}


@pytest.mark.parametrize(
    ("converter", "quantizer", "options", "reason"),
    [
        (None, None, [], "olmo2 is not supported"),
        (None, None, ["--quantize", "q4_k_m"], f"needs llama.cpp's {QUANTIZER}; install"),
        ("import no_such_package", None, [], "No module named 'no_such_package'; install it"),
        ("import sys; sys.exit(3)", None, [], f"{CONVERTER}: exit status 3"),
        ("1 / 0", None, [], f"{CONVERTER}: ZeroDivisionError: division by zero"),
        (_CONVERTER.format(shift=0), "1 / 0", ["--quantize", "q8_0"], f"{QUANTIZER}: ZeroDiv"),
        (
            _CONVERTER.format(shift=0),
            _QUANTIZER.format(some="[:0]"),
            ["--quantize", "q8_0"],
            "wrote other tensors",
        ),
        ("pass", None, [], "model.gguf: llama.cpp's program ended well and wrote no file"),
        (None, None, ["--quantize", "q4_k_m", "--dtype", "fp16"], "and no --dtype"),
    ],
    ids=[
        "no converter",
        "no quantizer",
        "module",
        "status",
        "converter fails",
        "quantizer fails",
        "tensors lost",
        "no file",
        "dtype",
    ],
)
def test_failures_are_one_line_and_leave_nothing(
    converter, quantizer, options, reason, programs, olmo, tmp_path, capsys
):
    programs(converter, quantizer)
    out = tmp_path / "out"
    assert export(olmo, out, *options) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.splitlines()[-1] in err
    assert "Traceback" not in err
    assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"llama.cpp"}


def test_quantize_is_of_gguf_files(refused, letter_model):
    line = refused("export", letter_model, "out", "--quantize", "q4_k_m")
    assert "--quantize: is of GGUF files" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_k_m", "q8_0"])
def test_real_programs(olmo, tmp_path, capsys, kind):
    if find_program(CONVERTER) is None or find_program(QUANTIZER) is None:
        pytest.skip(f"llama.cpp is not installed; {VARIABLE} names its folder")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    assert export(olmo, tmp_path / "out", "--quantize", kind) == 0
    out = capsys.readouterr().out
    assert "token embeddings differ by at most 0\n" in out
    assert "weights changed by" in out
