"""Prepared data: its identity by content, checks of bytes, signals."""

import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data import formats, shards
from nanogpt_hf.data import manifest as manifest_module
from nanogpt_hf.data import prepare as module
from nanogpt_hf.data.blocks import TokenStream
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import check_prepared, load_prepared
from nanogpt_hf.data.shards import Row, ShardWriter
from nanogpt_hf.errors import DataError, Stopped
from nanogpt_hf.methods.text import load_text
from nanogpt_hf.reports.reference import find_reference


@pytest.fixture(params=["text", "chat"])
def prepared(request, write_recipe, chat_file, byte_tokenizer):
    """A config with prepared data: of text, and of conversations."""
    chat = {
        "data__source": str(chat_file),
        "data__format": "chat",
        "data__tokenizer": str(byte_tokenizer),
    }
    sizes = {"data__block_size": 128, "model__n_positions": 128, "train__tokens_per_step": 512}
    config = load_config(write_recipe(**chat | sizes if request.param == "chat" else {}))
    prepare(config)
    return config


def folder_of(config) -> Path:
    return Path(config.data.dir)


def shard(config, split="train", number=0) -> Path:
    return sorted((folder_of(config) / split).glob("*.arrow"))[number]


def test_a_run_and_its_report_read_the_manifest_once_each(prepared, monkeypatch):
    read = []
    read_json = manifest_module.read_json
    monkeypatch.setattr(
        manifest_module, "read_json", lambda *args: read.append(args) or read_json(*args)
    )
    load_text(prepared)
    find_reference(prepared)  # compares with every reference that ships
    assert len(read) == 2


# --- identity
# ------------------------------------------------------------------------------


def content(config, **knobs) -> dict:
    """Prepare data with these knobs in a new folder; return what the manifest records of the
    tokens.
    """
    data = dataclasses.replace(config.data, **{"dir": f"{config.data.dir}_again", **knobs})
    shutil.rmtree(data.dir, ignore_errors=True)
    return prepare(dataclasses.replace(config, data=data))[0].content()


def test_same_text_has_same_identity(prepared, tmp_path, monkeypatch):
    first = read_manifest(folder_of(prepared)).content()
    assert None not in first.values()
    assert content(prepared) == first
    moved = shutil.copy(
        prepared.data.source, tmp_path / f"moved{Path(prepared.data.source).suffix}"
    )
    os.utime(moved, ns=(1, 1))
    assert content(prepared, source=str(moved)) == first
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    monkeypatch.setattr(shards, "_RECORD_TOKENS", 100)
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 7)
    assert content(prepared, num_threads=2) == first
    if prepared.data.format == "chat":
        assert len(list(Path(f"{prepared.data.dir}_again/train").glob("*.arrow"))) > 1


def test_identity_covers_ids_masks_and_ends_of_conversations(tmp_path):
    ids = np.array([1, 2, 3, 4, 5], np.uint16)
    mask = np.array([0, 1, 1, 0, 1], np.uint8)

    def digest(name, ids, mask, end):
        writer = ShardWriter(tmp_path / name)
        halves = (slice(end), slice(end, None))
        writer.write([Row(number, ids[half], 1, mask[half]) for number, half in enumerate(halves)])
        return writer.close().sha256

    first = digest("first", ids, mask, 3)
    assert digest("same", ids, mask, 3) == first
    others = {"ids": (ids + 1, mask, 3), "mask": (ids, 1 - mask, 3), "end": (ids, mask, 2)}
    assert first not in [digest(name, *other) for name, other in others.items()]


def test_document_that_no_record_batch_can_hold_is_one_line(tmp_path, monkeypatch):
    """pyarrow would not return from a list of 2³¹ values."""
    monkeypatch.setattr(shards, "_RECORD_TOKENS", 10)
    monkeypatch.setattr(shards, "_LONGEST_DOCUMENT", 20)
    writer = ShardWriter(tmp_path / "shards")
    for length in (9, 20):
        writer.write([Row(0, np.zeros(length, np.uint16), length)])
    with pytest.raises(
        DataError, match="document 4 has 21 tokens, and a document may have 20; div"
    ):
        writer.write([Row(3, np.zeros(21, np.uint16), 21)])


# --- files and bytes
# ------------------------------------------------------------------------------


def test_verify_finds_one_flipped_bit(prepared, capsys):
    recipe = str(folder_of(prepared).parent / "tiny.yaml")
    assert main(["prepare", recipe]) == 0
    assert "verified: every byte" in capsys.readouterr().out
    path = shard(prepared)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    load_prepared(prepared)  # a run does not read all data before its first step
    assert refusal(check_prepared, prepared.data).startswith(f"{path}: is damaged")
    assert main(["prepare", recipe]) == 2
    assert f"{path}: is damaged" in capsys.readouterr().err


def test_token_beyond_the_vocabulary_is_one_line(prepared):
    rows = datasets.load_from_disk(str(folder_of(prepared) / "train"))["input_ids"][:]
    tokens = [token for row in rows for token in row]
    stream = TokenStream.open(folder_of(prepared) / "train", min(tokens))
    message = refusal(stream.windows, np.array([0]), len(stream))
    assert f"token {max(tokens)}, " in message


# --- folders and signals
# ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_unwritable_folder_is_refused_first(write_recipe):
    started = time.monotonic()
    message = refusal(prepare, load_config(write_recipe(data__dir="/proc/x")))
    # the folder itself, and not the lock beside it
    assert message.startswith("/proc/x: cannot be written: ")
    assert ".lock" not in message
    assert "--data.dir" in message
    assert time.monotonic() - started < 20


def test_signal_during_prepare_leaves_nothing(write_recipe, monkeypatch, tmp_path):
    config = load_config(write_recipe())
    before = sorted(path.name for path in tmp_path.iterdir())

    def interrupted(*_):
        assert (tmp_path / ".data.partial" / "train").is_dir(), "much is written already"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.setattr(module, "write_facts", interrupted)
    with pytest.raises(Stopped, match="data: stopped by SIGTERM "):
        prepare(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, ".data.lock"])
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) == signal.SIG_DFL
