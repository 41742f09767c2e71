"""`prepare`: splits, tokens, the manifest, repeated calls, errors, interruptions, concurrent
processes.
"""

import errno
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.schema import Config, DataSection, replace_knobs
from nanogpt_hf.data import datatrove, formats
from nanogpt_hf.data import documents as documents_module
from nanogpt_hf.data import local_files as local_files_module
from nanogpt_hf.data import prepare as module
from nanogpt_hf.data import prepared as prepared_module
from nanogpt_hf.data import source as source_module
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.shards import ShardWriter
from nanogpt_hf.data.summary import split_warnings, summary_lines
from nanogpt_hf.data.text import text_encoder
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.data.unchanged import FilesBefore

SPLITS = ("train", "validation")
# The end token of byte_tokenizer.
END = 256


@pytest.fixture
def text(tmp_path):
    """Write a text file; return its path."""

    def write(content="hello world, " * 40, name="input.txt"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.fixture
def rows(text):
    """Write rows of text; return the file's path."""
    return lambda texts: text("".join(json.dumps({"text": t}) + "\n" for t in texts), "rows.jsonl")


@pytest.fixture
def make(tmp_path):
    """A function that gives a config with small sizes; its data is in `tmp_path`/data."""

    def make(source, tokenizer="char", **knobs):
        defaults = {"dir": str(tmp_path / "data"), "validation_fraction": 0.1, "block_size": 8}
        options = defaults | knobs
        return Config(data=DataSection(source=str(source), tokenizer=str(tokenizer), **options))

    return make


@pytest.fixture
def hub(monkeypatch):
    """The splits of every Hub data set."""
    splits = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split, **_: splits[split])
    return splits


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
    return np.concatenate(blocks.stream.chunks).tolist()


def texts_of(config):
    """The text of both splits."""
    data = load_prepared(config)
    return [data.tokenizer.decode(flat(blocks)) for blocks in (data.train, data.validation)]


def documents_of(config):
    """The ids of each document, by split."""
    folders = (f"{config.data.dir}/{split}" for split in SPLITS)
    return [datasets.load_from_disk(folder)["input_ids"][:] for folder in folders]


def refusals(config):
    """The refusals of `prepare` and `load_prepared`."""
    return [refusal(use, config) for use in (prepare, load_prepared)]


# --- results
# ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokenizer", "train", "validation", "vocabulary"),
    # from nanoGPT's own scripts
    [("char", 1_003_854, 111_540, 65), ("gpt2", 301_966, 36_059, 50_257)],
)
def test_tiny_shakespeare_equals_nanogpt(shared, make, tokenizer, train, validation, vocabulary):
    path = shared / "data" / "tinyshakespeare.txt"
    config = make(path, tokenizer)
    manifest, _ = prepare(config)
    assert (manifest.train.tokens, manifest.validation.tokens) == (train, validation)
    assert (manifest.train.bytes, manifest.validation.bytes) == (1_003_854, 111_540)
    assert (manifest.vocab_size, manifest.end_of_text_id) == (vocabulary, None)
    content = path.read_text(encoding="utf-8")
    assert texts_of(config) == [content[:1_003_854], content[1_003_854:]]


def test_single_document_is_split_without_end_token(text, make):
    content = "".join(chr(ord("a") + i % 26) for i in range(1000))
    config = make(text(content), validation_fraction=0.25)
    manifest, _ = prepare(config)
    assert texts_of(config) == [content[:750], content[750:]]
    assert (manifest.train.documents, manifest.validation.documents) == (1, 1)
    first, _ = summary_lines(config, load_prepared(config))
    assert first.startswith("  train      1 document, 750 tokens, ")


def test_documents_keep_their_order_and_end_with_end_token(rows, make, byte_tokenizer):
    texts = [f"{i} <|endoftext|>" for i in range(200)]
    config = make(rows(texts), byte_tokenizer)
    manifest, _ = prepare(config)
    assert manifest.end_of_text_id == END
    decode = load_prepared(config).tokenizer.decode
    numbers = []
    for documents in documents_of(config):
        assert all(ids.index(END) == len(ids) - 1 for ids in documents), "once, at the end"
        numbers.append([texts.index(decode(ids[:-1])) for ids in documents])
    train, validation = numbers
    assert (train, validation) == (sorted(train), sorted(validation))
    assert (sorted(train + validation), len(validation)) == (list(range(200)), 20)
    assert max(train) > 190, "validation is drawn, not the tail"


