"""Sizes and checksums of the arrow files of a split, and their verification."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nanogpt_hf.errors import DataError

NO_CHECKSUMS = "prepared by an older version, which recorded no checksums: no token is beyond the vocabulary"
_REMEDY = "copy the prepared data again, or remove it to prepare it again"


@dataclass(frozen=True)
class ShardFacts:
    size: int  # bytes
    sha256: str


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_shards(folder: Path) -> dict[str, ShardFacts]:
    """Size and checksum of each arrow file in the folder, by name."""
    return {path.name: ShardFacts(path.stat().st_size, _file_sha256(path)) for path in sorted(folder.glob("*.arrow"))}


def check_sizes(folder: Path, shards: dict[str, ShardFacts]) -> None:
    """Raises DataError if the folder has not exactly these arrow files with these sizes."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.arrow")}
    for name in sorted(sizes.keys() | shards.keys()):
        if name not in sizes:
            raise DataError(f"{folder / name}: is missing; {_REMEDY}")
        if name not in shards:
            raise DataError(f"{folder / name}: is not part of this prepared data; {_REMEDY}")
        if sizes[name] != shards[name].size:
            raise DataError(
                f"{folder / name}: has {sizes[name]:,} bytes, not the {shards[name].size:,} it was prepared with; "
                f"{_REMEDY}"
            )


def check_bytes(folder: Path, shards: dict[str, ShardFacts]) -> None:
    """Raises DataError for an arrow file whose bytes have changed. Reads all of them."""
    check_sizes(folder, shards)
    for name, facts in shards.items():
        if _file_sha256(folder / name) != facts.sha256:
            raise DataError(f"{folder / name}: is damaged: its sha256 has changed since it was prepared; {_REMEDY}")
