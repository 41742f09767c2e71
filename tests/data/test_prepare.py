"""`prepare`: splits, tokens, the manifest, repeated calls, errors, interruptions, concurrent
processes.
"""

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

from assertions import refusal
from nanogpt_hf.config.schema import Config, DataSection, replace_knobs
from nanogpt_hf.data import encode
from nanogpt_hf.data import prepare as module
from nanogpt_hf.data import prepared as prepared_module
from nanogpt_hf.data import source as source_module
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer
from nanogpt_hf.errors import DataError

# Python 3.12 warns of any fork of a process with threads; datasets forks, and some tests below.
ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def text(tmp_path):
    """Write a text file; return its path."""

    def write(content="hello world, " * 40, name="input.txt"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.fixture
def rows(tmp_path):
    """Write rows of text; return the file's path."""

    def write(texts, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


def make(source, folder, tokenizer="char", **knobs):
    """A config with small sizes."""
    defaults = {"tokenizer": str(tokenizer), "validation_fraction": 0.1, "block_size": 8}
    return Config(data=DataSection(source=str(source), dir=str(folder), **(defaults | knobs)))


def snapshot(folder):
    """Every path below a folder, with the content and time of files."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def is_empty_but_for_lock(folder):
    """True if neither prepared data nor a part of it exists; the empty lock file may."""
    remaining = [path.name for path in folder.parent.iterdir() if folder.name in path.name]
    return remaining in ([], [f".{folder.name}.lock"])


def flat(blocks):
    stream = blocks.stream
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def documents_of(folder, split):
    return [row["input_ids"] for row in datasets.load_from_disk(str(folder / split))]


END = 256  # of byte_tokenizer


def ids_of(text):
    """Those of letters, by byte_tokenizer."""
    return [ord(character) - ord("!") for character in text]


# --- results
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "train", "validation", "vocabulary"),
    # from nanoGPT's own scripts
    [("char", 1_003_854, 111_540, 65), ("gpt2", 301_966, 36_059, 50_257)],
)
def test_tiny_shakespeare_equals_nanogpt(
    shared, tmp_path, tokenizer, train, validation, vocabulary
):
    path = shared / "data" / "tinyshakespeare.txt"
    config = make(path, tmp_path / "data", tokenizer=tokenizer)
    manifest, is_new = prepare(config)
    assert is_new
    assert (manifest.train.tokens, manifest.validation.tokens) == (train, validation)
    assert (manifest.train.bytes, manifest.validation.bytes) == (1_003_854, 111_540)
    assert manifest.vocab_size == vocabulary
    assert manifest.end_of_text_id is None
    data = load_prepared(config)
    content = path.read_text(encoding="utf-8")
    assert (
        data.tokenizer.decode(flat(data.train)) + data.tokenizer.decode(flat(data.validation))
        == content
    )
    if tokenizer == "char":
        number = {character: i for i, character in enumerate(sorted(set(content)))}
        assert flat(data.validation) == [number[character] for character in content[1_003_854:]]


def test_single_document_is_split_without_end_token(text, tmp_path):
    content = "".join(chr(ord("a") + i % 26) for i in range(1000))
    config = make(text(content), tmp_path / "data", validation_fraction=0.25)
    manifest, _ = prepare(config)
    data = load_prepared(config)
    assert data.tokenizer.decode(flat(data.train)) == content[:750]
    assert data.tokenizer.decode(flat(data.validation)) == content[750:]
    assert (manifest.train.documents, manifest.validation.documents) == (1, 1)


def test_several_documents_end_with_end_token(rows, tmp_path, byte_tokenizer):
    texts = [f"document {i} <|endoftext|>" for i in range(30)]
    config = make(rows(texts), tmp_path / "data", tokenizer=byte_tokenizer)
    manifest, _ = prepare(config)
    assert manifest.end_of_text_id == END
    data = load_prepared(config)
    documents = documents_of(tmp_path / "data", "train") + documents_of(
        tmp_path / "data", "validation"
    )
    assert len(documents) == 30
    assert all(ids.index(END) == len(ids) - 1 for ids in documents), "once, at the end"
    assert sorted(data.tokenizer.decode(ids[:-1]) for ids in documents) == sorted(texts)


def test_documents_keep_their_order_and_number(rows, tmp_path):
    texts = [f"<{i}>" for i in range(200)]
    config = make(rows(texts), tmp_path / "data")
    prepare(config)
    data = load_prepared(config)
    train = data.tokenizer.decode(flat(data.train)).removeprefix("<").removesuffix(">").split("><")
    validation = (
        data.tokenizer.decode(flat(data.validation)).removeprefix("<").removesuffix(">").split("><")
    )
    assert (len(train), len(validation)) == (180, 20)
    for numbers in (train, validation):
        assert [int(n) for n in numbers] == sorted(map(int, numbers))
    assert sorted(map(int, train + validation)) == list(range(200))
    assert max(map(int, train)) > 190, "validation is drawn, not the tail"


def test_seed_selects_validation_documents(rows, tmp_path):
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


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (10, 1e-9), (2, 0.5), (3, 0.5)])
def test_fraction_of_few_documents_is_held_out(rows, tmp_path, count, fraction):
    manifest, _ = prepare(
        make(
            rows([f"text {i}" for i in range(count)]),
            tmp_path / "data",
            validation_fraction=fraction,
        )
    )
    assert manifest.train.documents + manifest.validation.documents == count
    assert 1 <= manifest.validation.documents < (2 if fraction < 0.5 else count)


@pytest.fixture
def hub(monkeypatch):
    splits = {}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split, **_: splits[split],
    )
    return splits


def test_given_split_is_validation(hub, tmp_path, byte_tokenizer):
    hub["train"] = datasets.Dataset.from_dict({"text": ["one"]})
    hub["test"] = datasets.Dataset.from_dict({"text": ["held", "out"]})
    knobs = {"validation_split": "test", "validation_fraction": 0.0}
    manifest, _ = prepare(make("owner/name", tmp_path / "data", byte_tokenizer, **knobs))
    assert documents_of(tmp_path / "data", "train") == [[*ids_of("one"), END]]
    assert documents_of(tmp_path / "data", "validation") == [
        [*ids_of("held"), END],
        [*ids_of("out"), END],
    ]
    assert manifest.end_of_text_id == END


def test_empty_hub_rows_are_dropped(hub, tmp_path, byte_tokenizer):
    hub["train"] = datasets.Dataset.from_dict({"text": ["a", "", None, "b", None] * 20})
    for name, tokenizer in (("char", "char"), ("bytes", byte_tokenizer)):
        manifest, _ = prepare(
            make("owner/name", tmp_path / name, tokenizer=tokenizer, validation_fraction=0.5)
        )
        assert manifest.train.documents + manifest.validation.documents == 40


def test_batches_of_empty_rows(hub, rows, tmp_path):
    prepare(make(rows(["a", "b"]), tmp_path / "first"))
    hub["train"] = datasets.Dataset.from_dict({"text": [""] * 3000 + ["a"]})
    hub["test"] = datasets.Dataset.from_dict({"text": ["b"]})
    folder = str(tmp_path / "first" / "tokenizer")  # the tokenizer that handles empty input worst
    manifest, _ = prepare(
        make("owner/name", tmp_path / "data", tokenizer=folder, validation_split="test")
    )
    assert manifest.train.documents == 1


@pytest.mark.parametrize("column", [[], [""], [None], ["", None, ""]])
def test_hub_data_set_without_text_is_an_error(hub, tmp_path, byte_tokenizer, column):
    hub["train"] = datasets.Dataset.from_dict(
        {"text": column}, datasets.Features({"text": datasets.Value("string")})
    )
    for tokenizer in ("char", byte_tokenizer):
        assert refusal(prepare, make("owner/name", tmp_path / "data", tokenizer)).startswith(
            "data.source: "
        )
        assert is_empty_but_for_lock(tmp_path / "data")


class FakeVocabulary:
    """A tokenizer with a vocabulary of any size, with what `prepare` uses."""

    bos_token_id = eos_token_id = None

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def get_vocab(self):
        return {"a": 0}

    def save_pretrained(self, folder):
        pass


def fake_tokenizer(monkeypatch, size, ids):
    def build(name, texts, vocab_size, bpe_pattern):
        return Tokenizer(
            "fake", FakeVocabulary(size), lambda texts: [np.asarray(ids, np.uint32) for _ in texts]
        )

    monkeypatch.setattr(module, "build_tokenizer", build)


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2**16 - 1, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (200_000, "uint32")],
)
def test_vocabulary_size_decides_the_dtype(monkeypatch, text, tmp_path, size, kind):
    fake_tokenizer(monkeypatch, size, [0, size - 1, 1])
    prepare(make(text(), tmp_path / "data"))
    rows = datasets.load_from_disk(str(tmp_path / "data" / "train"))
    assert rows.features["input_ids"].feature.dtype == kind
    assert rows[0]["input_ids"] == [0, size - 1, 1]


@pytest.mark.parametrize("size", [100, 2**16, 200_000])
def test_id_beyond_the_vocabulary_is_an_error(monkeypatch, text, tmp_path, size):
    fake_tokenizer(monkeypatch, size, [0, size])
    assert f"id {size}, " in refusal(prepare, make(text(), tmp_path / "data"))
    assert is_empty_but_for_lock(tmp_path / "data")


def test_several_threads_equal_one(rows, tmp_path, monkeypatch):  # test_bpe.py: other tokenizer
    monkeypatch.setattr(encode, "_BATCH_DOCUMENTS", 7)
    path = rows([f"row {i} " + "x" * (i % 30) for i in range(300)])
    streams = []
    for num_threads in (1, 3):
        config = make(path, tmp_path / f"{num_threads}", num_threads=num_threads)
        prepare(config)
        data = load_prepared(config)
        streams.append((flat(data.train), flat(data.validation)))
    assert len(streams[0][0]) > 1000
    assert streams[1] == streams[0]


def test_unknown_character_in_a_thread_is_named(rows, tmp_path):
    prepare(make(rows(["abc"] * 3), tmp_path / "first"))
    path = rows(["abc"] * 49 + ["abcd"], "others.jsonl")
    assert "'d'" in refusal(
        prepare, make(path, tmp_path / "data", tmp_path / "first" / "tokenizer", num_threads=2)
    )
    assert is_empty_but_for_lock(tmp_path / "data")


def test_many_tokens_make_several_shards(monkeypatch, rows, tmp_path):
    monkeypatch.setattr(encode, "SHARD_BYTES", 300)
    monkeypatch.setattr(encode, "_RECORD_TOKENS", 100)
    monkeypatch.setattr(encode, "_BATCH_DOCUMENTS", 7)
    config = make(rows([f"document {i}" for i in range(100)]), tmp_path / "data")
    manifest, _ = prepare(config)
    shards = sorted(path.name for path in (tmp_path / "data" / "train").glob("*.arrow"))
    assert shards == [f"data-{i:05}.arrow" for i in range(len(shards))]
    assert len(shards) > 3
    assert datasets.load_from_disk(str(tmp_path / "data" / "train")).num_rows == 90
    data = load_prepared(config)
    assert len(data.train.stream) == manifest.train.tokens
    assert data.tokenizer.decode(flat(data.train)).count("document") == 90


# --- the manifest
# ------------------------------------------------------------------------------


def test_manifest_describes_prepared_data(rows, tmp_path, byte_tokenizer):
    texts = [f"naïve document {i}" for i in range(20)]
    path = rows(texts)
    config = make(path, tmp_path / "data", tokenizer=byte_tokenizer)
    manifest, _ = prepare(config)
    assert read_manifest(tmp_path / "data") == manifest
    raw = json.loads((tmp_path / "data" / "manifest.json").read_text(encoding="utf-8"))
    assert raw == dataclasses.asdict(manifest)
    assert raw["recipe"]["source"] == str(path)
    assert raw["recipe"]["tokenizer"] == str(byte_tokenizer)
    assert raw["revision"].startswith("sha256:")
    assert (raw["vocab_size"], raw["end_of_text_id"]) == (257, 256)
    assert raw["train"]["documents"] == 18
    assert raw["validation"]["documents"] == 2
    assert raw["train"]["bytes"] + raw["validation"]["bytes"] == sum(
        len(text.encode()) for text in texts
    )
    assert {"datasets", "tokenizers", "tiktoken", "python"} <= set(raw["versions"])
    for split in ("train", "validation"):
        assert raw[split]["tokens"] == sum(map(len, documents_of(tmp_path / "data", split)))
    assert manifest.train.bytes_per_token == manifest.train.bytes / manifest.train.tokens


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"format": 2}',
        '{"format": 2, "train": {}, "validation": {}}',
        '{"a": 1}',
        "\udcff",
    ],
)
def test_invalid_manifest_is_one_line(text, tmp_path, content):
    config = make(text(), tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text(
        content, encoding="utf-8", errors="surrogateescape"
    )
    for use in (prepare, load_prepared):
        assert "manifest.json: " in refusal(use, config)


def test_manifest_of_another_version_is_one_line(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    path = tmp_path / "data" / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 1, "something": "new"}))
    for use in (prepare, load_prepared):
        assert "format 1" in refusal(use, config)


# --- a second call
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["file", "python-docs"])
def test_second_prepare_changes_nothing(text, tmp_path, source):
    config = make(source if source == "python-docs" else text(), tmp_path / "data")
    manifest, is_new = prepare(config)
    assert is_new
    before = snapshot(tmp_path)
    assert prepare(config) == (manifest, False)
    assert snapshot(tmp_path) == before


def test_second_prepare_does_not_read_text(monkeypatch, text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    monkeypatch.setattr(prepared_module, "file_digest", None)
    monkeypatch.setattr(module, "load_documents", None)
    assert prepare(config)[1] is False


def test_knobs_that_decide_tokens_may_not_change_and_others_may(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    before = snapshot(tmp_path)
    for knob, value in {
        "source": "python-docs",
        "config": "other",
        "split": "other",
        "validation_split": "test",
        "revision": "v2",
        "text_column": "body",
        "validation_fraction": 0.2,
        "validation_seed": 1,
        "tokenizer": "gpt2",
    }.items():
        old, changed = getattr(config.data, knob), replace_knobs(config, {f"data.{knob}": value})
        for use in (prepare, load_prepared):
            assert f"data.{knob} {old!r}, the recipe says {value!r}" in refusal(use, changed)
    assert snapshot(tmp_path) == before
    others = {
        "data.block_size": 4,
        "data.order": "random",
        "data.num_threads": 2,
        "data.sha256": "abc",
    }
    config = replace_knobs(config, others)
    assert prepare(config)[1] is False
    assert load_prepared(config)


def test_changed_text_is_refused(text, tmp_path):
    config = make(text("one " * 100), tmp_path / "data")
    prepare(config)
    text("two " * 100)
    for use in (prepare, load_prepared):
        assert "input.txt has changed" in refusal(use, config)


def test_added_file_is_refused(tmp_path, text):
    (tmp_path / "text").mkdir()
    text("one " * 50, "text/a.txt")
    text("two " * 50, "text/b.txt")
    config = make(tmp_path / "text", tmp_path / "data")
    prepare(config)
    assert prepare(config)[1] is False
    text("three", "text/c.txt")
    assert "has changed" in refusal(prepare, config)


def test_touched_text_is_accepted(text, tmp_path):
    path = text()
    config = make(path, tmp_path / "data")
    manifest, _ = prepare(config)
    os.utime(path, ns=(1, 1))
    assert prepare(config) == (manifest, False)
    assert load_prepared(config)


def test_removed_text_is_accepted(text, tmp_path):
    path = text()
    config = make(path, tmp_path / "data")
    prepare(config)
    path.unlink()
    assert prepare(config)[1] is False
    assert load_prepared(config)


def test_prepared_folder_can_be_moved(text, tmp_path):
    config = make(text(), tmp_path / "data")
    prepare(config)
    tokens = flat(load_prepared(config).train)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "input.txt").unlink()
    config = replace_knobs(config, {"data.dir": str(tmp_path / "elsewhere")})
    assert flat(load_prepared(config).train) == tokens


def test_sha256_of_url_is_checked_on_later_calls(monkeypatch, text, tmp_path):
    path = text()

    def download(url, folder, *, sha256, knobs):
        return Path(shutil.copy(path, folder))

    monkeypatch.setattr(source_module, "download", download)
    config = make("https://example.org/input.txt", tmp_path / "data")
    manifest, _ = prepare(config)
    config = replace_knobs(
        config, {"data.sha256": manifest.revision.removeprefix("sha256:").upper()}
    )
    assert prepare(config) == (manifest, False)
    config = replace_knobs(config, {"data.sha256": "0" * 64})
    for use in (prepare, load_prepared):
        assert "0" * 64 in refusal(use, config)


# --- errors leave nothing behind
# -------------------------------------------------------------------------------------


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
        ("tiny.txt", b"x"),  # one character cannot make two splits
    ],
)
def test_unreadable_text_leaves_nothing(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert str(path) in refusal(prepare, make(path, tmp_path / "prepared"))
    assert is_empty_but_for_lock(tmp_path / "prepared")


def test_missing_text_makes_no_folder(tmp_path):
    missing = tmp_path / "none.txt"
    assert str(missing) in refusal(prepare, make(missing, tmp_path / "deep" / "down" / "prepared"))
    assert list(tmp_path.iterdir()) == []


def test_missing_tokenizer_leaves_nothing(text, tmp_path):
    (tmp_path / "no_tokenizer").mkdir()
    config = make(text(), tmp_path / "prepared", tmp_path / "no_tokenizer")
    assert str(tmp_path / "no_tokenizer") in refusal(prepare, config)
    assert is_empty_but_for_lock(tmp_path / "prepared")


@pytest.mark.parametrize("content", ["x", "xy"])
def test_text_too_short_for_two_splits(text, tmp_path, content):
    config = make(text(content), tmp_path / "data", validation_fraction=0.5)
    if len(content) == 1:
        assert "too little text" in refusal(prepare, config)
        assert is_empty_but_for_lock(tmp_path / "data")
    else:
        manifest, _ = prepare(config)
        assert (manifest.train.tokens, manifest.validation.tokens) == (1, 1)


def test_folder_with_other_content_is_refused(text, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    before = snapshot(folder)
    message = refusal(prepare, make(text(), folder))
    assert message.startswith(f"{folder}: ")
    assert "--data.dir" in message
    assert snapshot(folder) == before


def test_file_in_place_of_the_folder_is_refused(text, tmp_path):
    path = text("hello " * 20, "data")
    for use in (prepare, load_prepared):
        assert refusal(use, make(text(), path)).startswith(f"{path}: ")
    assert path.read_text() == "hello " * 20


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_unwritable_parent_folder_is_one_line(text, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert str(tmp_path / "closed") in refusal(prepare, make(text(), tmp_path / "closed" / "data"))


def test_full_disk_is_one_line(monkeypatch, text, tmp_path):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encode._HashedFile, "write", write)
    assert "No space left" in refusal(prepare, make(text(), tmp_path / "data"))
    assert is_empty_but_for_lock(tmp_path / "data")


def test_folder_may_be_a_link(text, tmp_path):
    (tmp_path / "big_disk").mkdir()
    for number, target in enumerate(("existing", "new")):
        folder = tmp_path / "big_disk" / target
        if target == "existing":
            folder.mkdir()
        link = tmp_path / f"link{number}"
        link.symlink_to(folder)
        config = make(text(), link)
        assert prepare(config)[1]
        assert link.is_symlink()
        assert (folder / "manifest.json").is_file()
        assert prepare(config)[1] is False
        assert load_prepared(config)


def test_prepared_data_inside_its_source_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    text(name="text/a.txt")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path / "text")
    for source, folder in (
        (tmp_path / "text", tmp_path / "text" / "data"),
        (".", "data"),
        ("..", "data"),
    ):
        assert f"data.source {source}" in refusal(prepare, make(source, folder))
    assert snapshot(tmp_path) == before
    assert prepare(make(tmp_path / "text", tmp_path / "text_prepared"))[1], "beside it is fine"


# --- interruptions
# ------------------------------------------------------------------------------

forks = pytest.mark.skipif(
    sys.platform != "linux", reason="forking this process is safe on Linux only"
)
MOMENTS = ("load_documents", "build_tokenizer", "_write_splits", "write_facts")  # in order of time


@pytest.mark.parametrize(
    ("moment", "interruption"),
    [*((moment, KeyboardInterrupt) for moment in MOMENTS)]
    + [("write_facts", interruption) for interruption in (RuntimeError, MemoryError, SystemExit)],
)
def test_interrupted_prepare_leaves_no_manifest(monkeypatch, text, tmp_path, moment, interruption):
    config = make(text(), tmp_path / "data")
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise interruption

        patch.setattr(module, moment, interrupted)
        with pytest.raises(DataError if interruption is MemoryError else interruption):
            prepare(config)
    assert is_empty_but_for_lock(tmp_path / "data")
    assert prepare(config)[1]
    assert load_prepared(config)


def prepare_and_pause(config, ready):
    """In another process: prepare, and stop forever before the manifest is written."""

    def pause(*_):
        ready.set()
        time.sleep(600)

    module.write_facts = pause
    prepare(config)


@forks
@ignore_fork_warning
def test_killed_prepare_leaves_no_manifest(text, tmp_path):
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
    assert "no prepared data" in refusal(load_prepared, config)
    assert prepare(config)[1]
    assert load_prepared(config)
    assert not (tmp_path / ".data.partial").exists()


def prepare_together(config, barrier, results):
    barrier.wait(60)
    manifest, is_new = prepare(config)
    results.put((is_new, manifest, flat(load_prepared(config).train)))


@forks
@ignore_fork_warning
def test_concurrent_prepare_runs_once(rows, tmp_path):
    config = make(rows([f"document {i}" for i in range(500)]), tmp_path / "new" / "data")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=prepare_together, args=(config, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    actual = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(is_new for is_new, _, _ in actual) == [False, False, True]
    assert all(rest == actual[0][1:] for _, *rest in actual for rest in [tuple(rest)])


def test_prepare_refuses_data_of_another_process_with_other_knobs(monkeypatch, text, tmp_path):
    config = make(text(), tmp_path / "data")
    other = make(text(), tmp_path / "data", validation_fraction=0.2)
    original, calls = module.check_source, []

    def look(*arguments):
        if not calls:
            calls.append(arguments)
            prepare(other)
        original(*arguments)

    monkeypatch.setattr(module, "check_source", look)
    assert "data.validation_fraction 0.2, the recipe says 0.1" in refusal(prepare, config)


# --- opening
# ------------------------------------------------------------------------------


def test_missing_prepared_data_is_one_line(text, tmp_path):
    assert "`prepare`" in refusal(load_prepared, make(text(), tmp_path / "data"))


def test_block_as_long_as_the_data_is_one_line(text, tmp_path):
    config = make(text("x" * 100), tmp_path / "data")
    prepare(config)
    # 90 training tokens: one block and its next token
    assert load_prepared(replace_knobs(config, {"data.block_size": 89}))
    for block_size in (90, 91, 1024):
        message = refusal(load_prepared, replace_knobs(config, {"data.block_size": block_size}))
        assert message.startswith(f"data.block_size: {block_size} ")
        assert "90 training tokens" in message


def test_validation_text_without_target_is_one_line(text, tmp_path):
    config = make(text("x" * 100), tmp_path / "data", validation_fraction=0.01)
    prepare(config)
    assert "data.validation_fraction" in refusal(load_prepared, config)


def test_replaced_tokenizer_is_refused(text, tmp_path):
    config = make(text("abc" * 50), tmp_path / "data")
    prepare(config)
    build_tokenizer("char", ["abd"]).hf.save_pretrained(tmp_path / "data" / "tokenizer")
    assert str(tmp_path / "data" / "tokenizer") in refusal(load_prepared, config)


@pytest.mark.parametrize("damage", ["train", "validation", "tokenizer", "shard"])
def test_damaged_prepared_data_is_one_line(text, tmp_path, damage):
    config = make(text(), tmp_path / "data")
    prepare(config)
    if damage == "shard":
        (tmp_path / "data" / "train" / "data-00000.arrow").write_bytes(b"")
    else:
        shutil.rmtree(tmp_path / "data" / damage)
    assert str(tmp_path / "data") in refusal(load_prepared, config)
