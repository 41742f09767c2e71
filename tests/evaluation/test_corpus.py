"""Texts of `evaluate`: counts, joined documents, prepared data, refusals."""

import json

import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, char_tokenizer
from nanogpt_hf.evaluation.corpus import read_corpus


@pytest.fixture
def read(tmp_path):
    def read(source, tokenizer, split=None, **knobs):
        return read_corpus(
            DataSection(source=str(source), **knobs), split, tokenizer, tmp_path / "scratch"
        )

    return read


def tokens(corpus) -> list[int]:
    return np.concatenate(corpus.stream.chunks).tolist()


def test_documents_are_joined_by_end_of_text(read, tmp_path):
    gpt2 = build_tokenizer("gpt2", ())
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("Zwei Bären", "two bears"))
    )
    corpus = read(rows, gpt2)
    first, second = (ids.tolist() for ids in gpt2.encode_batch(["Zwei Bären", "two bears"]))
    assert tokens(corpus) == [*first, 50256, *second, 50256]
    assert (corpus.documents, corpus.bytes) == (2, 11 + 9)
    (tmp_path / "one.txt").write_text("Zwei Bären")
    assert tokens(read(tmp_path / "one.txt", gpt2)) == first


def test_prepared_data_gives_the_validation_split(read, write_recipe):
    config = load_config(write_recipe())
    prepare(config)
    prepared = load_prepared(config)
    tokenizer = build_tokenizer(f"{config.data.dir}/tokenizer", ())
    corpus = read(config.data.dir, tokenizer)
    assert tokens(corpus) == np.concatenate(prepared.validation.stream.chunks).tolist()
    assert corpus.bytes == prepared.manifest.validation.bytes
    assert len(read(config.data.dir, tokenizer, "train").stream) == len(prepared.train.stream)
    # equal text and tokenizer have equal hashes, from any source
    text = prepared.tokenizer.decode(tokens(corpus))
    (path := write_recipe().parent / "text.txt").write_text(text)
    assert read(path, tokenizer).stream.sha256() == corpus.stream.sha256()
    assert config.data.dir in refusal(read, config.data.dir, build_tokenizer("gpt2", ()))
    assert "'test'" in refusal(read, config.data.dir, tokenizer, "test")


def letters(characters: str = "abc\n") -> Tokenizer:
    return char_tokenizer(sorted(characters))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "0 tokens of text"), ("a", "1 tokens of text"), ("abx", "knows no 'x'")],
)
def test_unusable_text_is_refused(read, tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_text(content)
    tokenizer = build_tokenizer_of_folder(tmp_path)
    assert message in refusal(read, path, tokenizer)


def build_tokenizer_of_folder(folder):
    letters().hf.save_pretrained(folder / "tokenizer")
    return build_tokenizer(str(folder / "tokenizer"), ())


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("nowhere.txt", None, "--data: nowhere.txt: "),
        ("wikitext", None, "--data.split test"),
        ("python-docs", "test", "--data.split"),
    ],
)
def test_missing_source_names_the_option(read, source, split, message):
    assert message in refusal(read, source, letters(), split)


def test_missing_column_names_the_option(read, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"page": "abc"}\n{"page": "cab"}\n')
    assert "--data.text_column" in refusal(read, rows, letters())
    assert len(read(rows, letters(), text_column="page").stream) == 6