def test_seed_selects_validation_documents(rows, make, tmp_path):
    path = rows([f"<{i}>" for i in range(200)])
    held = []
    for number, seed in enumerate((1, 1, 2)):
        config = make(path, dir=str(tmp_path / f"{number}"), validation_seed=seed)
        prepare(config)
        held.append(texts_of(config)[1])
    assert held[0] == held[1] != held[2]


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (3, 0.5)])
def test_fraction_of_few_documents_is_held_out(rows, make, count, fraction):
    path = rows([f"text {i}" for i in range(count)])
    manifest, _ = prepare(make(path, validation_fraction=fraction, block_size=1))
    assert manifest.train.documents + manifest.validation.documents == count
    assert 1 <= manifest.validation.documents < (2 if fraction < 0.5 else count)


def test_given_split_is_validation(hub, make, byte_tokenizer):
    hub["train"] = datasets.Dataset.from_dict({"text": ["!"]})
    hub["test"] = datasets.Dataset.from_dict({"text": ['"', "#$"]})
    config = make(
        "owner/name", byte_tokenizer, validation_split="test", validation_fraction=0.0, block_size=1
    )
    prepare(config)
    assert documents_of(config) == [[[0, END]], [[1, END], [2, 3, END]]]


def test_empty_hub_rows_are_dropped(hub, make, tmp_path):
    column = [""] * 3000 + ["a", "", None, "b", None] * 20  # batches of empty rows, too
    hub["train"] = datasets.Dataset.from_dict({"text": column})
    # the last handles empty input worst
    for name in ("char", tmp_path / "char" / "tokenizer"):
        folder = str(tmp_path / Path(name).name)
        manifest, _ = prepare(make("owner/name", name, dir=folder, validation_fraction=0.5))
        assert manifest.train.documents + manifest.validation.documents == 40


@pytest.mark.parametrize(("size", "kind"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_vocabulary_decides_the_dtype_and_bounds_the_ids(size, kind):
    ids = [np.array([0, size - 1], np.uint32)]
    tokenizer = SimpleNamespace(name="x", vocab_size=size, start_of_text_id=None)
    tokenizer.encode_batch = lambda texts: ids
    encode = text_encoder(tokenizer, None)
    (row,) = encode(["a"], 0)
    assert (row.ids.dtype, row.ids.tolist()) == (kind, [0, size - 1])
    ids[0][0] = size
    assert f"id {size}, " in refusal(encode, ["a"], 0)


def test_unknown_character_in_a_thread_is_named(rows, make, tmp_path):
    prepare(make(rows(["abc"] * 3), dir=str(tmp_path / "first"), block_size=1))
    config = make(rows(["abc"] * 49 + ["abcd"]), tmp_path / "first" / "tokenizer", num_threads=2)
    assert "'d'" in refusal(prepare, config)
    assert is_empty_but_for_lock(tmp_path / "data")


# --- the manifest
# ------------------------------------------------------------------------------


def test_manifest_describes_prepared_data(rows, make, byte_tokenizer):
    texts = [f"naïve document {i}" for i in range(20)]
    config = make(rows(texts), byte_tokenizer)
    manifest, _ = prepare(config)
    assert read_manifest(Path(config.data.dir)) == manifest
    splits = manifest.train, manifest.validation
    assert [split.documents for split in splits] == [18, 2]
    assert sum(split.bytes for split in splits) == len("".join(texts).encode())
    tokens = [sum(map(len, documents)) for documents in documents_of(config)]
    assert [split.tokens for split in splits] == tokens


DEEP = b"[" * 3000 + b"]" * 3000


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"5", b'{"format": 2}', b'"\xff"', DEEP])
def test_invalid_manifest_is_one_line(text, make, tmp_path, content):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_bytes(content)
    assert all("manifest.json: " in message for message in refusals(make(text())))


EDITS = {
    "format": (1, "2", None),
    "recipe": (None, [], "x", {"no": 1}, {"source": 5}),
    "revision": (None, 5),
    "tokenizer_hash": (None, 5),
    "vocab_size": (None, "65", 0, -1, 1.5, True),
    "end_of_text_id": ("1", -1),
    "file_state": (5, []),
    "versions": (None, {"python": 3}),
    "teacher": (5,),
    "sources": ([1], "x"),
    "train": (None, [], {}, "x", {"tokens": 5}),
    "train.tokens": (None, "5", -1, 1.5),
    "train.bytes": (0, -1, "5"),
    "train.sha256": (5, []),
    "train.shards": ("x", [], {"a": "x"}, {"a": {}}, {"a": {"sha256": 5}}),
    "validation.documents": (-1, None),
    "more": (1,),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EDITS.items() for value in values]
)
def test_edited_manifest_is_one_line(text, make, tmp_path, name, value):
    config = make(text())
    prepare(config)
    path = tmp_path / "data" / "manifest.json"
    manifest = tree = json.loads(path.read_text())
    *outer, last = name.split(".")
    for key in outer:
        tree = tree[key]
    tree[last] = value
    path.write_text(json.dumps(manifest))
    for message in refusals(config):
        assert f"{path}: not a manifest of prepared data: " in message
        assert last in message or name == "format"


