"""Check that a Hub data set fits on the disk before it is downloaded."""

import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import config as datasets_config
from huggingface_hub import HfApi, constants, try_to_load_from_cache

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.tokens import token_dtype
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import format_bytes

BYTES_PER_TOKEN = 4  # of English text, with GPT-2's tokenizer; a token takes 2 bytes
_HUB_FILE = re.compile(r"hf://datasets/(?P<repo>[^/]+/[^/@]+)@(?P<revision>[^/]+)/(?P<path>.+)")


def check_token_space(data: DataSection, text_bytes: int | None, vocab_size: int, parts: Path) -> str:
    """A line with the space that the tokens of a stream need, and the free space.

    The parts and the folder that is joined from them need it at the same time, less what is in the folder `parts`
    already. Raises DataError if it is not free.
    """
    place, free = _disk_of(Path(data.dir))
    limit, estimate = data.max_tokens, text_bytes and text_bytes // BYTES_PER_TOKEN
    tokens = min(filter(None, (limit, estimate)), default=None)
    if tokens is None:
        return (
            "an unknown number of tokens, since the Hub states no size and data.max_tokens is not set; "
            f"{format_bytes(free)} are free on the disk of {place}"
        )
    size = tokens * bytes_of_a_token(data, vocab_size)
    missing = max(0, size - sum(path.stat().st_size for path in parts.rglob("*.arrow")))
    parts_place, free_for_parts = _disk_of(parts)  # not the disk of data.dir if that is a mount point
    needed = size + missing
    line = (
        f"{'at most' if tokens == limit else 'about'} {tokens:,} tokens, which take {format_bytes(size)}, and "
        f"{format_bytes(needed)} until all are there"
    )
    if needed > free:
        raise DataError(
            f"{data.dir}: {line}, and {format_bytes(free)} are free on the disk of {place}; lower data.max_tokens, or "
            "set --data.dir on a larger disk"
        )
    if parts_place.stat().st_dev != place.stat().st_dev and missing > free_for_parts:
        raise DataError(
            f"{parts}: {line}, and {format_bytes(free_for_parts)} are free for the parts on the disk of {parts_place}; "
            "set --data.dir to a folder below the mount point"
        )
    return f"{line}; {format_bytes(free)} are free on the disk of {place}"


def bytes_of_a_token(data: DataSection, vocab_size: int) -> int:
    """Bytes of a prepared token on the disk, with the mask of conversations."""
    return np.dtype(token_dtype(vocab_size)).itemsize + (data.format == "chat")


def check_space(data: DataSection, folder: Path) -> list[str]:
    """Raises DataError if a Hub data set needs more space than is free for its download, its rows and its tokens.

    `folder` gets the tokens. Without sizes from the Hub nothing is checked. Return the URLs of its files if known.
    """
    urls = []
    try:
        builder = datasets.load_dataset_builder(data.one_source, data.config, revision=data.revision)
        urls = file_urls(builder)
        download, rows = _bytes_needed(builder, urls)
    except Exception:  # of the network, of the Hub, of a data set without files: load_dataset will report it
        return urls
    _compare(data.one_source, download, rows, folder)
    return urls


def file_urls(builder: Any) -> list[str]:
    """The URLs of all files of a Hub data set."""
    return [str(url) for urls in (builder.config.data_files or {}).values() for url in urls]


def _bytes_needed(builder: Any, urls: list[str]) -> tuple[int, int]:
    """Bytes that remain to be downloaded, and those of the rows that `datasets` then writes."""
    sizes: dict[str, dict[str, int]] = {}
    download = 0
    for url in set(urls):
        if not (file := _HUB_FILE.fullmatch(url)):
            continue
        repo, revision, path = file["repo"], file["revision"], file["path"]
        if repo not in sizes:
            siblings = HfApi().dataset_info(repo, revision=revision, files_metadata=True).siblings or []
            sizes[repo] = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
        if not isinstance(try_to_load_from_cache(repo, path, revision=revision, repo_type="dataset"), str):
            download += sizes[repo].get(path, 0)
    if os.path.isdir(builder.cache_dir):
        return 0, 0
    return download, builder.info.dataset_size or download


def _compare(source: str, download: int, rows: int, folder: Path) -> None:
    tokens = rows * 2 // BYTES_PER_TOKEN
    needs = ((constants.HF_HUB_CACHE, download), (datasets_config.HF_DATASETS_CACHE, rows), (folder, tokens))
    needed, places = defaultdict[int, int](int), {}
    for place, size in needs:
        existing, _ = _disk_of(Path(place))
        device = existing.stat().st_dev
        needed[device] += size
        places.setdefault(device, existing)
    for device, size in needed.items():
        free = shutil.disk_usage(places[device]).free
        if size > free:
            raise DataError(
                f"data.source: {source}: needs about {format_bytes(size)} on the disk of {places[device]}, where "
                f"{format_bytes(free)} are free: {format_bytes(download)} to download, {format_bytes(rows)} of rows, "
                f"{format_bytes(tokens)} of tokens; set HF_HOME to a larger disk, name a smaller data.config, set "
                "data.streaming, or let datatrove make the tokens (data.format datatrove)"
            )


def _disk_of(place: Path) -> tuple[Path, int]:
    """The nearest folder that exists, and the free bytes of its disk."""
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    return existing, shutil.disk_usage(existing).free
