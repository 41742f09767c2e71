"""Streaming a Hub data set, over real HTTP: the prepared folder of the ordinary way, in bounded space."""

import io
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from assertions import file_contents, refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data import join
from nanogpt_hf.data import parts as module
from nanogpt_hf.data.join import merge_parts
from nanogpt_hf.data.parts import prepare_part
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.progress import TokenProgress
from nanogpt_hf.data.source import Part
from nanogpt_hf.errors import ConfigError, Stopped

FILES, ROWS = 3, 40


def texts(seed: int, rows: int) -> list[str | None]:
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(["red", "green", "blue"], k=draw.randint(1, 9))) for _ in range(rows)]
    return [None if number % 11 == 5 else "" if number % 13 == 7 else line for number, line in enumerate(lines)]


def parquet(rows: list, column: str = "text") -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(rows)), column: rows}), file, row_group_size=16)
    return file.getvalue()


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def chats(seed: int, rows: int) -> bytes:
    return jsonl([{"prompt": text or "hello", "completion": f"no, {text}"} for text in texts(seed, rows)])


@pytest.fixture
def hub_set(hub, monkeypatch, tmp_path):
    """The Hub with the data set user/set of three parquet files; it never waits before it tries again."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    monkeypatch.setattr(datasets.config, "USE_PARQUET_EXPORT", False)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    files = hub.add("user/set").branches["main"][0]["files"]
    for number in range(FILES):
        files[f"data/train-{number:05}.parquet"] = parquet(texts(number, ROWS))
    hub.data_files = files
    return hub


@pytest.fixture
def config(hub_set, write_recipe, byte_tokenizer):
    """A function of knobs -> a recipe on that data set."""

    def config(**overrides):
        options = {"data__source": "user/set", "data__tokenizer": str(byte_tokenizer)}
        return load_config(write_recipe(**options | overrides))

    return config


def remove(folder: Path) -> dict[str, bytes]:
    before = file_contents(folder)
    shutil.rmtree(folder)
    return before


@pytest.mark.parametrize("case", ["chat", "one file and a validation split", "max_tokens of joined splits"])
def test_streamed_folder_equals_the_ordinary_one_byte_for_byte(hub_set, config, tmp_path, monkeypatch, case):
    knobs, files = {}, hub_set.data_files
    if case == "chat":
        files.clear()
        files |= {f"data/train-{number}.jsonl": chats(number, ROWS) for number in range(FILES)}
        knobs = {"data__format": "chat"}
    else:
        files["data/test-00000.parquet"] = parquet(texts(9, 25))
        knobs = {"data__max_tokens": 1000, "data__split": "test+train"}
    if case.startswith("one file"):
        del files["data/train-00001.parquet"], files["data/train-00002.parquet"]
        knobs = {"data__validation_split": "test"}
    monkeypatch.setattr(module, "_CHUNK_BYTES", 10**6 if case.startswith("one file") else 1000)
    monkeypatch.setattr("nanogpt_hf.data.encode.SHARD_BYTES", 800)
    prepare(config(**knobs))
    assert len(list((tmp_path / "data" / "train").glob("*.arrow"))) > 1
    alone = remove(tmp_path / "data")
    manifest, now = prepare(config(**knobs, data__streaming=True))
    assert now
    streamed = file_contents(tmp_path / "data")
    assert streamed["manifest.json"].decode() == alone["manifest.json"].decode()
    assert streamed == alone
    assert not (tmp_path / "data.parts").exists()
    assert prepare(config(**knobs))[0] == manifest, "the folder serves both ways"
    assert manifest.revision == "0" * 40


def test_max_tokens_takes_the_first_whole_documents(config, tmp_path):
    manifest, _ = prepare(config())
    remove(tmp_path / "data")
    lengths = [len(text) + 1 for number in range(FILES) for text in texts(number, ROWS) if text]
    assert manifest.train.tokens + manifest.validation.tokens == sum(lengths)
    for limit, streaming in ((sum(lengths[:50]), False), (sum(lengths[:50]), True), (sum(lengths[:51]) - 1, True)):
        manifest, _ = prepare(config(data__max_tokens=limit, data__streaming=streaming))
        assert manifest.train.tokens + manifest.validation.tokens == sum(lengths[:50])
        assert manifest.train.documents + manifest.validation.documents == 50
        assert f"data.max_tokens {limit}, " in refusal(prepare, config())
        remove(tmp_path / "data")


def test_files_beyond_max_tokens_are_not_read(hub_set, config):
    prepare(config(data__max_tokens=500, data__streaming=True))
    read = {request.rpartition("/")[2] for request in hub_set.requests if "/resolve/" in request}
    assert "train-00000.parquet" in read
    assert "train-00001.parquet" not in read


def peak_size(folders: list[Path], prepare) -> int:
    """The most bytes of files that are in the folders at once, looked at whenever a part is complete or encoded."""
    sizes = []

    def look(*_):
        sizes.append(sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()))

    with pytest.MonkeyPatch.context() as patch:
        for place, names in ((module, ("encode_split", "describe_shards")), (join, ("save_counted", "write_facts"))):
            for name in names:
                real = getattr(place, name)
                patch.setattr(place, name, lambda *a, real=real, **k: [real(*a, **k), look()][0])
        prepare()
    assert len(sizes) > 10
    return max(sizes)


def test_streaming_takes_bounded_space(hub_set, config, tmp_path, monkeypatch):
    # Random bytes, which parquet does not compress: one byte per token, and two bytes on the disk per token.
    draw = random.Random(0)
    for number in range(FILES):
        rows = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=2000)) for _ in range(100)]
        hub_set.data_files[f"data/train-{number:05}.parquet"] = parquet(rows)
    folders = [tmp_path, tmp_path / "cache"]
    monkeypatch.setattr(module, "_CHUNK_BYTES", 50_000)
    streamed = peak_size(folders, lambda: prepare(config(data__streaming=True)))
    tokens = FILES * 100 * 2001 * 2
    # the parts and the folder that is joined from them, and a chunk of text
    assert 2 * tokens < streamed < 2.02 * tokens + 2 * 50_000
    assert not list((tmp_path / "cache").rglob("*.parquet"))
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_streamed_parts_of_two_machines_equal_one(config, tmp_path):
    prepare(config())
    alone = remove(tmp_path / "data")
    section = config(data__streaming=True).data
    for index in (1, 0):
        prepare_part(section, Part(index, 2))
    assert merge_parts(section)[1]
    assert remove(tmp_path / "data") == alone


def test_more_streamed_parts_than_files_are_refused(config, tmp_path):
    section = config(data__streaming=True).data
    assert "3 files" in refusal(prepare_part, section, Part(0, 4))
    prepare_part(section, Part(0, 2))
    assert "parts of 2" in refusal(prepare, config(data__streaming=True))


def test_a_broken_connection_is_one_line_and_the_same_command_continues(hub_set, config, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    prepare(config())
    alone = remove(tmp_path / "data")
    hub_set.cut.add("data/train-00001.parquet")
    message = refusal(prepare, config(data__streaming=True))
    assert "user/set: train split, part 1 of 3: " in message
    assert not (tmp_path / "data").exists()
    assert {path.name for path in (tmp_path / "data.parts").glob("[0-9]*")} == {"0-of-3"}
    hub_set.cut.clear()
    hub_set.requests.clear()
    prepare(config(data__streaming=True))
    assert file_contents(tmp_path / "data") == alone
    assert not any(request.startswith("GET") and "train-00000" in request for request in hub_set.requests[10:])


def test_a_restarted_stream_keeps_its_revision(hub_set, config, tmp_path, monkeypatch):
    prepare(config())
    alone = remove(tmp_path / "data")
    section = config(data__streaming=True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub_set.cut.add("data/train-00002.parquet")
    refusal(prepare, section)
    hub_set.cut.clear()
    repository = hub_set.repositories["user/set"]
    newer = {name: parquet(["other text"] * 50) for name in hub_set.data_files}
    repository.branches["old"] = repository.branches["main"]
    repository.branches["main"] = [{"oid": "1" * 40, "title": "newer", "files": newer}]
    prepare(section)
    assert file_contents(tmp_path / "data") == alone


def test_parts_of_another_source_are_refused(hub_set, config, tmp_path, monkeypatch):
    hub_set.add("user/other").branches["main"][0]["files"]["data/train.csv"] = b"text\none\ntwo\nthree\n"
    with monkeypatch.context() as patch:
        patch.setattr(join, "save_counted", raising(OSError("full")))
        assert "full" in refusal(prepare, config(data__streaming=True, data__max_tokens=500))
    other = config(data__source="user/other", data__streaming=True, data__max_tokens=500)
    assert "data.source 'user/set', the recipe says 'user/other'" in refusal(prepare, other)


def raising(error: Exception):
    """A function that raises `error`."""

    def fail(*_):
        raise error

    return fail


def test_an_empty_split_with_a_limit_is_one_line(hub_set, config):
    hub_set.data_files["data/test-00000.parquet"] = parquet([""] * 3)
    knobs = {"data__streaming": True, "data__max_tokens": 500, "data__validation_split": "test"}
    assert "too little text" in refusal(prepare, config(**knobs))


def test_a_mixture_may_stream_one_source(hub_set, write_recipe, byte_tokenizer, tmp_path, text_file):
    sources = [
        {"source": "user/set", "weight": 1, "streaming": True, "max_tokens": 1500},
        {"source": str(text_file), "weight": 1},
    ]
    manifest, _ = prepare(load_config(write_recipe(data__source=sources, data__tokenizer=str(byte_tokenizer))))
    first, second = manifest.sources
    assert 1400 < first.manifest.train.tokens + first.manifest.validation.tokens <= 1500
    assert second.manifest.train.tokens + second.manifest.validation.tokens == len(text_file.read_text())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text\none\n2\n", None),
        ("text\n1\n2\n", "row 1: column 'text' holds 1"),
        ("body\none\ntwo\n", "row 1: has no column 'text'"),
        ("text\nalone\n", "1 document"),
        ('text\n""\n""\n', "too little text"),
    ],
)
def test_rows_that_are_no_documents(hub_set, config, rows, message):
    hub_set.data_files.clear()
    hub_set.data_files["data/train.csv"] = rows.encode()
    if message is None:
        assert prepare(config(data__streaming=True))[1]
        return
    assert message in refusal(prepare, config(data__streaming=True))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"data__text_column": "body"}, "data.text_column: user/set has no column 'body'"),
        ({"data__text_column": "id"}, "data.text_column: column 'id'"),
        ({"data__split": "best"}, "Bad split: best"),
        ({"data__source": "user/none"}, "user/none: "),
        ({"data__max_tokens": 3}, "data.max_tokens"),
    ],
)
def test_streams_that_cannot_start(config, tmp_path, knobs, message):
    assert message in refusal(prepare, config(**knobs, data__streaming=True))
    assert not (tmp_path / "data").exists()


def test_only_hub_data_sets_are_streamed(config, text_file):
    assert "data.streaming: " in refusal(prepare, config(data__source=str(text_file), data__streaming=True))


def test_space_for_the_tokens_is_checked_before_the_first_document(hub_set, config, monkeypatch, capsys, tmp_path):
    from nanogpt_hf.data import space

    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: type("", (), {"free": 30_000_000_000}))
    config(data__max_tokens=10_000_000_000, data__streaming=True)
    assert main(["prepare", str(tmp_path / "tiny.yaml")]) == 2
    error = capsys.readouterr().err
    assert all(size in error for size in ("10,000,000,000 tokens", "20.0 GB", "40.0 GB", "30.0 GB"))
    assert error.count("\n") == 1
    assert main(["prepare", str(tmp_path / "tiny.yaml"), "--data.max_tokens", "7000000000"]) == 0
    assert "7,000,000,000 tokens" in capsys.readouterr().out


def test_a_signal_keeps_the_finished_parts(config, tmp_path, monkeypatch):
    prepare(config())
    alone = remove(tmp_path / "data")
    real = module.encode_split

    def interrupted(*arguments, **options):
        if (tmp_path / "data.parts" / "1-of-3").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
        patch.setattr(module, "encode_split", interrupted)
        with pytest.raises(Stopped, match=r"SIGTERM .* 2 of 3 parts"):
            prepare(config(data__streaming=True))
    assert not (tmp_path / "data").exists()
    assert sorted(path.name for path in (tmp_path / "data.parts").glob("[0-9]*")) == ["0-of-3", "1-of-3"]
    prepare(config(data__streaming=True))
    assert file_contents(tmp_path / "data") == alone


def test_the_size_that_the_hub_states_is_the_estimate(hub_set, config, capsys, tmp_path):
    size = "dataset_info:\n  splits:\n  - name: train\n    num_bytes: 8000000\n    num_examples: 120\n"
    hub_set.data_files["README.md"] = f"---\n{size}---\n".encode()
    config(data__streaming=True)
    assert main(["prepare", str(tmp_path / "tiny.yaml")]) == 0
    assert "2,000,000 tokens, which take 4.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"data__split": "train[:10%]", "data__streaming": True}, "data.streaming: "),
        ({"data__tokenizer": "char", "data__streaming": True}, "data.streaming: char "),
        ({"data__tokenizer": "char", "data__max_tokens": 9}, "data.max_tokens: char "),
        ({"data__format": "datatrove", "data__max_tokens": 9}, "data.max_tokens: datatrove "),
    ],
)
def test_knobs_that_do_not_fit_a_stream(config, knobs, message):
    with pytest.raises(ConfigError) as caught:
        config(**knobs)
    assert message in str(caught.value)


def test_progress_states_speed_and_time_left(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = TokenProgress(limit=10_000)
    progress.add(4000, "data/x", new=False)
    now += 50
    progress.add(500, "data/x")
    now += 50
    with caplog.at_level("INFO", logger="nanogpt_hf"):
        progress.add(500, "data/x")
    assert [record.message for record in caplog.records] == [
        "data/x: 5,000 tokens, 10 per second, about 8 min 20 s left"
    ]
