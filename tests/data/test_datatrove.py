"""Token files in datatrove's format are read in place: .ds with ids, .ds.index with the ends of
documents.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.hf_tokenizer import bytes_of_tokens
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import check_prepared, load_prepared
from nanogpt_hf.data.tokenizer import build_tokenizer

# The end token of byte_tokenizer.
END = 256
TEXTS = [f"Document {number} says {'many ' * (number % 9)}words: é." for number in range(60)]


def write(folder: Path, name: str, texts: list[str], encode, kind="<u2") -> Path:
    """What datatrove writes: ids with an end-of-text id after each document, and the documents'
    ends.
    """
    folder.mkdir(exist_ok=True)
    rows = [[*encode(text), END] for text in texts]
    path = folder / f"{name}.ds"
    np.array([token for row in rows for token in row], dtype=kind).tofile(path)
    np.cumsum([len(row) for row in rows]).astype("<u8").tofile(folder / f"{name}.ds.index")
    return path


@pytest.fixture
def encode(byte_tokenizer):
    tokenizer = build_tokenizer(str(byte_tokenizer), ())
    return lambda text: tokenizer.encode_batch([text])[0].tolist()


@pytest.fixture
def make(write_recipe, byte_tokenizer, tmp_path):
    def make(source, **overrides):
        options = {
            "data__source": str(source),
            "data__format": "datatrove",
            "data__tokenizer": str(byte_tokenizer),
        }
        return load_config(write_recipe(**options | overrides))

    return make


def tokens_of(config) -> list[int]:
    data = load_prepared(config)
    return [
        int(t)
        for blocks in (data.train, data.validation)
        for chunk in blocks.stream.chunks
        for t in chunk
    ]


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_a_folder_of_files_is_one_stream_without_a_copy(make, encode, tmp_path, kind):
    for number in (2, 0, 1):
        write(
            tmp_path / "tokens",
            f"{number:05}_all",
            TEXTS[20 * number : 20 * (number + 1)],
            encode,
            kind,
        )
    (tmp_path / "tokens" / "00009_all.ds").touch()  # a task without documents
    config = make(tmp_path / "tokens")
    manifest, _ = prepare(config)
    expected = [token for text in TEXTS for token in [*encode(text), END]]
    assert tokens_of(config) == expected
    data = load_prepared(config)
    assert isinstance(data.train.stream.chunks[0], np.memmap)
    assert not list((tmp_path / "data").rglob("*.arrow"))
    assert manifest.train.documents + manifest.validation.documents == 60
    assert manifest.train.bytes + manifest.validation.bytes == sum(
        len(text.encode()) for text in TEXTS
    )
    assert manifest.end_of_text_id == END
    assert data.train.stream.windows(np.array([manifest.train.tokens - 1]), 1) == END, (
        "documents stay whole"
    )
    assert 0 < manifest.validation.tokens <= 0.1 * len(expected) + 80
    check_prepared(config.data)


def test_wrong_files_are_one_line(make, encode, tmp_path):
    path = write(tmp_path / "tokens", "one", TEXTS, encode)
    index = path.with_name("one.ds.index")
    whole = path.read_bytes()
    ends = index.read_bytes()
    path.write_bytes(whole[:-2])
    assert f"{path}: not a .ds file" in refusal(prepare, make(path))
    path.write_bytes(whole)
    index.write_bytes(ends[:-3])
    assert f"{path}: not a .ds file" in refusal(prepare, make(path.parent))
    index.unlink()
    assert f"{path}: not a .ds file" in refusal(prepare, make(path.parent))
    path.write_bytes(b"")  # a task without documents
    for source in (path, path.parent, "some/set"):
        assert f"{source}: no .ds file" in refusal(prepare, make(source))
    assert not (tmp_path / "data").exists()


def test_ids_beyond_the_vocabulary_are_refused(make, encode, tmp_path):
    path = write(tmp_path / "tokens", "one", TEXTS, lambda text: [*encode(text), 300])
    assert "has 257 tokens, and not the token 300" in refusal(prepare, make(path))


def test_changed_or_missing_files_are_found(make, encode, tmp_path):
    path = write(tmp_path / "tokens", "one", TEXTS, encode)
    config = make(path.parent)
    prepare(config)
    copy = tmp_path / "copy.ds"
    shutil.copy(path, copy)
    whole = bytearray(path.read_bytes())
    whole[10] ^= 1
    path.write_bytes(whole)
    assert f"{path.parent} has changed" in refusal(load_prepared, config)
    shutil.copy(copy, path)  # the same bytes, another time
    (path.parent / "two.ds").touch()  # a task without documents
    assert len(tokens_of(config)) == len(whole) // 2
    path.unlink()
    assert str(path.parent) in refusal(load_prepared, config)


def test_another_tokenizer_in_the_metadata_is_a_warning(make, encode, tmp_path, caplog):
    path = write(tmp_path / "tokens", "one", TEXTS, encode)
    path.with_name("one.ds.metadata").write_text("their/tokenizer|2\n1000\n1.0 kT")
    prepare(make(path))
    assert "their/tokenizer" in caplog.text


def test_datatrove_and_text_mix(make, encode, text_file, tmp_path):
    path = write(tmp_path / "tokens", "one", TEXTS, encode)
    source = [
        {"source": str(path), "weight": 1, "format": "datatrove"},
        {"source": str(text_file), "weight": 3, "format": "text"},
    ]
    config = make("-", data__source=source)
    prepare(config)
    train = load_prepared(config).train
    batch = train.batch(np.array([0, len(train) - 1]))
    assert batch["input_ids"][0].tolist() == [*encode(TEXTS[0]), END][:16]


def test_bytes_of_tokens_of_sentencepiece_names():
    names = ["<s>", "\u2581the", "<0x0A>", "né", None]
    hf = MagicMock(all_special_tokens=["<s>"], __len__=lambda _: 5)
    hf.convert_ids_to_tokens.return_value = names
    assert bytes_of_tokens(hf, "x").tolist() == [0, 4, 1, 3, 0]


@pytest.mark.long
def test_corpus_tokenized_by_the_script(make, byte_tokenizer, tmp_path):
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        rows = "".join(
            json.dumps({"text": text}) + "\n" for text in TEXTS[20 * number : 20 * (number + 1)]
        )
        (tmp_path / "corpus" / f"{number}.jsonl").write_text(rows)
    script = Path(__file__).parents[2] / "launch" / "tokenize_corpus.py"
    command = [sys.executable, script, tmp_path / "corpus", tmp_path / "tokens", "--tasks=2"]
    command += ["--workers=1", "--tokenizer", byte_tokenizer / "tokenizer.json"]
    for _ in range(2):  # the second finds both tasks completed
        subprocess.run([str(word) for word in command], check=True, timeout=120)
    assert len(list((tmp_path / "tokens").glob("*.ds"))) == 2
    config = make(tmp_path / "tokens")
    manifest, _ = prepare(config)
    assert manifest.end_of_text_id == END
    hf = load_prepared(config).tokenizer
    texts = hf.decode(tokens_of(config)).split(hf.eos_token)
    assert sorted(texts[:-1]) == sorted(TEXTS)
