"""Import of nanoGPT's files: equal weights and tokens; refusal of damaged or hostile ones."""

import errno
import os
import pickle
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from arguments import argv
from assertions import refusal
from nanogpt_files import CHARACTERS, is_matrix, make_meta, make_state, write_bins
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import gpt2_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.export import nanogpt as module
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.export.nanogpt import import_bins, load_meta, load_nanogpt

refused = partial(refusal, error=UserError)
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "dropout": 0.1}


def make_checkpoint(path: Path, *, bias: bool = True, prefix: str = "", **changes):
    sizes = SMALL | {"vocab_size": len(CHARACTERS), "bias": bias} | changes
    state = make_state(**sizes)
    saved = {
        "model": {prefix + name: weight for name, weight in state.items()},
        "model_args": sizes,
    }
    torch.save(saved, path)
    return state


@pytest.fixture
def meta(tmp_path) -> Path:
    return make_meta(tmp_path / "meta.pkl")


def opened(folder: Path, imported):
    """The imported model and tokenizer, loaded with transformers alone."""
    write_model_folder(folder, imported.config, imported.weights, imported.tokenizer.hf)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def assert_equal_weights(model, state) -> None:
    """A GPT-2 of transformers has the weights of nanoGPT's model; biases that are missing are 0."""
    for name, weight in model.state_dict().items():
        expected = state.get(name, torch.zeros_like(weight))
        expected = (expected.T if is_matrix(name) else expected)[: len(weight)]
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize(("bias", "prefix"), [(False, ""), (True, ""), (True, "_orig_mod.")])
def test_load_nanogpt_keeps_the_weights(tmp_path, meta, bias, prefix):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    imported = load_nanogpt(tmp_path / "ckpt.pt", meta)
    assert imported.config.bias is bias
    model, tokenizer = opened(tmp_path / "out", imported)
    ids = torch.tensor([tokenizer("decade éa!\nb")["input_ids"]])
    assert ids[0].tolist() == [CHARACTERS.index(character) for character in "decade éa!\nb"]
    assert_equal_weights(model, state)


def test_padding_rows_of_gpt2s_vocabulary_are_dropped(tmp_path):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=False, vocab_size=50304, n_layer=1, n_embd=8)
    model, tokenizer = opened(tmp_path / "out", load_nanogpt(tmp_path / "ckpt.pt"))
    ids = torch.tensor([tokenizer("Hello world<|endoftext|>")["input_ids"]])
    assert ids[0].tolist() == [15496, 995, 50256]
    assert (model.config.vocab_size, model.config.eos_token_id) == (50257, 50256)
    assert_equal_weights(model, state)


def test_untied_heads_and_older_checkpoints(tmp_path, meta):
    """An untied head, causal masks as buffers, and arguments without `bias`."""
    state = make_checkpoint(tmp_path / "ckpt.pt")
    state["lm_head.weight"] = state["lm_head.weight"].flip(0)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}
    sizes = SMALL | {"vocab_size": len(CHARACTERS)}
    torch.save({"model": state | masks, "model_args": sizes}, tmp_path / "ckpt.pt")
    imported = load_nanogpt(tmp_path / "ckpt.pt", meta)
    assert imported.config.bias is True
    assert_equal_weights(opened(tmp_path / "out", imported)[0], state)
    older = load_nanogpt(tmp_path / "ckpt.pt", meta, "gelu_new")
    assert older.config.activation_function == "gelu_new"


