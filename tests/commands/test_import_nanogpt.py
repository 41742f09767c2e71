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
    shapes = {"wte": (rows, width), "wpe": (16, width)}
    shapes |= dict.fromkeys(("ln_f", "h.0.ln_1", "h.0.ln_2"), (width,))
    shapes |= {"h.0.attn.c_attn": (3 * width, width), "h.0.attn.c_proj": (width, width)}
    shapes |= {"h.0.mlp.c_fc": (4 * width, width), "h.0.mlp.c_proj": (width, 4 * width)}
    state = {
        f"transformer.{name}.weight": torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": width, "block_size": 16, "vocab_size": rows}
    saved = {"model": state, "model_args": sizes | {"bias": False}}
    (tmp_path / "out").mkdir()
    torch.save(saved, tmp_path / "out" / "ckpt.pt")
    data = tmp_path / "data"
    data.mkdir()
    for name, length in (("train", 400), ("val", 100)):
        (np.arange(length, dtype=np.uint16) * 7 % rows).tofile(data / f"{name}.bin")
    itos = dict(enumerate("\nabc"))
    meta = {"vocab_size": rows, "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    return tmp_path


def run(capsys, command: str, *places: object) -> tuple[int, str, str]:
    return main(argv(command, *places)), *capsys.readouterr()


def test_import_checkpoint_and_sample(capsys, nanogpt):
    out = nanogpt / "new" / "model"
    files = nanogpt / "out/ckpt.pt", out, nanogpt / "data/meta.pkl"
    status, output, _ = run(capsys, "import-nanogpt {} {} --meta {}", *files)
    assert status == 0
    assert output.splitlines()[-2:] == [
        f"{out}: a GPT-2 with 952 parameters",
        f"next: python cli.py sample {out}",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    status, text, _ = run(capsys, "sample {} --max-new-tokens 20 --prompt ab", out)
    assert status == 0
    assert len(text) == 23
    assert set(text) <= set("\nabc")


def test_import_data_and_pretrain_on_it(capsys, nanogpt, write_recipe):
    out = nanogpt / "prepared"
    status, output, _ = run(capsys, "import-nanogpt {} {}", nanogpt / "data", out)
    assert status == 0
    assert f"{out}: 400 tokens, 100 to validate\n" in output
    options = output.splitlines()[-1].removeprefix("next: python cli.py pretrain RECIPE ").split()
    assert options == argv(
        "--data.dir {} --data.source {} --data.tokenizer char", out, nanogpt / "data"
    )
    command = ["pretrain", str(write_recipe()), *options, "--run-dir", str(nanogpt / "run")]
    assert main(command) == 0
    assert "is prepared already" in capsys.readouterr().out
    assert (nanogpt / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.pt x", "none.pt: no such file or folder"),
        ("out/ckpt.pt full --meta data/meta.pkl", "full: exists already"),
        ("data full", "full: exists already"),
        ("out/ckpt.pt data/meta.pkl --meta data/meta.pkl", "meta.pkl: exists already"),
        ("out/ckpt.pt data/meta.pkl/x --meta data/meta.pkl", "Not a directory"),
        ("out/ckpt.pt x", "has 4 tokens, the vocabulary of GPT-2 50,257"),
        ("full x", "train.bin: No such file"),
        ("out/ckpt.pt x --train.seed 3", "has no knobs"),
        ("out/ckpt.pt", "OUT"),
    ],
)
def test_import_mistake_is_one_line_and_writes_nothing(refused, nanogpt, words, message):
    (nanogpt / "full").mkdir()
    (nanogpt / "full" / "mine.txt").write_text("mine")
    assert message in refused("import-nanogpt", *words.split())