def test_shards_of_another_split_are_refused_before_a_run(text, make, tmp_path):
    config = make(text())
    prepare(config)
    (shard,) = (tmp_path / "data" / "validation").glob("*.arrow")
    shutil.copy(shard, tmp_path / "data" / "train" / shard.name)
    message = refusal(load_prepared, config)
    assert message.startswith(f"{tmp_path / 'data' / 'train'}: holds ")
    assert " tokens in input_ids, and manifest.json says " in message


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize(
    ("tokenizer", "kept", "openings"),
    [
        ("bytes", 10**6, 1),
        ("char", 10**6, 1),
        ("bpe", 10**6, 1),
        # documents that do not fit into memory
        ("bytes", 0, 1),
        ("char", 0, 2),
        ("bpe", 0, 3),  # the held-out documents are chosen when all are counted
    ],
)
def test_source_is_opened_once_if_its_documents_fit_into_memory(
    rows, make, byte_tokenizer, monkeypatch, documents, tokenizer, kept, openings
):
    opened = []
    read_tables = source_module.read_tables
    monkeypatch.setattr(
        source_module, "read_tables", lambda *args: opened.append(args) or read_tables(*args)
    )
    monkeypatch.setattr(documents_module, "_KEPT_CHARACTERS", kept)
    name = byte_tokenizer if tokenizer == "bytes" else tokenizer
    config = make(rows(["one or two words again " * 20] * documents), name, vocab_size=260)
    prepare(config)
    # A single document stays in memory whatever its size: it is cut.
    assert len(opened) == (1 if documents == 1 else openings)
    again = make(config.data.source, name, vocab_size=260, dir=f"{config.data.dir}2")
    monkeypatch.setattr(documents_module, "_KEPT_CHARACTERS", 10**6)
    prepare(again)
    assert texts_of(again) == texts_of(config)


# --- a second call
# ------------------------------------------------------------------------------


def test_second_prepare_reads_and_changes_nothing(text, make, tmp_path, monkeypatch):
    config = make(text())
    manifest, is_new = prepare(config)
    before = snapshot(tmp_path)
    monkeypatch.setattr(prepared_module, "file_digest", None)
    monkeypatch.setattr(module, "load_documents", None)
    assert (is_new, prepare(config)) == (True, (manifest, False))
    assert snapshot(tmp_path) == before


def test_knobs_that_decide_tokens_may_not_change_and_others_may(text, make, tmp_path):
    config = make(text())
    prepare(config)
    before = snapshot(tmp_path)
    for knob, value in {"source": "python-docs", "split": "other", "tokenizer": "gpt2"}.items():
        old = getattr(config.data, knob)
        changed = replace_knobs(config, {f"data.{knob}": value})
        named = f"data.{knob} {old!r}, the recipe says {value!r}"
        assert all(named in message for message in refusals(changed))
    assert snapshot(tmp_path) == before
    others = {"block_size": 4, "order": "random", "num_threads": 2, "sha256": "abc"}
    config = replace_knobs(config, {f"data.{knob}": value for knob, value in others.items()})
    assert prepare(config)[1] is False
    assert load_prepared(config)


def test_changed_or_added_text_is_refused(make, tmp_path, text):
    (tmp_path / "text").mkdir()
    config = make(tmp_path / "text")
    for name in ("a", "b"):
        text(f"{name} " * 50, f"text/{name}.txt")
    prepare(config)
    assert prepare(config)[1] is False
    added = text("three", "text/c.txt")  # the others are not touched
    assert all("text has changed" in message for message in refusals(config))
    added.unlink()
    assert prepare(config)[1] is False
    for name in ("a", "b"):
        text("c " * 50, f"text/{name}.txt")
        assert all("text has changed" in message for message in refusals(config))
        text(f"{name} " * 50, f"text/{name}.txt")
    assert load_prepared(config)