class Malicious:
    """Creates a folder when unpickled without weights_only."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_ckpt_pt_or_meta_pkl_is_not_run(tmp_path):
    trace = tmp_path / "it-ran"
    torch.save({"model": Malicious(trace), "model_args": {}}, tmp_path / "ckpt.pt")
    assert ".mkdir" in refused(load_nanogpt, tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Malicious(trace)}))
    assert ".mkdir" in refused(load_meta, tmp_path / "meta.pkl")
    assert not trace.exists()
    pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert trace.exists()  # the pickle runs code


C_ATTN = "transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_args/n_head", None, "n_head"),
        ("model_args/bias", False, "transformer.h.0.attn.q_proj.bias"),
        (f"model/{C_ATTN}", torch.zeros(16, 48), "transformer.h.0.attn.q_proj.weight"),
        ("model/extra.weight", torch.zeros(2), "extra.weight"),
    ],
)
def test_malformed_nanogpt_checkpoints_are_refused(tmp_path, meta, key, value, message):
    make_checkpoint(tmp_path / "ckpt.pt")
    saved = part = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    *path, last = key.split("/")
    for name in path:
        part = part[name]
    part[last] = value
    if value is None:
        del part[last]
    torch.save(saved, tmp_path / "ckpt.pt")
    line = refused(load_nanogpt, tmp_path / "ckpt.pt", meta)
    assert line.startswith(f"{tmp_path / 'ckpt.pt'}: ")
    assert message in line


def test_load_nanogpt_refuses_truncated_and_other_files(tmp_path, shared):
    make_checkpoint(tmp_path / "ckpt.pt")
    content = (tmp_path / "ckpt.pt").read_bytes()
    for length in (0, 1000, -30):
        (tmp_path / "ckpt.pt").write_bytes(content[:length])
        line = refused(load_nanogpt, tmp_path / "ckpt.pt")
        assert line.startswith(f"{tmp_path / 'ckpt.pt'}: not a checkpoint of nanoGPT: ")
        assert "no file that torch.save has written, or a part of one" in line
    foreign = shared / "models" / "not-a-nanogpt-ckpt.pt"
    assert "not a checkpoint of nanoGPT" in refused(load_nanogpt, foreign)


def test_an_error_of_the_disk_is_not_called_a_part_of_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "ckpt.pt").write_bytes(b"PK")

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    line = refused(load_nanogpt, tmp_path / "ckpt.pt")
    assert "Input/output error" in line
    assert "a part of one" not in line


def test_load_nanogpt_needs_the_matching_meta_pkl(tmp_path):
    make_checkpoint(tmp_path / "ckpt.pt")
    assert "--meta (data/DATASET/meta" in refused(load_nanogpt, tmp_path / "ckpt.pt")
    other = make_meta(tmp_path / "other.pkl", CHARACTERS + "xyz")
    assert "has 9 tokens" in (message := refused(load_nanogpt, tmp_path / "ckpt.pt", other))
    assert "other.pkl 12;" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"itos": {0: "ab", 1: "c"}, "stoi": {"ab": 0, "c": 1}, "vocab_size": 2},
        {"itos": {0: "a", 1: "a"}, "stoi": {"a": 1}, "vocab_size": 2},
        None,
    ],
)
def test_load_meta_refuses_wrong_content(tmp_path, changes):
    path = make_meta(tmp_path / "meta.pkl", **changes or {})
    if changes is None:
        path.write_bytes(path.read_bytes()[:-20])
    assert f"{path}: " in refused(load_meta, path)


TEXT = "the cat sat on a mat, née Zoë.\n" * 40
END = 50256


@pytest.fixture
def out(tmp_path):
    """The folder to write, which `new_folder` makes and removes after an error."""
    (folder := tmp_path / "out").mkdir()
    return folder


@pytest.fixture
def characters(tmp_path):
    """A folder of TEXT as written by nanoGPT's data/shakespeare_char/prepare.py."""
    known = sorted(set(TEXT))
    ids = [known.index(character) for character in TEXT]
    cut = int(len(ids) * 0.9)
    folder = write_bins(tmp_path / "letters", ids[:cut], ids[cut:])
    make_meta(folder / "meta.pkl", "".join(known))
    return folder


def config_for(data_dir, source, tokenizer, **knobs) -> Config:
    places = {"dir": str(data_dir), "source": str(source)}
    return Config(data=DataSection(**places, tokenizer=tokenizer, block_size=8, **knobs))


def test_import_bins_equals_prepare(tmp_path, out, characters):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    ours = config_for(tmp_path / "ours", tmp_path / "text.txt", "char", validation_fraction=0.1)
    prepare(ours)
    import_bins(characters, out)
    prepared = load_prepared(ours)
    # a fraction of the recipe does not matter, another source or tokenizer does
    imported = load_prepared(config_for(out, characters, "char", validation_fraction=0.4))
    for source, tokenizer, knob in (
        (tmp_path, "char", "source"),
        (characters, "gpt2", "tokenizer"),
    ):
        assert f"data.{knob} " in refusal(load_prepared, config_for(out, source, tokenizer))
    for split in ("train", "validation"):
        assert getattr(imported, split).stream.sha256() == getattr(prepared, split).stream.sha256()
        assert getattr(imported.manifest, split) == getattr(prepared.manifest, split)
    for fact in ("format", "tokenizer_hash", "vocab_size", "end_of_text_id", "versions"):
        assert getattr(imported.manifest, fact) == getattr(prepared.manifest, fact)


