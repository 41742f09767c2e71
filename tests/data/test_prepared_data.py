"""Prepared data: its identity by content, checks of files and bytes, every field of the manifest, signals."""

import contextlib
import dataclasses
import itertools
import json
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
from nanogpt_hf.data import encode
from nanogpt_hf.data import prepare as module
from nanogpt_hf.data.examples import examples_sha256
from nanogpt_hf.data.interruption import Interrupted, raise_on_signals
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import check_prepared, load_prepared
from nanogpt_hf.errors import DataError, Stopped

SPLITS = ("train", "validation")


@pytest.fixture(params=["text", "chat"])
def prepared(request, write_recipe, chat_file, byte_tokenizer):
    """A config with prepared data: of text, and of conversations."""
    chat = {"data__source": str(chat_file), "data__format": "chat", "data__tokenizer": str(byte_tokenizer)}
    sizes = {"data__block_size": 128, "model__n_positions": 128, "train__tokens_per_step": 512}
    config = load_config(write_recipe(**chat | sizes if request.param == "chat" else {}))
    prepare(config)
    return config


def folder_of(config) -> Path:
    return Path(config.data.dir)


def edit_manifest(config, change) -> None:
    path = folder_of(config) / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def without_checksums(raw) -> None:
    """The manifest as written by older versions."""
    for split in SPLITS:
        del raw[split]["sha256"], raw[split]["shards"]


def shard(config, split="train", number=0) -> Path:
    return sorted((folder_of(config) / split).glob("*.arrow"))[number]


# --- identity --------------------------------------------------------------------------------------------------------


def content(config, **knobs) -> dict:
    """Prepare data with these knobs in a new folder; return what the manifest records of the tokens."""
    data = dataclasses.replace(config.data, **{"dir": f"{config.data.dir}_again", **knobs})
    shutil.rmtree(data.dir, ignore_errors=True)
    return prepare(dataclasses.replace(config, data=data))[0].content()


def test_same_text_has_same_identity(prepared, tmp_path, monkeypatch):
    first = read_manifest(folder_of(prepared)).content()
    assert None not in first.values()
    assert content(prepared) == first
    moved = shutil.copy(prepared.data.source, tmp_path / f"moved{Path(prepared.data.source).suffix}")
    os.utime(moved, ns=(1, 1))
    assert content(prepared, source=str(moved)) == first
    monkeypatch.setattr(encode, "SHARD_BYTES", 1000)
    assert content(prepared, num_proc=2) == first
    if prepared.data.format == "chat":
        assert len(list(Path(f"{prepared.data.dir}_again/train").glob("*.arrow"))) > 1


def test_one_changed_character_changes_identity(prepared, tmp_path):
    first = read_manifest(folder_of(prepared)).content()
    text = Path(prepared.data.source).read_text()
    old, new = ("RED", "GED") if prepared.data.format == "chat" else ("cat", "tac")
    at = text.index(old)
    other = tmp_path / f"other{Path(prepared.data.source).suffix}"
    other.write_text(text[:at] + new + text[at + 3 :])
    second = content(prepared, source=str(other))
    differing = {name for name in first if first[name] != second[name]}
    assert differing in ({"revision", "train sha256"}, {"revision", "validation sha256"})
    assert second["train tokens"] == first["train tokens"]


def test_identity_covers_masks_and_ends_of_conversations(tmp_path):
    digests = set()
    for ids, answered in (
        ([[1, 2, 3], [4, 5]], [[0, 1, 1], [0, 1]]),
        ([[1, 2, 3], [4, 6]], [[0, 1, 1], [0, 1]]),
        ([[1, 2, 3], [4, 5]], [[0, 0, 1], [0, 1]]),
        ([[1, 2], [3, 4, 5]], [[0, 1], [1, 0, 1]]),
    ):
        rows = {"input_ids": ids, "assistant_mask": answered}
        features = datasets.Features({name: datasets.List(datasets.Value("uint16")) for name in rows})
        datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "split")
        digests.add(examples_sha256(tmp_path / "split"))
    assert len(digests) == 4


# --- files and bytes -------------------------------------------------------------------------------------------------


def test_data_is_verified_and_older_data_opens_without_checksums(prepared):
    assert check_prepared(prepared.data) is True
    tokens = len(load_prepared(prepared).train.batch(np.array([0]))["input_ids"])
    edit_manifest(prepared, without_checksums)
    assert check_prepared(prepared.data) is False
    assert prepare(prepared)[1] is False
    assert len(load_prepared(prepared).train.batch(np.array([0]))["input_ids"]) == tokens


def test_file_of_wrong_size_is_named_at_opening(prepared):
    shards = {shard(prepared, split): shard(prepared, split).read_bytes() for split in SPLITS}
    for path, other in itertools.permutations(shards):
        whole, extra = shards[path], path.with_name("data-00001-of-00002.arrow")
        for damaged, content in ((path, whole[:-8]), (path, whole + bytes(8)), (path, shards[other]), (extra, whole)):
            damaged.write_bytes(content)
            assert refusal(load_prepared, prepared).startswith(f"{damaged}: ")
            assert refusal(check_prepared, prepared.data).startswith(f"{damaged}: ")
            damaged.unlink()
            path.write_bytes(whole)
        path.unlink()
        assert refusal(load_prepared, prepared).startswith(f"{path}: ")
        path.write_bytes(whole)


