"""Streaming a Hub data set, over real HTTP: the prepared folder of the ordinary way."""

import io
import json
import random
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from assertions import file_contents, refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data import formats, shards
from nanogpt_hf.data.manifest import SplitFacts
from nanogpt_hf.data.prepare import prepare

FILES = 3
ROWS = 40


def texts(seed: int, rows: int) -> list[str | None]:
    draw = random.Random(seed)
    lines = [
        " ".join(draw.choices(["red", "green", "blue"], k=draw.randint(1, 9))) for _ in range(rows)
    ]
    return [
        None if number % 11 == 5 else "" if number % 13 == 7 else line
        for number, line in enumerate(lines)
    ]


def parquet(rows: list, column: str = "text") -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table({"id": range(len(rows)), column: rows}), file, row_group_size=16
    )
    return file.getvalue()


@pytest.fixture
def hub_set(hub, monkeypatch, tmp_path):
    """The Hub with the data set user/set of three parquet files; it never waits before it tries
    again.
    """
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


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    "case",
    [
        "one file and a validation split",
        "max_tokens of joined splits",
        "rows that are left out",
    ],
)
def test_streamed_folder_equals_the_ordinary_one_byte_for_byte(
    hub_set, config, tmp_path, monkeypatch, case
):
    files = hub_set.data_files
    files["data/test-00000.parquet"] = parquet(texts(9, 25))
    knobs = {"data__max_tokens": 1000, "data__split": "test+train"}
    if case.startswith("one file"):
        del files["data/train-00001.parquet"], files["data/train-00002.parquet"]
        knobs = {"data__validation_split": "test", "data__validation_fraction": 0.0005}  # default
    elif case.startswith("rows"):
        knobs = {"data__max_bad_rows": 0.2, "data__num_threads": 3}
        for number in range(FILES):
            rows = [text and text.encode() for text in texts(number, ROWS)]
            rows[number * 5] = b"\xff"
            files[f"data/train-{number:05}.parquet"] = parquet(rows)
    monkeypatch.setattr(shards, "SHARD_BYTES", 800)
    monkeypatch.setattr(shards, "_RECORD_TOKENS", 300)
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 7)
    prepare(config(**knobs))
    assert len(list((tmp_path / "data" / "train").glob("*.arrow"))) > 1
    alone = remove(tmp_path / "data")
    manifest, now = prepare(config(**knobs, data__streaming=True))
    assert now
    assert manifest.left_out == FILES * case.startswith("rows")
    streamed = file_contents(tmp_path / "data")
    assert streamed["manifest.json"].decode() == alone["manifest.json"].decode()
    assert streamed == alone
    assert prepare(config(**knobs))[0] == manifest, "the folder serves both ways"


@pytest.mark.parametrize("format", ["text", "chat"])
def test_a_limit_keeps_the_first_whole_documents(config, tmp_path, format, monkeypatch):
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 7)
    path = tmp_path / "rows.jsonl"
    turns = [text for text in texts(3, 60) if text]
    rows = [{"text": text, "prompt": text, "completion": text} for text in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {"data__source": str(path), "data__format": format, "data__block_size": 64}
    knobs |= {"model__n_positions": 64, "train__micro_batch_size": 2}

    def facts_of(**more) -> list[SplitFacts]:
        manifest, _ = prepare(config(**knobs, **more))
        remove(tmp_path / "data")
        return [manifest.train, manifest.validation]

    whole = facts_of()
    total = sum(facts.tokens for facts in whole)
    assert facts_of(data__max_tokens=total) == whole
    limited = facts_of(data__max_tokens=total - 1)
    assert sum(facts.documents for facts in limited) == len(rows) - 1


def test_a_broken_connection_is_one_line_and_leaves_nothing(hub_set, config, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub_set.cut.add("data/train-00001.parquet")
    assert "user/set: split train: " in refusal(prepare, config(data__streaming=True))
    assert [path.name for path in tmp_path.glob("*data*")] == [".data.lock"]
    hub_set.cut.clear()
    assert prepare(config(data__streaming=True))[1]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"data__text_column": "body"}, "row 1: column 'body'"),
        ({"data__source": "user/none"}, "user/none: "),
        ({"data__max_tokens": 3}, "data.max_tokens"),
        ({"data__source": "folder"}, "data.streaming: "),
    ],
)
def test_streams_that_cannot_start(config, tmp_path, knobs, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = config(**knobs, data__streaming=True)
    Path("folder").mkdir()  # made when it could still be the name of a data set
    Path("folder/a.txt").write_text("a")
    assert message in refusal(prepare, loaded)
    assert not (tmp_path / "data").exists()