def test_import_bins_writes_one_row_per_document(tmp_path, out, monkeypatch):
    tokenizer = gpt2_tokenizer()
    texts = ["Hello world, naïve 日本", "a", "<|endoftext|> is text here", "the cat " * 30, "end\n"]
    rows = [[*ids.tolist(), END] for ids in tokenizer.encode_batch(texts)]
    source = write_bins(tmp_path / "bins", np.concatenate(rows), range(20))
    monkeypatch.setattr(module, "TOKENS_PER_READ", 16)  # less than a document
    manifest = import_bins(source, out)
    assert (manifest.train.documents, manifest.validation.documents) == (5, 1)
    assert manifest.train.tokens == sum(map(len, rows))
    assert manifest.train.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.end_of_text_id == END
    written = datasets.load_from_disk(str(out / "train"))
    assert written.features["input_ids"].feature.dtype == "uint16"
    assert written["input_ids"][:] == rows


UNKNOWN_TOKEN = np.array([*[0] * 321, 999, *[0] * 178], dtype=np.uint16).tobytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (UNKNOWN_TOKEN, "token 999 "),
        (b"", "cannot be read as tokens"),
        (b"x", "cannot be read as tokens"),
    ],
)
def test_import_bins_refuses_what_is_no_file_of_tokens(
    out, characters, monkeypatch, content, reason
):
    monkeypatch.setattr(module, "TOKENS_PER_READ", 100)
    (characters / "val.bin").write_bytes(content)
    assert f"val.bin: {reason}" in refusal(import_bins, characters, out)


def test_imported_model_has_a_card_of_its_own(tmp_path, meta):
    make_checkpoint(tmp_path / "ckpt.pt")
    out = tmp_path / "<b>model"
    assert main(argv("import-nanogpt {} {} --meta {}", tmp_path / "ckpt.pt", out, meta)) == 0
    card = ModelCard((out / "README.md").read_text(encoding="utf-8"))
    assert card.data.to_dict()["library_name"] == "transformers"
    assert "license" not in card.data.to_dict()
    assert "trained by nanoGPT and imported with nanogpt_hf" in card.text
    assert "<b>" not in card.text
    assert str(tmp_path) not in card.content


def test_command_imports_a_checkpoint_that_sample_opens(tmp_path, meta, capsys):
    make_checkpoint(tmp_path / "ckpt.pt")
    out = tmp_path / "new" / "model"
    assert main(argv("import-nanogpt {} {} --meta {}", tmp_path / "ckpt.pt", out, meta)) == 0
    assert capsys.readouterr().out.endswith(f"next: nanogpt-hf sample {out}\n")
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert main(argv("sample {} --max-new-tokens 20 --prompt ab", out)) == 0
    assert set(capsys.readouterr().out) <= set(CHARACTERS)


def test_command_imports_data_that_pretrain_takes(tmp_path, characters, write_recipe, capsys):
    assert main(argv("import-nanogpt {} {}", characters, tmp_path / "prepared")) == 0
    *_, line = capsys.readouterr().out.splitlines()
    options = line.removeprefix("next: nanogpt-hf pretrain RECIPE ").split()
    run = tmp_path / "run"
    assert main(["pretrain", str(write_recipe()), *options, "--run-dir", str(run)]) == 0
    assert "is prepared already" in capsys.readouterr().out
    assert (run / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.pt x", "none.pt: no such file or folder"),
        ("ckpt.pt letters --meta meta.pkl", "letters: exists already"),
        ("letters letters", "letters: exists already"),
        ("ckpt.pt meta.pkl/x --meta meta.pkl", "Not a directory"),
        ("ckpt.pt x", "has 9 tokens, the vocabulary of GPT-2 50,257"),
        ("empty x", "train.bin: No such file"),
    ],
)
def test_command_refuses_a_mistake(refused, tmp_path, meta, characters, words, message):
    make_checkpoint(tmp_path / "ckpt.pt")
    (tmp_path / "empty").mkdir()
    assert message in refused("import-nanogpt", *words.split())
