"""The space that a Hub data set needs is compared with the free space before anything is downloaded."""

import re
from types import SimpleNamespace

import datasets
import pytest

from assertions import refusal
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data import space

COMMIT = "0" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A data set of two files of 600 GB; its rows are `dataset_size`, and the disk has `free` bytes."""
    urls = [f"hf://datasets/user/big@{COMMIT}/data/{number}.parquet" for number in range(2)]
    facts = SimpleNamespace(
        config=SimpleNamespace(data_files={"train": urls}),
        cache_dir=str(tmp_path / "none"),
        info=SimpleNamespace(dataset_size=2 * 10**12),
        free=10**12,
        cached=set(),
    )
    siblings = [SimpleNamespace(rfilename=f"data/{number}.parquet", size=6 * 10**11) for number in range(2)]
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: facts)
    monkeypatch.setattr(space.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(space, "try_to_load_from_cache", lambda repo, path, **_: path if path in facts.cached else None)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: SimpleNamespace(free=facts.free))
    monkeypatch.setattr(space.constants, "HF_HUB_CACHE", str(tmp_path / "files"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return facts


def check(tmp_path):
    space.check_space(DataSection(source="user/big"), tmp_path / "data")


def test_a_data_set_larger_than_the_disk_is_one_line(hub, tmp_path):
    message = refusal(check, tmp_path)
    assert "user/big: " in message
    sizes = ["4,200.0", "1,000.0", "1,200.0", "2,000.0", "1,000.0"]  # needed, free, download, rows, tokens
    assert re.findall(r"([\d,.]+) GB", message) == sizes
    hub.free = 4_200_000_000_000
    check(tmp_path)


def test_what_is_there_already_needs_no_space(hub, tmp_path):
    hub.info.dataset_size = None  # unknown: at least as much as the files
    hub.cached = {"data/0.parquet"}
    assert re.findall(r"([\d,.]+) GB", refusal(check, tmp_path))[2:4] == ["600.0", "600.0"]
    hub.cache_dir = str(tmp_path)  # the rows are written
    check(tmp_path)


def test_without_sizes_or_network_nothing_is_checked(hub, tmp_path, monkeypatch):
    hub.free = 0
    monkeypatch.setattr(space.HfApi, "dataset_info", lambda *_, **__: 1 / 0)
    check(tmp_path)