def appended(path):
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("kept", "number"), [(10**6, 1), (0, 1), (0, 2)], ids=["only", "first of two", "second of two"]
)
@pytest.mark.parametrize("change", [appended, cut, os.unlink])
def test_text_that_changes_while_it_is_read_is_refused(
    rows, make, monkeypatch, tmp_path, change, kept, number
):
    # `bpe` reads the documents to count them, and again if they do not fit into memory.
    monkeypatch.setattr(documents_module, "_KEPT_CHARACTERS", kept)
    path = rows([f"text {n}, " * 5 for n in range(60)])
    config = make(path, "bpe", vocab_size=260)
    content = path.read_bytes()
    read = source_module.read_tables
    readings = []

    def changing(*arguments):
        readings.append(1)
        for table in read(*arguments):
            if len(readings) == number:
                change(path)
            yield table

    monkeypatch.setattr(source_module, "read_tables", changing)
    assert f"{path}: has changed while it was read" in refusal(prepare, config)
    assert not (tmp_path / "data").exists()
    path.write_bytes(content)
    monkeypatch.setattr(source_module, "read_tables", read)
    assert prepare(config)[1]


def touched(path):
    os.utime(path, ns=(1, 1))


KINDS = ["text", "text with a limit", "token files"]


@pytest.fixture
def changing(rows, make, monkeypatch, tmp_path, byte_tokenizer):
    """A function that gives a recipe of a kind, and its file, which `change` changes while it is
    read.
    """

    def changing(kind, change):
        if kind == "token files":
            path = tmp_path / "a.ds"
            np.arange(100, dtype="<u2").tofile(path)
            np.array([30, 60, 100], dtype="<u8").tofile(f"{path}.index")
            config = make(path, byte_tokenizer, format="datatrove")
            place = datatrove, "_count_bytes"
        else:
            path = rows([f"text {n}, " * 5 for n in range(60)])
            limit = 500 if kind == "text with a limit" else None
            config = make(path, byte_tokenizer, max_tokens=limit)
            place = source_module, "_documents"
        read = getattr(*place)
        # With larger batches a limit would come after the end of the rows.
        monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 3)
        readings = []

        def changed(*arguments, **options):
            result = read(*arguments, **options)
            if not readings:
                change(path)
            readings.append(1)
            return result

        monkeypatch.setattr(*place, changed)
        return config, path

    return changing


def more_tokens(path):
    if path.suffix != ".ds":
        appended(path)
        return
    for file, number, kind in ((path, 7, "<u2"), (f"{path}.index", 101, "<u8")):
        values = np.fromfile(file, dtype=kind)
        np.append(values, np.array([number], kind)).tofile(file)


@pytest.mark.parametrize("change", [more_tokens, cut, os.unlink])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_source_that_changes_while_it_is_read_is_refused(
    changing, tmp_path, kind, change
):
    config, path = changing(kind, change)
    assert f"{path}: has changed while it was read" in refusal(prepare, config)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_that_changes_while_a_source_is_read_is_accepted(changing, kind):
    config, _ = changing(kind, touched)
    manifest, _ = prepare(config)
    again, is_new = prepare(config)
    assert (again.revision, is_new) == (manifest.revision, False)


def test_what_reads_all_rows_refuses_a_text_that_changes(rows, monkeypatch, tmp_path):
    """Pairs, questions and the texts of `evaluate` are read in this way."""
    path = rows(["one", "two"])
    documents = source_module.load_documents(DataSection(str(path)), tmp_path)
    read = source_module.read_tables
    changed = lambda *arguments: appended(path) or read(*arguments)  # noqa: E731
    monkeypatch.setattr(source_module, "read_tables", changed)
    assert "has changed while it was read" in refusal(documents.read)


def test_an_error_of_the_disk_is_no_change(text, monkeypatch):
    path = text()
    before = FilesBefore(str(path), [path])

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    def read():
        with before.unchanged():
            monkeypatch.setattr(Path, "stat", fail)

    assert refusal(read) == f"{path}: cannot be read: Input/output error"


@pytest.mark.parametrize("kind", ["text", "token files", "empty token files"])
def test_a_file_that_is_removed_after_it_was_found_is_named(changing, monkeypatch, kind):
    config, path = changing(kind.removeprefix("empty "), lambda path: None)
    # The files of text are found by load_documents; of token files the empty ones are left out.
    places = {"text": (source_module, "find_files"), "token files": (module, "local_files")}
    place = places.get(kind, (local_files_module, "find_files"))
    find = getattr(*place)

    def removing(*arguments):
        found = find(*arguments)
        path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(*place, removing)
    assert refusal(prepare, config) == f"{path}: cannot be read: No such file or directory"


