"""Preparing on several machines: the merged folder equals that of one machine, and parts that disagree are refused."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import filelock
import pytest

from assertions import file_contents, refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data import parts as module
from nanogpt_hf.data.join import merge_parts
from nanogpt_hf.data.parts import prepare_part
from nanogpt_hf.data.place import lock_of
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.source import Part


def write_rows(path: Path, count: int, seed: int, chat: bool = False) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(draw.choices(["red", "green", "blue"], k=draw.randint(1, 9)))
            file.write(json.dumps({"prompt": text, "completion": text.upper()} if chat else {"text": text}) + "\n")


@pytest.fixture
def data(write_recipe, byte_tokenizer, tmp_path):
    """A function files -> the data section of a recipe on so many files of 40 rows."""

    def data(files: int = 5, **overrides):
        folder = tmp_path / "text"
        if not folder.exists():
            folder.mkdir()
            for number in range(files):
                write_rows(folder / f"{number}.jsonl", 40, number, overrides.get("data__format") == "chat")
        options = {"data__source": str(folder), "data__tokenizer": str(byte_tokenizer)}
        return load_config(write_recipe(**options | overrides)).data

    return data


def prepare_parts(data, number: int) -> None:
    for index in range(number):
        prepare_part(data, Part(index, number))


@pytest.mark.parametrize(
    ("files", "number", "format"), [(5, 2, "text"), (1, 3, "text"), (3, 3, "chat"), (2, 5, "text"), (4, 1, "text")]
)
def test_merged_parts_equal_one_machine_byte_for_byte(data, write_recipe, tmp_path, files, number, format):
    section = data(files, data__format=format)
    prepare(load_config(tmp_path / "tiny.yaml"))
    alone = file_contents(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    prepare_parts(section, number)
    assert not (tmp_path / "data").exists()
    manifest, merged = merge_parts(section)
    assert merged
    assert manifest.train.documents + manifest.validation.documents == 40 * files
    assert file_contents(tmp_path / "data").keys() == alone.keys()
    assert file_contents(tmp_path / "data") == alone
    assert not (tmp_path / "data.parts").exists()
    assert merge_parts(section) == (manifest, False)


def test_empty_rows_of_a_hub_data_set_are_left_out_as_on_one_machine(data, monkeypatch, tmp_path):
    import datasets

    rows = {"text": ["one", "", "two", None, "three", "four", "", "five", "six", "seven"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows))
    section = data(data__source="some/set")
    prepare(load_config(tmp_path / "tiny.yaml"))
    alone = file_contents(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    prepare_parts(section, 3)
    merge_parts(section)
    assert file_contents(tmp_path / "data") == alone


def test_each_part_reads_its_own_files_only(data, monkeypatch):
    section, read = data(5), []
    real = module.load_documents.__globals__["read_file"]
    monkeypatch.setitem(module.load_documents.__globals__, "read_file", lambda p, c: read.append(p.name) or real(p, c))
    prepare_part(section, Part(1, 2))
    assert read == ["2.jsonl", "3.jsonl", "4.jsonl"]


def test_a_missing_part_is_named(data, tmp_path):
    section = data()
    assert "holds no parts; run `prepare --shard 0/N`" in refusal(merge_parts, section)
    prepare_part(section, Part(1, 3))
    assert "2 of 3 parts are missing: 0, 2; prepare them with --shard 0/3" in refusal(merge_parts, section)
    assert not (tmp_path / "data").exists()


def test_parts_of_different_numbers_are_refused(data, tmp_path):
    section = data()
    prepare_part(section, Part(0, 2))
    assert "holds parts of 2, not of 3; give --shard I/2, or remove it" in refusal(prepare_part, section, Part(1, 3))
    shutil.copytree(tmp_path / "data.parts" / "0-of-2", tmp_path / "data.parts" / "0-of-3")  # copied from elsewhere
    assert "holds parts of 2 and of 3; remove those" in refusal(merge_parts, section)


def test_a_part_of_another_recipe_or_text_is_refused(data, tmp_path):
    section = data()
    prepare_parts(section, 2)
    other = data(data__text_column="body")
    message = "0-of-2: prepared with data.text_column 'text', the recipe says 'body'"
    assert message in refusal(merge_parts, other)
    assert message in refusal(prepare_part, other, Part(0, 2))
    path = tmp_path / "text" / "4.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blue", b"gold", 1))
    assert "1-of-2: its text has changed since it was prepared" in refusal(merge_parts, section)
    path.write_bytes(whole + b'{"text": "more"}\n')
    assert "0-of-2: prepared from other files" in refusal(merge_parts, section)


@pytest.mark.parametrize("field", ["versions", "tokenizer_hash"])
def test_a_part_made_with_other_tools_is_refused(data, tmp_path, field):
    section = data()
    prepare_parts(section, 2)
    path = tmp_path / "data.parts" / "1-of-2" / "part.json"
    raw = json.loads(path.read_text())
    raw[field] = {"tokenizers": "0.1"} if field == "versions" else "0"
    path.write_text(json.dumps(raw))
    assert "1-of-2: made with other" in refusal(merge_parts, section)


def test_a_damaged_part_is_named(data, tmp_path):
    section = data()
    prepare_parts(section, 2)
    (path,) = (tmp_path / "data.parts" / "1-of-2").glob("train/*.arrow")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    assert f"{path}: is damaged" in refusal(merge_parts, section)
    path.parent.with_name("part.json").write_text("{}")
    assert "part.json: not a prepared part" in refusal(merge_parts, section)
    assert not (tmp_path / "data").exists()


def test_two_writers_of_one_part(data, tmp_path):
    section, folder = data(), tmp_path / "data.parts" / "0-of-2"
    folder.parent.mkdir()
    with filelock.FileLock(lock_of(folder)):
        assert "0-of-2: another process is preparing this part" in refusal(prepare_part, section, Part(0, 2))
    assert prepare_part(section, Part(0, 2))[1]
    assert not prepare_part(section, Part(0, 2))[1], "the second finds it"


def test_a_killed_part_leaves_nothing_that_counts(data, monkeypatch):
    section = data()
    child = os.fork()
    if not child:
        monkeypatch.setattr(module, "vocabulary_hash", lambda hf: os.kill(os.getpid(), signal.SIGKILL))
        prepare_part(section, Part(0, 2))  # killed when the tokens are written and part.json is not
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    prepare_part(section, Part(1, 2))
    assert "1 of 2 parts are missing: 0" in refusal(merge_parts, section)
    assert prepare_part(section, Part(0, 2))[1]
    assert merge_parts(section)[1]


def test_one_document_cannot_be_divided(data, tmp_path):
    (tmp_path / "one.txt").write_text("one document")
    section = data(data__source=str(tmp_path / "one.txt"))
    assert "1 document cannot be divided into 2 parts" in refusal(prepare_part, section, Part(0, 2))


def test_a_tokenizer_of_the_whole_text_is_refused(data):
    assert "data.tokenizer: char is made from the whole text" in refusal(
        prepare_part, data(data__tokenizer="char"), Part(0, 2)
    )


def test_commands(data, tmp_path, capsys):
    data()
    recipe = str(tmp_path / "tiny.yaml")
    for shard, message in {
        "2/2": "--shard: expected 0/2 to 1/2, got '2/2'",
        "1": "--shard: expected I/N, such as 0/8 to 7/8, got '1'",
    }.items():
        assert main(["prepare", recipe, "--shard", shard]) == 2
        assert message in capsys.readouterr().err
    assert main(["prepare", recipe, "--shard", "0/2"]) == 0
    assert main(["prepare", recipe]) == 2
    assert "run `prepare --merge` when all are prepared" in capsys.readouterr().err
    assert main(["prepare", recipe, "--shard", "1/2"]) == 0
    assert main(["prepare", recipe, "--merge"]) == 0
    assert main(["prepare", recipe, "--shard", "1/2"]) == 0
    assert main(["prepare", recipe]) == 0
    assert main(["prepare", recipe, "--merge"]) == 0
