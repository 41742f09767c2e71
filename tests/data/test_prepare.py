import dataclasses
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

from nanogpt_hf.config.schema import Config, DataSection, replace_knobs
from nanogpt_hf.data import encode
from nanogpt_hf.data import manifest as manifest_module
from nanogpt_hf.data import prepare as module
from nanogpt_hf.data import source as source_module
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, encode_ordinary
from nanogpt_hf.errors import DataError

# Python 3.12 warns of any fork of a process that has threads; datasets forks, and so do some tests below.
ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def text(tmp_path):
    """Writes a text file and gives its path."""

    def write(content="hello world, " * 40, name="input.txt"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.fixture
def rows(tmp_path):
    """Writes rows of text and gives the file's path."""

    def write(texts, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


def make(source, folder, **knobs):
    """A config with everything small."""
    defaults = {"tokenizer": "char", "validation_fraction": 0.1, "block_size": 8}
    return Config(data=DataSection(source=str(source), dir=str(folder), **(defaults | knobs)))


def everything_in(folder):
    """Every path under a folder, with the content and time of files."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def nothing_left(folder):
    """Neither the prepared data nor half of it is there; the empty lock file is allowed to stay."""
    left = [path.name for path in folder.parent.iterdir() if folder.name in path.name]
    return left in ([], [f".{folder.name}.lock"])


def flat(blocks):
    stream = blocks.stream
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def documents_of(folder, split):
    return [row["input_ids"] for row in datasets.load_from_disk(str(folder / split))]


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "train", "validation", "vocabulary"),
    [("char", 1_003_854, 111_540, 65), ("gpt2", 301_966, 36_059, 50_257)],  # as nanoGPT's own scripts give
)
def test_tiny_shakespeare_is_as_nanogpt_prepares_it(shared, tmp_path, tokenizer, train, validation, vocabulary):
    path = shared / "data" / "tinyshakespeare.txt"
    config = make(path, tmp_path / "data", tokenizer=tokenizer)
    manifest, anew = prepare(config)
    assert anew
    assert (manifest.train.tokens, manifest.validation.tokens) == (train, validation)
    assert (manifest.train.bytes, manifest.validation.bytes) == (1_003_854, 111_540)
    assert manifest.vocab_size == vocabulary
    assert manifest.end_of_text_id is None
    data = load_prepared(config)
    content = path.read_text(encoding="utf-8")
    assert data.tokenizer.decode(flat(data.train)) + data.tokenizer.decode(flat(data.validation)) == content
    if tokenizer == "char":
        number = {character: i for i, character in enumerate(sorted(set(content)))}
        assert flat(data.validation) == [number[character] for character in content[1_003_854:]]


def test_a_lone_document_is_cut_near_its_end_and_not_marked(text, tmp_path):
    content = "".join(chr(ord("a") + i % 26) for i in range(1000))
    config = make(text(content), tmp_path / "data", validation_fraction=0.25)
    manifest, _ = prepare(config)
    data = load_prepared(config)
    assert data.tokenizer.decode(flat(data.train)) == content[:750]
    assert data.tokenizer.decode(flat(data.validation)) == content[750:]
    assert (manifest.train.documents, manifest.validation.documents) == (1, 1)


def test_a_lone_document_is_not_marked_even_where_the_tokenizer_has_an_end_of_text(text, tmp_path):
    config = make(text("hello"), tmp_path / "data", tokenizer="gpt2", validation_fraction=0.5)
    manifest, _ = prepare(config)
    assert manifest.end_of_text_id is None
    assert documents_of(tmp_path / "data", "train") == [[258]]  # "he"
    assert documents_of(tmp_path / "data", "validation") == [[18798]]  # "llo"


def test_one_of_several_documents_ends_with_the_end_of_text(rows, tmp_path):
    texts = [f"document {i} <|endoftext|>" for i in range(30)]
    config = make(rows(texts), tmp_path / "data", tokenizer="gpt2")
    manifest, _ = prepare(config)
    assert manifest.end_of_text_id == 50256
    data = load_prepared(config)
    found = documents_of(tmp_path / "data", "train") + documents_of(tmp_path / "data", "validation")
    assert len(found) == 30
    assert all(ids.index(50256) == len(ids) - 1 for ids in found), "once, at the end"
    assert sorted(data.tokenizer.decode(ids[:-1]) for ids in found) == sorted(texts)


def test_documents_stay_in_order_and_none_is_lost_or_doubled(rows, tmp_path):
    texts = [f"<{i}>" for i in range(200)]
    config = make(rows(texts), tmp_path / "data")
    prepare(config)
    data = load_prepared(config)
    train = data.tokenizer.decode(flat(data.train)).removeprefix("<").removesuffix(">").split("><")
    validation = data.tokenizer.decode(flat(data.validation)).removeprefix("<").removesuffix(">").split("><")
    assert (len(train), len(validation)) == (180, 20)
    for numbers in (train, validation):
        assert [int(n) for n in numbers] == sorted(map(int, numbers))
    assert sorted(map(int, train + validation)) == list(range(200))
    assert max(map(int, train)) > 190, "validation is drawn, not the tail"


def test_the_seed_draws_the_documents_that_are_held_out(rows, tmp_path):
    path = rows([f"<{i}>" for i in range(200)])

    def held_out(name, seed):
        config = make(path, tmp_path / name, validation_seed=seed)
        prepare(config)
        data = load_prepared(config)
        return data.tokenizer.decode(flat(data.validation))

    first = held_out("a", 1)
    assert held_out("b", 1) == first
    assert held_out("c", 2) != first
    assert held_out("d", 2**200), "any seed"


def test_a_tiny_fraction_still_holds_a_document_out(rows, tmp_path):
    for count in (2, 3, 10):
        config = make(rows([f"text {i}" for i in range(count)]), tmp_path / f"{count}", validation_fraction=1e-9)
        manifest, _ = prepare(config)
        assert (manifest.train.documents, manifest.validation.documents) == (count - 1, 1)


def test_half_of_few_documents_can_be_held_out(rows, tmp_path):
    for count in (2, 3, 5):
        config = make(rows([f"text {i}" for i in range(count)]), tmp_path / f"{count}", validation_fraction=0.5)
        manifest, _ = prepare(config)
        assert manifest.train.documents >= 1
        assert manifest.train.documents + manifest.validation.documents == count


@pytest.fixture
def hub(monkeypatch):
    splits = {}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split, revision, trust_remote_code: splits[split]
    )
    return splits


def test_a_given_split_is_the_validation(hub, tmp_path):
    hub["train"] = datasets.Dataset.from_dict({"text": ["only one"]})
    hub["test"] = datasets.Dataset.from_dict({"text": ["held", "out"]})
    config = make("owner/name", tmp_path / "data", tokenizer="gpt2", validation_split="test", validation_fraction=0.0)
    manifest, _ = prepare(config)
    assert documents_of(tmp_path / "data", "train") == [[8807, 530, 50256]]
    assert documents_of(tmp_path / "data", "validation") == [[10217, 50256], [448, 50256]]
    assert manifest.end_of_text_id == 50256


def test_empty_rows_of_a_hub_data_set_are_no_documents(hub, tmp_path):
    hub["train"] = datasets.Dataset.from_dict({"text": ["a", "", None, "b", None] * 20})
    for name, tokenizer in (("char", "char"), ("gpt2", "gpt2")):
        manifest, _ = prepare(make("owner/name", tmp_path / name, tokenizer=tokenizer, validation_fraction=0.5))
        assert manifest.train.documents + manifest.validation.documents == 40


def test_batches_of_nothing_but_empty_rows_are_no_problem(hub, rows, tmp_path):
    prepare(make(rows(["a", "b"]), tmp_path / "first"))
    hub["train"] = datasets.Dataset.from_dict({"text": [""] * 3000 + ["a"]})
    hub["test"] = datasets.Dataset.from_dict({"text": ["b"]})
    folder = str(tmp_path / "first" / "tokenizer")  # the kind of tokenizer that is least used to nothing
    manifest, _ = prepare(make("owner/name", tmp_path / "data", tokenizer=folder, validation_split="test"))
    assert manifest.train.documents == 1


@pytest.mark.parametrize("column", [[], [""], [None], ["", None, ""]])
def test_a_hub_data_set_without_text_is_an_error(hub, tmp_path, column):
    hub["train"] = datasets.Dataset.from_dict({"text": column}, datasets.Features({"text": datasets.Value("string")}))
    for tokenizer in ("char", "gpt2"):
        with pytest.raises(DataError, match=r"^data\.source: "):
            prepare(make("owner/name", tmp_path / "data", tokenizer=tokenizer))
        assert nothing_left(tmp_path / "data")


def test_a_hub_data_set_leaves_no_tokens_in_its_cache(monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    features = datasets.Features({"text": datasets.Value("string")})
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n' * 50)
    loaded = datasets.Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(cache), features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: loaded)
    before = everything_in(cache)
    assert any(path.suffix == ".arrow" for path in before)
    prepare(make("owner/name", tmp_path / "data"))
    assert everything_in(cache).keys() == before.keys()


def test_ids_are_two_bytes_where_they_fit(text, tmp_path):
    prepare(make(text(), tmp_path / "data"))
    rows = datasets.load_from_disk(str(tmp_path / "data" / "train"))
    assert rows.features == datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})


class FakeVocabulary:
    """A tokenizer with a vocabulary of any size, as far as preparing data looks at it."""

    eos_token_id = None

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def get_vocab(self):
        return {"a": 0}

    def save_pretrained(self, folder):
        pass


def fake_tokenizer(monkeypatch, size, ids):
    def build(name, texts, vocab_size):
        return Tokenizer("fake", FakeVocabulary(size), lambda texts: [np.asarray(ids, np.uint32) for _ in texts])

    monkeypatch.setattr(module, "build_tokenizer", build)


@pytest.mark.parametrize(
    ("size", "kind"), [(2**16 - 1, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (200_000, "uint32")]
)
def test_the_vocabulary_decides_the_type_and_its_last_id_fits(monkeypatch, text, tmp_path, size, kind):
    fake_tokenizer(monkeypatch, size, [0, size - 1, 1])
    prepare(make(text(), tmp_path / "data"))
    rows = datasets.load_from_disk(str(tmp_path / "data" / "train"))
    assert rows.features["input_ids"].feature.dtype == kind
    assert rows[0]["input_ids"] == [0, size - 1, 1]


@pytest.mark.parametrize("size", [100, 2**16, 200_000])
def test_an_id_beyond_the_vocabulary_is_an_error(monkeypatch, text, tmp_path, size):
    fake_tokenizer(monkeypatch, size, [0, size])
    with pytest.raises(DataError, match=f"fake gave id {size}, beyond its own vocabulary"):
        prepare(make(text(), tmp_path / "data"))
    assert nothing_left(tmp_path / "data")


@ignore_fork_warning
def test_several_processes_give_the_same_tokens_as_one(rows, tmp_path):
    path = rows([f"row {i} " + "x" * (i % 30) for i in range(300)])
    for tokenizer, counts in {"char": (1, 2, 3), "gpt2": (1, 2)}.items():
        streams = []
        for num_proc in counts:
            config = make(path, tmp_path / f"{tokenizer}{num_proc}", tokenizer=tokenizer, num_proc=num_proc)
            prepare(config)
            data = load_prepared(config)
            streams.append((flat(data.train), flat(data.validation)))
        assert len(streams[0][0]) > 1000
        assert all(stream == streams[0] for stream in streams)


@ignore_fork_warning
def test_an_error_in_one_of_several_processes_is_still_one_clear_error(monkeypatch, rows, tmp_path):
    fake_tokenizer(monkeypatch, 10, [11])
    with pytest.raises(DataError, match="fake gave id 11"):
        prepare(make(rows(["a"] * 50), tmp_path / "data", num_proc=2))
    assert nothing_left(tmp_path / "data")


@ignore_fork_warning
def test_a_character_that_only_a_later_process_meets_is_named(rows, tmp_path):
    prepare(make(rows(["abc"] * 3), tmp_path / "first"))
    path = rows(["abc"] * 49 + ["abcd"], "others.jsonl")
    for seed in range(2):  # whichever split it falls into
        tokenizer = str(tmp_path / "first" / "tokenizer")
        with pytest.raises(DataError, match="the tokenizer knows no 'd'"):
            prepare(make(path, tmp_path / "data", tokenizer=tokenizer, num_proc=2, validation_seed=seed))
        assert nothing_left(tmp_path / "data")


def test_more_processes_than_documents_are_fine(rows, tmp_path):
    manifest, _ = prepare(make(rows(["a", "b"]), tmp_path / "data", num_proc=64))
    assert manifest.train.documents == 1


def test_large_text_is_tokenized_by_all_cores_and_small_text_by_one(monkeypatch, rows):
    text = datasets.Dataset.from_dict({"text": ["x" * 1000] * 100})
    monkeypatch.setattr(encode, "allowed_cores", lambda: 7)
    assert encode._processes(text, None) == 1
    assert encode._processes(text, 3) == 3
    monkeypatch.setattr(encode, "_PARALLEL_FROM_BYTES", 50_000)
    assert encode._processes(text, None) == 7
    assert encode._processes(text.select(range(0, 20, 2)), None) == 1, "a small part of a large text is small"


def test_many_tokens_are_written_in_several_shards(monkeypatch, rows, tmp_path):
    monkeypatch.setattr(encode, "_SHARD_BYTES", 300)
    config = make(rows([f"document {i}" for i in range(100)]), tmp_path / "data")
    manifest, _ = prepare(config)
    shards = sorted(path.name for path in (tmp_path / "data" / "train").glob("*.arrow"))
    count = -(-manifest.train.tokens * 2 // 300)
    assert shards == [f"data-{i:05}-of-{count:05}.arrow" for i in range(count)]
    assert len(shards) > 3
    data = load_prepared(config)
    assert len(data.train.stream) == manifest.train.tokens
    assert data.tokenizer.decode(flat(data.train)).count("document") == 90


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_was_prepared(rows, tmp_path):
    texts = [f"naïve document {i}" for i in range(20)]
    path = rows(texts)
    config = make(path, tmp_path / "data", tokenizer="gpt2")
    manifest, _ = prepare(config)
    assert read_manifest(tmp_path / "data") == manifest
    raw = json.loads((tmp_path / "data" / "manifest.json").read_text(encoding="utf-8"))
    assert raw == dataclasses.asdict(manifest)
    assert raw["recipe"]["source"] == str(path)
    assert raw["recipe"]["tokenizer"] == "gpt2"
    assert raw["revision"].startswith("sha256:")
    assert (raw["vocab_size"], raw["end_of_text_id"]) == (50257, 50256)
    assert raw["train"]["documents"] == 18
    assert raw["validation"]["documents"] == 2
    assert raw["train"]["bytes"] + raw["validation"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert {"datasets", "tokenizers", "tiktoken", "python"} <= set(raw["versions"])
    for split in ("train", "validation"):
        assert raw[split]["tokens"] == sum(map(len, documents_of(tmp_path / "data", split)))
    assert manifest.train.bytes_per_token == manifest.train.bytes / manifest.train.tokens


def test_the_folder_holds_what_the_manifest_promises_and_nothing_else(text, tmp_path):
    prepare(make(text(), tmp_path / "data"))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "manifest.json",
        "tokenizer",
        "train",
        "validation",
    ]
    assert sorted(path.name for path in (tmp_path / "data" / "train").iterdir()) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"format": 1}', '{"format": 1, "train": {}, "validation": {}}', '{"a": 1}', "\udcff"],
)
def test_a_manifest_that_is_none_is_a_clear_error(text, tmp_path, content):
    config = make(text(), tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    for use in (prepare, load_prepared):
        with pytest.raises(DataError, match=r"manifest\.json: not a manifest of prepared data"):
            use(config)


def test_a_manifest_of_another_format_is_a_clear_error(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    path = tmp_path / "data" / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 2, "something": "new"}))
    for use in (prepare, load_prepared):
        with pytest.raises(DataError, match="prepared in format 2, not 1; remove it"):
            use(config)


# --- a second call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["file", "python-docs"])
def test_a_second_call_does_nothing(text, tmp_path, source):
    config = make(source if source == "python-docs" else text(), tmp_path / "data")
    manifest, anew = prepare(config)
    assert anew
    before = everything_in(tmp_path)
    assert prepare(config) == (manifest, False)
    assert everything_in(tmp_path) == before


def test_a_second_call_reads_no_text_again(monkeypatch, text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    monkeypatch.setattr(manifest_module, "file_digest", None)
    monkeypatch.setattr(module, "load_documents", None)
    assert prepare(config)[1] is False


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("source", "python-docs"),
        ("config", "other"),
        ("split", "other"),
        ("validation_split", "test"),
        ("revision", "v2"),
        ("text_column", "body"),
        ("validation_fraction", 0.2),
        ("validation_seed", 1),
        ("tokenizer", "gpt2"),
    ],
)
def test_a_knob_that_decides_the_tokens_may_not_change(text, tmp_path, knob, value):
    config = make(text(), tmp_path / "data")
    prepare(config)
    old = getattr(config.data, knob)
    before = everything_in(tmp_path)
    config = replace_knobs(config, {f"data.{knob}": value})
    for use in (prepare, load_prepared):
        with pytest.raises(DataError) as raised:
            use(config)
        assert f"prepared with data.{knob} {old!r}, the recipe says {value!r}" in str(raised.value)
        assert "choose another --data.dir, or remove the folder" in str(raised.value)
    assert everything_in(tmp_path) == before


def test_other_knobs_may_change(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    others = {"data.block_size": 4, "data.order": "random", "data.num_proc": 2, "data.sha256": "abc"}
    config = replace_knobs(config, others)
    assert prepare(config)[1] is False
    assert load_prepared(config)


def test_the_same_path_may_be_written_in_another_way(text, tmp_path, monkeypatch):
    text()
    monkeypatch.chdir(tmp_path)
    prepare(make("input.txt", "data"))
    assert prepare(make("./input.txt", tmp_path / "data"))[1] is False


def test_text_that_changed_is_refused(text, tmp_path):
    config = make(text("one " * 100), tmp_path / "data")
    prepare(config)
    text("two " * 100)
    for use in (prepare, load_prepared):
        with pytest.raises(DataError, match=r"input\.txt has changed since it was prepared"):
            use(config)


def test_a_file_that_joined_the_folder_is_refused(tmp_path, text):
    (tmp_path / "text").mkdir()
    text("one " * 50, "text/a.txt")
    text("two " * 50, "text/b.txt")
    config = make(tmp_path / "text", tmp_path / "data")
    prepare(config)
    assert prepare(config)[1] is False
    text("three", "text/c.txt")
    with pytest.raises(DataError, match="has changed since it was prepared"):
        prepare(config)


def test_text_that_was_only_touched_is_fine(text, tmp_path):
    path = text()
    config = make(path, tmp_path / "data")
    manifest, _ = prepare(config)
    os.utime(path, ns=(1, 1))
    assert prepare(config) == (manifest, False)
    assert load_prepared(config)


def test_text_that_is_gone_is_fine(text, tmp_path):
    path = text()
    config = make(path, tmp_path / "data")
    prepare(config)
    path.unlink()
    assert prepare(config)[1] is False
    assert load_prepared(config)


def test_the_prepared_folder_can_be_moved(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    tokens = flat(load_prepared(config).train)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "input.txt").unlink()
    config = replace_knobs(config, {"data.dir": str(tmp_path / "elsewhere")})
    assert flat(load_prepared(config).train) == tokens


def test_a_url_is_held_to_the_recipes_sha256_afterwards_too(monkeypatch, text, tmp_path):
    path = text()

    def download(url, sha256, folder):
        return Path(shutil.copy(path, folder))

    monkeypatch.setattr(source_module, "_download", download)
    config = make("https://example.org/input.txt", tmp_path / "data")
    manifest, _ = prepare(config)
    config = replace_knobs(config, {"data.sha256": manifest.revision.removeprefix("sha256:").upper()})
    assert prepare(config) == (manifest, False)
    config = replace_knobs(config, {"data.sha256": "0" * 64})
    for use in (prepare, load_prepared):
        with pytest.raises(DataError, match="not the recipe's 0000"):
            use(config)


# --- errors leave nothing behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("binary.txt", b"a\0b"),
        ("latin.txt", b"caf\xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n'),
        ("late.jsonl", b'{"text": "x"}\n' * 3000 + b'{"text": 1}\n'),
        ("half.jsonl", b'{"text": "\\ud800"}\n'),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-5]),
        ("tiny.txt", b"x"),  # one character cannot be two splits
    ],
)
def test_text_that_cannot_be_read_leaves_nothing_behind(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        prepare(make(path, tmp_path / "prepared"))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert nothing_left(tmp_path / "prepared")


def test_text_that_is_missing_makes_no_folder_at_all(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(make(tmp_path / "none.txt", tmp_path / "deep" / "down" / "prepared"))
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_is_missing_leaves_nothing_behind(text, tmp_path):
    (tmp_path / "no_tokenizer").mkdir()
    with pytest.raises(DataError, match="no Hugging Face tokenizer in that folder"):
        prepare(make(text(), tmp_path / "prepared", tokenizer=str(tmp_path / "no_tokenizer")))
    assert nothing_left(tmp_path / "prepared")


def test_a_tokenizer_that_lacks_characters_of_the_text_leaves_nothing_behind(text, tmp_path):
    prepare(make(text("abc" * 50), tmp_path / "first"))
    config = make(text("abcd" * 50, "other.txt"), tmp_path / "second", tokenizer=str(tmp_path / "first" / "tokenizer"))
    with pytest.raises(DataError, match="the tokenizer knows no 'd'"):
        prepare(config)
    assert nothing_left(tmp_path / "second")


@pytest.mark.parametrize("content", ["x", "xy"])
def test_too_little_text_for_two_splits_is_an_error_or_works(text, tmp_path, content):
    config = make(text(content), tmp_path / "data", validation_fraction=0.5)
    if len(content) == 1:
        with pytest.raises(DataError, match="too little text: none is left for train"):
            prepare(config)
        assert nothing_left(tmp_path / "data")
    else:
        manifest, _ = prepare(config)
        assert (manifest.train.tokens, manifest.validation.tokens) == (1, 1)


def test_a_fraction_that_rounds_to_nothing_is_an_error(text, tmp_path):
    with pytest.raises(DataError, match="too little text: none is left for validation"):
        prepare(make(text(), tmp_path / "data", validation_fraction=1e-30))
    assert nothing_left(tmp_path / "data")


def test_a_folder_that_holds_something_else_is_left_alone(text, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    before = everything_in(folder)
    with pytest.raises(DataError, match=r"exists and holds no manifest\.json; choose another --data\.dir"):
        prepare(make(text(), folder))
    assert everything_in(folder) == before


def test_a_file_in_place_of_the_folder_is_left_alone(text, tmp_path):
    path = text("hello " * 20, "data")
    for use, message in ((prepare, "exists and holds no manifest"), (load_prepared, "no prepared data")):
        with pytest.raises(DataError, match=message):
            use(make(text(), path))
    assert path.read_text() == "hello " * 20


def test_a_file_in_place_of_a_folder_above_is_a_clear_error(text, tmp_path):
    path = text()
    with pytest.raises(DataError, match="cannot be written"):
        prepare(make(path, path / "below" / "data"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_a_clear_error(text, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(DataError, match="cannot be written"):
        prepare(make(text(), tmp_path / "closed" / "data"))


def test_a_disk_that_is_full_is_a_clear_error(monkeypatch, text, tmp_path):
    def save_to_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", save_to_disk)
    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device"):
        prepare(make(text(), tmp_path / "data"))
    assert nothing_left(tmp_path / "data")


def test_an_empty_folder_may_be_there_already(text, tmp_path):
    (tmp_path / "data").mkdir()
    assert prepare(make(text(), tmp_path / "data"))[1]


def test_folders_above_are_made(text, tmp_path):
    assert prepare(make(text(), tmp_path / "a" / "b" / "data"))[1]


def test_the_folder_may_be_a_link_to_another_place(text, tmp_path):
    (tmp_path / "big_disk").mkdir()
    for number, target in enumerate(("there", "not_yet")):
        place = tmp_path / "big_disk" / target
        if target == "there":
            place.mkdir()
        link = tmp_path / f"link{number}"
        link.symlink_to(place)
        config = make(text(), link)
        assert prepare(config)[1]
        assert link.is_symlink()
        assert (place / "manifest.json").is_file()
        assert prepare(config)[1] is False
        assert load_prepared(config)


def test_prepared_data_may_not_lie_in_the_text_it_is_made_from(text, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    text(name="text/a.txt")
    before = everything_in(tmp_path)
    monkeypatch.chdir(tmp_path / "text")
    for source, folder in ((tmp_path / "text", tmp_path / "text" / "data"), (".", "data"), ("..", "data")):
        with pytest.raises(DataError, match="and would be read as text; choose another"):
            prepare(make(source, folder))
    assert everything_in(tmp_path) == before
    assert prepare(make(tmp_path / "text", tmp_path / "text_prepared"))[1], "beside it is fine"


# --- interruptions ---------------------------------------------------------------------------------------------------

forks = pytest.mark.skipif(sys.platform != "linux", reason="forking this process is safe on Linux only")
MOMENTS = ("load_documents", "build_tokenizer", "encode_split", "file_state")  # in the order in which they come


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, MemoryError, SystemExit])
def test_an_interruption_leaves_nothing_that_looks_finished(monkeypatch, text, tmp_path, moment, interruption):
    config = make(text(), tmp_path / "data")
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise interruption

        patch.setattr(module, moment, interrupted)
        with pytest.raises(DataError if interruption is MemoryError else interruption):
            prepare(config)
    assert nothing_left(tmp_path / "data")
    assert prepare(config)[1]
    assert load_prepared(config)


def prepare_and_pause(config, ready):
    """In another process: prepare, but stop for ever just before the manifest would be written."""

    def pause(files):
        ready.set()
        time.sleep(600)

    module.file_state = pause
    prepare(config)


@forks
@ignore_fork_warning
def test_a_killed_process_leaves_nothing_that_looks_finished(text, tmp_path):
    config = make(text(), tmp_path / "data")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=prepare_and_pause, args=(config, ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / ".data.partial").is_dir(), "it was killed in the middle"
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="no prepared data; run `prepare` first"):
        load_prepared(config)
    assert prepare(config)[1]
    assert load_prepared(config)
    assert not (tmp_path / ".data.partial").exists()


def prepare_together(config, barrier, results):
    barrier.wait(60)
    manifest, anew = prepare(config)
    results.put((anew, manifest, flat(load_prepared(config).train)))


@forks
@ignore_fork_warning
@pytest.mark.parametrize("attempt", range(3))
def test_of_several_processes_one_prepares_and_all_get_the_same(rows, tmp_path, attempt):
    config = make(rows([f"document {i}" for i in range(500)]), tmp_path / "new" / "data")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=prepare_together, args=(config, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(anew for anew, _, _ in got) == [False, False, True]
    assert all(rest == got[0][1:] for _, *rest in got for rest in [tuple(rest)])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_looks_while_another_finishes_takes_its_data(monkeypatch, text, tmp_path, moment):
    # The other one finishes just before or just after this one looks for the manifest.
    config = make(text(), tmp_path / "data")
    real, looked = module.read_manifest, []

    def look(folder):
        found = real(folder)
        if not looked:
            looked.append(folder)
            prepare(config)
            return real(folder) if moment == "before" else found
        return found

    monkeypatch.setattr(module, "read_manifest", look)
    assert prepare(config)[1] is False


def test_a_process_that_waited_for_another_with_other_wishes_is_told(monkeypatch, text, tmp_path):
    config = make(text(), tmp_path / "data")
    other = make(text(), tmp_path / "data", validation_fraction=0.2)
    real, looked = module._check_source, []

    def look(*arguments):
        if not looked:
            looked.append(arguments)
            prepare(other)
        real(*arguments)

    monkeypatch.setattr(module, "_check_source", look)
    with pytest.raises(DataError, match=r"prepared with data\.validation_fraction 0\.2, the recipe says 0\.1"):
        prepare(config)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_nothing_prepared_is_a_clear_error(text, tmp_path):
    with pytest.raises(DataError, match="no prepared data; run `prepare` first"):
        load_prepared(make(text(), tmp_path / "data"))


def test_what_is_opened_has_the_prepared_tokens_and_their_tokenizer(text, tmp_path):
    content = "some text, naïvely; 日本 " * 20
    config = make(text(content), tmp_path / "data")
    manifest, _ = prepare(config)
    data = load_prepared(config)
    assert data.manifest == manifest
    assert (len(data.train.stream), len(data.validation.stream)) == (manifest.train.tokens, manifest.validation.tokens)
    assert encode_ordinary(data.tokenizer, content) == flat(data.train) + flat(data.validation)


def test_a_block_as_long_as_the_data_is_a_clear_error(text, tmp_path):
    config = make(text("x" * 100), tmp_path / "data")
    prepare(config)
    # 90 training tokens: one block and the token after it
    assert load_prepared(replace_knobs(config, {"data.block_size": 89}))
    for block_size in (90, 91, 1024):
        with pytest.raises(DataError, match=rf"^data\.block_size: {block_size} tokens .* the 90 training tokens in "):
            load_prepared(replace_knobs(config, {"data.block_size": block_size}))


def test_validation_text_too_short_to_predict_anything_is_a_clear_error(text, tmp_path):
    config = make(text("x" * 100), tmp_path / "data", validation_fraction=0.01)
    prepare(config)
    with pytest.raises(DataError, match=r"1 validation tokens; raise data\.validation_fraction"):
        load_prepared(config)


def test_another_tokenizer_in_the_folder_is_refused(text, tmp_path):
    config = make(text("abc" * 50), tmp_path / "data")
    prepare(config)
    build_tokenizer("char", ["abd"]).hf.save_pretrained(tmp_path / "data" / "tokenizer")
    with pytest.raises(DataError, match="not the tokenizer that made these tokens"):
        load_prepared(config)


@pytest.mark.parametrize("damage", ["train", "validation", "tokenizer", "shard"])
def test_damaged_prepared_data_is_a_clear_error(text, tmp_path, damage):
    config = make(text(), tmp_path / "data")
    prepare(config)
    if damage == "shard":
        (tmp_path / "data" / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    else:
        shutil.rmtree(tmp_path / "data" / damage)
    with pytest.raises(DataError) as raised:
        load_prepared(config)
    assert "\n" not in str(raised.value)