@pytest.mark.parametrize("kind", ["file", "folder", "token files"])
def test_text_that_changed_after_it_was_read_is_refused_by_the_next_call(
    text, make, monkeypatch, tmp_path, byte_tokenizer, kind
):
    (tmp_path / "text").mkdir()
    path = text(name="text/a.txt")
    text(name="text/b.txt")
    config = make(tmp_path / "text")
    if kind == "file":
        config = make(path)
    elif kind == "token files":
        path = tmp_path / "text" / "a.ds"
        np.arange(100, dtype="<u2").tofile(path)
        np.array([60, 100], dtype="<u8").tofile(f"{path}.index")
        config = make(path, byte_tokenizer, format="datatrove")
    write = module.write_facts

    def changing(*arguments):
        if kind == "folder":
            text(name="text/c.txt")
        else:
            path.write_bytes(bytes(reversed(path.read_bytes())))
            # The times of some file systems are whole seconds.
            touched(path)
        return write(*arguments)

    monkeypatch.setattr(module, "write_facts", changing)
    prepare(config)
    assert "has changed since it was prepared" in refusal(prepare, config)


def test_touched_text_is_accepted_and_read_once(text, make, monkeypatch):
    path = text()
    config = make(path)
    manifest, _ = prepare(config)
    os.utime(path, ns=(1, 1))
    assert prepare(config) == (manifest, False)
    monkeypatch.setattr(prepared_module, "file_digest", None)  # it is not read again
    assert prepare(config)[0].file_state != manifest.file_state


def test_text_may_be_removed_and_prepared_data_moved(text, make, tmp_path):
    path = text()
    config = make(path)
    prepare(config)
    texts = texts_of(config)
    path.unlink()
    assert prepare(config)[1] is False
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    config = replace_knobs(config, {"data.dir": str(tmp_path / "elsewhere")})
    assert texts_of(config) == texts


def test_sha256_of_url_is_checked_on_later_calls(monkeypatch, text, make):
    path = text()
    monkeypatch.setattr(
        source_module, "download", lambda url, folder, sha256: Path(shutil.copy(path, folder))
    )
    config = make("https://example.org/input.txt")
    manifest, _ = prepare(config)
    digest = manifest.revision.removeprefix("sha256:").upper()
    assert prepare(replace_knobs(config, {"data.sha256": digest})) == (manifest, False)
    changed = replace_knobs(config, {"data.sha256": "0" * 64})
    assert all("0" * 64 in message for message in refusals(changed))


# --- errors leave nothing behind
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("late.jsonl", '{"text": "x"}\n' * 3000 + '{"text": 1}\n'),
        ("tiny.txt", "x"),  # one character cannot make two splits
        ("empty.txt", ""),
    ],
)
def test_unreadable_text_leaves_nothing(make, text, byte_tokenizer, tmp_path, name, content):
    path = text(content, name)
    assert str(path) in refusal(prepare, make(path, byte_tokenizer))
    assert is_empty_but_for_lock(tmp_path / "data")


def test_missing_text_or_tokenizer_leaves_nothing(text, make, tmp_path):
    config = make(tmp_path / "none.txt", dir=str(tmp_path / "deep" / "down" / "prepared"))
    assert config.data.source in refusal(prepare, config)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path / "none") in refusal(prepare, make(text(), tmp_path / "none"))
    assert is_empty_but_for_lock(tmp_path / "data")


def test_folder_with_other_content_is_refused(text, make, tmp_path):
    (tmp_path / "folder").mkdir()
    text("years of work", "folder/thesis.txt")
    before = snapshot(tmp_path / "folder")
    message = refusal(prepare, make(text(), dir=str(tmp_path / "folder")))
    assert message.startswith(f"{tmp_path / 'folder'}: ")
    assert "--data.dir" in message
    assert snapshot(tmp_path / "folder") == before


def test_full_disk_is_one_line(monkeypatch, text, make, tmp_path):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "_write_pending", write)
    assert "No space left" in refusal(prepare, make(text()))
    assert is_empty_but_for_lock(tmp_path / "data")


