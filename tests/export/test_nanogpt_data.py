"""Import of nanoGPT's train.bin and val.bin as prepared data."""

import pickle

import datasets
import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import gpt2_tokenizer
from nanogpt_hf.export import nanogpt as module
from nanogpt_hf.export.nanogpt import import_bins

TEXT = "the cat sat on a mat, née Zoë.\n" * 40
END = 50256


def write_bins(folder, train, validation):
    folder.mkdir()
    for name, ids in (("train", train), ("val", validation)):
        np.asarray(ids, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def out(tmp_path):
    """The folder to write, which `new_folder` makes and removes after an error."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def characters(tmp_path):
    """A folder of TEXT as written by nanoGPT's data/shakespeare_char/prepare.py."""
    known = sorted(set(TEXT))
    ids = [known.index(character) for character in TEXT]
    cut = int(len(ids) * 0.9)
    folder = write_bins(tmp_path / "letters", ids[:cut], ids[cut:])
    numbered = {character: i for i, character in enumerate(known)}
    meta = {"vocab_size": len(known), "itos": dict(enumerate(known)), "stoi": numbered}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def config_for(data_dir, source, tokenizer, **knobs) -> Config:
    return Config(
        data=DataSection(
            dir=str(data_dir), source=str(source), tokenizer=tokenizer, block_size=8, **knobs
        ),
    )


def flat(blocks) -> list[int]:
    stream = blocks.stream
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def test_import_bins_equals_prepare(tmp_path, out, characters):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    ours = config_for(tmp_path / "ours", tmp_path / "text.txt", "char", validation_fraction=0.1)
    prepare(ours)
    import_bins(characters, out)
    prepared, imported = (
        load_prepared(ours),
        load_prepared(config_for(out, characters, "char")),
    )
    for split in ("train", "validation"):
        assert flat(getattr(imported, split)) == flat(getattr(prepared, split))
        assert getattr(imported.manifest, split) == getattr(prepared.manifest, split)
    for fact in ("format", "tokenizer_hash", "vocab_size", "end_of_text_id", "versions"):
        assert getattr(imported.manifest, fact) == getattr(prepared.manifest, fact)
    names = [
        sorted(str(path.relative_to(tmp_path / at)) for path in (tmp_path / at).rglob("*"))
        for at in ("ours", "out")
    ]
    assert names[0] == names[1]


def test_import_bins_writes_one_row_per_document(tmp_path, out, monkeypatch):
    tokenizer = gpt2_tokenizer()
    texts = ["Hello world, naïve 日本", "a", "<|endoftext|> is text here", "the cat " * 30, "end\n"]
    rows = [[*ids.tolist(), END] for ids in tokenizer.encode_batch(texts)]
    source = write_bins(tmp_path / "bins", np.concatenate(rows), rows[0])
    monkeypatch.setattr(module, "TOKENS_PER_READ", 16)  # less than a document
    manifest = import_bins(source, out)
    assert manifest.train.documents == 5
    assert manifest.train.tokens == sum(map(len, rows))
    assert manifest.train.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.end_of_text_id == END
    written = datasets.load_from_disk(str(tmp_path / "out" / "train"))
    assert written.features["input_ids"].feature.dtype == "uint16"
    assert written["input_ids"][:] == rows


def test_import_bins_without_end_of_text_is_one_row(tmp_path, out):
    manifest = import_bins(write_bins(tmp_path / "bins", range(100), range(20)), out)
    assert manifest.train.documents == manifest.validation.documents == 1
    assert manifest.end_of_text_id is None
    assert len(load_prepared(config_for(out, tmp_path / "bins", "gpt2")).train.stream) == 100


def test_imported_data_refuses_other_recipes_and_ignores_the_split(tmp_path, out, characters):
    import_bins(characters, out)
    load_prepared(config_for(out, characters, "char", validation_fraction=0.4))
    for source, tokenizer, knob in (
        (tmp_path, "char", "source"),
        (characters, "gpt2", "tokenizer"),
    ):
        assert f"data.{knob} " in refusal(load_prepared, config_for(out, source, tokenizer))


UNKNOWN_TOKEN = np.array([*[0] * 321, 999, *[0] * 178], dtype=np.uint16).tobytes()


@pytest.mark.parametrize(
    ("content", "value"),
    [(None, ""), (b"", ""), (b"abc", ""), (UNKNOWN_TOKEN, "token 999 at 321 ")],
)
def test_import_bins_refuses_unknown_tokens_and_malformed_files(
    out, characters, monkeypatch, content, value
):
    monkeypatch.setattr(module, "TOKENS_PER_READ", 100)
    (characters / "val.bin").unlink()
    if content is not None:
        (characters / "val.bin").write_bytes(content)
    assert f"val.bin: {value}" in refusal(import_bins, characters, out)
