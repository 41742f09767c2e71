"""The `import-nanogpt` command."""

import pickle

import numpy as np
import pytest
import torch

from arguments import argv
from nanogpt_hf.commands import main


@pytest.fixture
def nanogpt(tmp_path):
    """A folder as nanoGPT writes it: out/ckpt.pt and data/ with train.bin, val.bin and meta.pkl."""
    width, rows = 8, 4
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "wte": (rows, width),
        "wpe": (16, width),
        "ln_f": (width,),
        "h.0.ln_1": (width,),
        "h.0.ln_2": (width,),
    }
    shapes |= {"h.0.attn.c_attn": (3 * width, width), "h.0.attn.c_proj": (width, width)}
    shapes |= {"h.0.mlp.c_fc": (4 * width, width), "h.0.mlp.c_proj": (width, 4 * width)}
    state = {
        f"transformer.{name}.weight": torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    arguments = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": width,
        "block_size": 16,
        "vocab_size": rows,
        "bias": False,
    }
    (tmp_path / "out").mkdir()
    torch.save(
        {"model": state, "model_args": arguments, "iter_num": 7}, tmp_path / "out" / "ckpt.pt"
    )
    data = tmp_path / "data"
    data.mkdir()
    for name, length in (("train", 400), ("val", 100)):
        (np.arange(length, dtype=np.uint16) * 7 % rows).tofile(data / f"{name}.bin")
    meta = {
        "vocab_size": rows,
        "itos": dict(enumerate("\nabc")),
        "stoi": {c: i for i, c in enumerate("\nabc")},
    }
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    return tmp_path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def file_names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_import_checkpoint_and_sample(capsys, nanogpt):
    out = nanogpt / "new" / "model"
    checkpoint = nanogpt / "out" / "ckpt.pt"
    status, output, _ = run(
        capsys, "import-nanogpt", checkpoint, out, "--meta", nanogpt / "data" / "meta.pkl"
    )
    assert status == 0
    assert output.splitlines()[-4:] == [
        f"{out}: a GPT-2 with 952 parameters (1 layers, 2 heads, 8 wide, 16 positions, 4 tokens)",
        "  trained with: nanoGPT",
        "  steps: 7",
        f"next: python cli.py sample {out}",
    ]
    assert file_names(out.parent) == ["model"]
    assert "trained by nanoGPT" in (out / "README.md").read_text()
    status, text, _ = run(capsys, "sample", out, "--max-new-tokens", 20, "--prompt", "ab")
    assert status == 0
    assert len(text) == 23
    assert set(text) <= set("\nabc")


def test_import_data_and_pretrain_on_it(capsys, nanogpt, write_recipe):
    out = nanogpt / "prepared"
    status, output, _ = run(capsys, "import-nanogpt", nanogpt / "data", out)
    assert status == 0
    assert "  train      1 documents, 400 tokens, 1.00 bytes per token\n" in output
    assert "  validation 1 documents, 100 tokens, 1.00 bytes per token\n" in output
    options = output.splitlines()[-1].removeprefix("next: python cli.py pretrain RECIPE ").split()
    assert options == argv(
        "--data.dir {} --data.source {} --data.tokenizer char", out, nanogpt / "data"
    )
    status, output, err = run(
        capsys, "pretrain", write_recipe(), *options, "--run-dir", nanogpt / "run"
    )
    assert status == 0, err
    assert "is prepared already" in output
    assert (nanogpt / "run" / "final" / "model.safetensors").is_file()


def test_import_mistakes_are_one_line_and_write_nothing(capsys, nanogpt):
    (nanogpt / "full").mkdir()
    (nanogpt / "full" / "mine.txt").write_text("mine")
    checkpoint, data, meta = (
        nanogpt / "out" / "ckpt.pt",
        nanogpt / "data",
        nanogpt / "data" / "meta.pkl",
    )
    before = sorted(nanogpt.rglob("*"))
    for arguments, message in (
        (
            [nanogpt / "none.pt", nanogpt / "x"],
            "none.pt: no such file or folder; give nanoGPT's ckpt.pt",
        ),
        (
            [checkpoint, nanogpt / "full", "--meta", meta],
            "full: exists already; choose another OUT",
        ),
        ([data, nanogpt / "full"], "full: exists already; choose another OUT"),
        ([checkpoint, meta, "--meta", meta], "meta.pkl: exists already; choose another OUT"),
        ([checkpoint, meta / "x", "--meta", meta], "cannot be written: Not a directory"),
        ([checkpoint, nanogpt / "deep" / "x"], "its vocabulary of 4 tokens is not GPT-2's"),
        ([nanogpt / "full", nanogpt / "deep" / "x"], "train.bin: cannot be read: No such file"),
        (
            [checkpoint, nanogpt / "x", "--train.seed", "3"],
            "this command reads no recipe and has no knobs",
        ),
        ([checkpoint], "the following arguments are required: OUT"),
    ):
        status, _, err = run(capsys, "import-nanogpt", *arguments)
        assert status == 2
        assert message in err
        assert err.count("\n") == 1
        assert sorted(nanogpt.rglob("*")) == before


def test_interrupted_import_writes_nothing(capsys, nanogpt, monkeypatch):
    def interrupted(folder, *arguments):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr("nanogpt_hf.export.model_folder.write_model_folder", interrupted)
    meta = nanogpt / "data" / "meta.pkl"
    with pytest.raises(KeyboardInterrupt):
        run(
            capsys,
            "import-nanogpt",
            nanogpt / "out" / "ckpt.pt",
            nanogpt / "new" / "model",
            "--meta",
            meta,
        )
    assert file_names(nanogpt) == ["data", "out"]