def test_folder_may_be_a_link(text, make, tmp_path):
    folder = tmp_path / "disk" / "data"
    link = tmp_path / "link"
    folder.parent.mkdir()
    link.symlink_to(folder)
    config = make(text(), dir=str(link))
    # A volume that is not mounted looks the same, and nothing may be written below it.
    assert f"is a link to {folder}, which does not exist" in refusal(prepare, config)
    assert list(folder.parent.iterdir()) == []
    folder.mkdir()
    assert (prepare(config)[1], prepare(config)[1]) == (True, False)
    assert link.is_symlink()
    assert (folder / "manifest.json").is_file()
    assert load_prepared(config)


def test_prepared_data_inside_its_source_is_refused(text, make, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    text(name="text/a.txt")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path / "text")
    for source, folder in ((tmp_path / "text", tmp_path / "text" / "data"), ("..", "data")):
        assert f"data.source {source}" in refusal(prepare, make(source, dir=str(folder)))
    assert snapshot(tmp_path) == before
    assert prepare(make(tmp_path / "text"))[1], "beside it is fine"


# --- interruptions
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["build_tokenizer", "_write_splits", "write_facts"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_prepare_leaves_no_manifest(monkeypatch, text, make, moment, interruption):
    config = make(text())
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise interruption

        patch.setattr(module, moment, interrupted)
        with pytest.raises(interruption):
            prepare(config)
    assert is_empty_but_for_lock(Path(config.data.dir))
    assert prepare(config)[1]
    assert load_prepared(config)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="forking this process is safe on Linux only")
def test_concurrent_prepare_runs_once(rows, make):
    config = make(rows([f"document {i}" for i in range(500)]))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    results = context.Queue()

    def prepare_together():
        barrier.wait(60)
        manifest, is_new = prepare(config)
        results.put((is_new, manifest, texts_of(config)))

    for _ in range(3):
        context.Process(target=prepare_together, daemon=True).start()
    new, manifests, texts = zip(*(results.get(timeout=60) for _ in range(3)), strict=True)
    assert sorted(new) == [False, False, True]
    assert manifests[0] == manifests[1] == manifests[2]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("lengths", "fraction", "share"),
    [
        # the first is held out, by the seed
        ([20, 900], 0.1, None),
        ([900, 20], 0.1, "97.8%"),
        ([300, 300, 300], 0.01, "33.3%"),
        ([300, 300, 300], 0.2, None),
        ([300] * 4, 0.1, None),
        ([900], 0.5, None),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_documents_that_are_far_more_than_the_stated_share_are_named(
    text, make, tmp_path, lengths, fraction, share, mixed
):
    (tmp_path / "text").mkdir()
    for number, length in enumerate(lengths):
        text("x" * length, f"text/{number}.txt")
    config = make(tmp_path / "text", validation_fraction=fraction)
    if mixed:
        entry = {"source": str(tmp_path / "text"), "name": "own", "weight": 1}
        config = replace_knobs(config, {"data.source": [entry]})
    manifest, _ = prepare(config)
    lines = split_warnings(config, manifest)
    if share is None:
        assert lines == []
    else:
        (line,) = lines
        folder = f"{config.data.dir}/own" if mixed else config.data.dir
        assert f"{share} of the tokens in {folder} are held out, not {fraction:.2%}" in line


# --- opening
# ------------------------------------------------------------------------------


def test_text_shorter_than_a_block_is_one_line(text, make):
    config = make(text("x" * 100), block_size=89)  # 90 training tokens: a block and the next token
    prepare(config)
    assert load_prepared(config)
    message = refusal(load_prepared, replace_knobs(config, {"data.block_size": 90}))
    assert message.startswith("data.block_size: the 90 train tokens in ")
    shutil.rmtree(config.data.dir)
    for knobs in ({"validation_fraction": 0.01}, {"block_size": 90}):
        assert "data.validation_fraction" in refusal(prepare, make(text("x" * 100), **knobs))
        assert is_empty_but_for_lock(Path(config.data.dir)), "nothing is prepared"


def test_missing_or_other_tokenizer_is_one_line(text, make, tmp_path):
    config = make(text())
    folder = tmp_path / "data" / "tokenizer"
    prepare(config)

    def check():
        message = refusal(load_prepared, config)
        assert message.startswith(f"{folder}: ")
        remedy = f"copy it again, or remove {folder.parent} to prepare it again"
        assert message.endswith(f"; {remedy}")

    for damaged in ("", "{}", (folder / "tokenizer.json").read_text()[:-9]):
        (folder / "tokenizer.json").write_text(damaged)
        check()
    shutil.rmtree(folder)
    check()
    build_tokenizer("char", ["abd"]).hf.save_pretrained(folder)
    check()