def test_token_count_is_checked_without_checksums(prepared):
    edit_manifest(prepared, without_checksums)
    shutil.rmtree(folder_of(prepared) / "train")
    shutil.copytree(folder_of(prepared) / "validation", folder_of(prepared) / "train")
    assert "/train: " in refusal(load_prepared, prepared)


@pytest.mark.parametrize("split", SPLITS)
def test_verify_finds_one_flipped_bit(prepared, split, caplog, capsys):
    path = shard(prepared, split)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    load_prepared(prepared)  # a run does not read all data before its first step
    assert refusal(check_prepared, prepared.data).startswith(f"{path}: is damaged")
    recipe = str(folder_of(prepared).parent / "tiny.yaml")
    assert main(["prepare", recipe]) == 2
    assert f"{path}: is damaged" in capsys.readouterr().err


def test_prepare_verify_checks_existing_data(prepared, capsys):
    recipe = str(folder_of(prepared).parent / "tiny.yaml")
    assert main(["prepare", recipe]) == 0
    assert "verified: every byte" in capsys.readouterr().out
    edit_manifest(prepared, without_checksums)
    assert main(["prepare", recipe]) == 0
    assert "no checksums" in capsys.readouterr().out


def test_token_beyond_the_vocabulary_is_one_line(prepared):
    split = folder_of(prepared) / "train"
    vocab_size = read_manifest(folder_of(prepared)).vocab_size
    rows = datasets.load_from_disk(str(split)).to_dict()
    rows["input_ids"][-1][0] = vocab_size
    features = datasets.load_from_disk(str(split)).features
    shutil.rmtree(split)
    datasets.Dataset.from_dict(rows, features).save_to_disk(split)
    edit_manifest(prepared, without_checksums)  # with checksums, `prepare` and `doctor` name the file

    def read_all() -> None:
        train = load_prepared(prepared).train
        train.batch(np.arange(len(train)))

    for message in (refusal(read_all), refusal(check_prepared, prepared.data)):
        assert f"token {vocab_size}, " in message


# --- the manifest ----------------------------------------------------------------------------------------------------

OPTIONAL = {"file_state", "start_of_text_id", "end_of_text_id", "assistant_tokens", "sha256", "shards"}
COUNTS = {"vocab_size", "documents", "tokens", "bytes", "assistant_tokens"}


def fields_of(tree, above=()):
    """The path of every field and section of a manifest."""
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*above, name))


def test_manifest_field_of_wrong_type_is_one_line(prepared):
    path = folder_of(prepared) / "manifest.json"
    whole = json.loads(path.read_text())
    refused = 0
    for field in fields_of(whole):
        if field[0] == "versions" and len(field) > 1:
            continue  # only written to the model card
        for value in ("x", None, -1, 0, 1.5, True, [], {}):
            raw = json.loads(json.dumps(whole))
            section = raw
            for name in field[:-1]:
                section = section[name]
            before, section[field[-1]] = section[field[-1]], value
            path.write_text(json.dumps(raw))
            allowed = type(value) is type(before) or (value is None and (field[-1] in OPTIONAL or field[0] == "recipe"))
            allowed |= field[-1] in OPTIONAL and before is None and isinstance(value, str | int)
            allowed |= field[0] == "recipe" and isinstance(value, str | int | float)
            if not allowed or (field[-1] in COUNTS and isinstance(value, int | float) and value < 1):
                for use in (prepare, load_prepared):
                    assert str(folder_of(prepared)) in refusal(use, prepared), (field, value)
                refused += 1
            else:
                with contextlib.suppress(DataError):
                    load_prepared(prepared)
    assert refused > 100


@pytest.mark.parametrize("vocab_size", [1, 1_000_000])
def test_wrong_vocab_size_in_manifest_is_one_line(prepared, vocab_size):
    edit_manifest(prepared, lambda raw: raw.update(vocab_size=vocab_size))
    assert "/tokenizer: " in refusal(load_prepared, prepared)


def test_manifest_must_be_a_regular_file(prepared):
    path = folder_of(prepared) / "manifest.json"
    path.unlink()
    os.mkfifo(path)  # opening it would block
    assert "manifest.json" in refusal(prepare, prepared)


# --- folders and signals ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_unwritable_folder_is_refused_first(write_recipe):
    started = time.monotonic()
    assert "cannot be written" in refusal(prepare, load_config(write_recipe(data__dir="/proc/x")))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signal_during_prepare_leaves_nothing(write_recipe, monkeypatch, tmp_path, name):
    config = load_config(write_recipe())
    before = sorted(path.name for path in tmp_path.iterdir())

    def interrupted(*_):
        assert (tmp_path / ".data.partial" / "train").is_dir(), "much is written already"
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(10)

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.setattr(module, "write_facts", interrupted)
    with pytest.raises(Stopped, match=f"data: stopped by {name} "):
        prepare(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, ".data.lock"])
    assert signal.signal(getattr(signal, name), signal.SIG_DFL) == signal.SIG_DFL


def test_signal_handler_is_active_only_inside_the_context():
    def work() -> None:
        with raise_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(Interrupted):
        work()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_end_at_an_early_signal():
    # A pool ends its processes with SIGTERM and waits for them: a survivor would block it forever.
    with raise_on_signals():
        for _ in range(10):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM
