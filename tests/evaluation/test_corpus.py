"""Texts of `evaluate`: counts, joined documents, prepared data, refusals."""

import json

import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import build_tokenizer, char_tokenizer
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
    assert config.data.dir in refusal(read, config.data.dir, build_tokenizer("gpt2", ()))
    assert "'test'" in refusal(read, config.data.dir, tokenizer, "test")


@pytest.fixture
def letters(tmp_path):
    char_tokenizer(sorted("abc\n")).hf.save_pretrained(tmp_path / "tokenizer")
    return build_tokenizer(str(tmp_path / "tokenizer"), ())


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "0 tokens of text"), ("a", "1 tokens of text"), ("abx", "knows no 'x'")],
)
def test_unusable_text_is_refused(read, tmp_path, letters, content, message):
    (path := tmp_path / "text.txt").write_text(content)
    assert message in refusal(read, path, letters)


def test_wrong_source_names_the_option(read, tmp_path, letters):
    for source, split, message in (
        ("nowhere.txt", None, "--data: nowhere.txt: "),
        ("wikitext", None, "--data.split: wikitext: "),
        ("python-docs", "test", "--data.split: python-docs: "),
    ):
        assert message in refusal(read, source, letters, split)
    (rows := tmp_path / "rows.jsonl").write_text('{"page": "abc"}\n{"page": "cab"}\n')
    assert "--data.text_column" in refusal(read, rows, letters)
    assert len(read(rows, letters, text_column="page").stream) == 6
