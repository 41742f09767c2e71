"""What is recorded of each part of prepared data, to check that parts belong together."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.chat_template import ChatFormat, chat_format
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.manifest import DECIDING_KNOBS
from nanogpt_hf.data.place import parts_of
from nanogpt_hf.data.shards import ShardFacts
from nanogpt_hf.data.source import find_files
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer
from nanogpt_hf.errors import DataError

PART = "part.json"
FORMAT = 2
_NAME = re.compile(r"(\d+)-of-(\d+)")


@dataclass(frozen=True)
class PartFacts:
    """What part.json records of a part."""

    format: int
    index: int
    number: int
    recipe: dict[str, Any]  # the deciding knobs, without the source's path, and whether it was streamed
    files: list[list[Any]] | None  # name and size of each file of a local source
    revision: str  # of the whole source, or of the part's own files
    tokenizer_hash: str
    documents: dict[str, int]  # by split, empty ones included
    tokens: dict[str, int]  # by split
    splits: dict[str, dict[str, ShardFacts]]
    versions: dict[str, str]


def parts_folder(data: DataSection) -> Path:
    return parts_of(Path(data.dir).resolve())


def parts_in(folder: Path) -> list[tuple[int, int]]:
    """(index, number) of the complete parts in a folder, sorted."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob(f"*/{PART}") for path in [path.parent])
    return sorted((int(name[1]), int(name[2])) for name in names if name)


def read_part(folder: Path) -> PartFacts | None:
    path = folder / PART
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, not {FORMAT}")
        raw["splits"] = {
            split: {name: ShardFacts(**facts) for name, facts in shards.items()}
            for split, shards in raw["splits"].items()
        }
        return PartFacts(**raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a prepared part: {error}; remove {folder} to prepare it again") from None


def check_part(folder: Path, facts: PartFacts, data: DataSection) -> None:
    """Raises DataError if a part was prepared from another recipe or other files."""
    wanted = part_recipe(data)
    for knob, prepared in facts.recipe.items():
        if wanted.get(knob) != prepared:
            raise DataError(
                f"{folder}: prepared with data.{knob} {prepared!r}, the recipe says {wanted.get(knob)!r}; remove it to "
                "prepare it again"
            )
    if facts.files != file_listing(data):
        raise DataError(
            f"{folder}: prepared from other files than those of {without_login(data.one_source)} here; their names or "
            "sizes differ; remove it to prepare it again"
        )


def part_recipe(data: DataSection) -> dict[str, Any]:
    """What decides a part; the path of local files may differ from machine to machine."""
    recipe = {knob: getattr(data, knob) for knob in ("streaming", *DECIDING_KNOBS) if knob != "source"}
    return recipe if find_files(data.one_source) else recipe | {"source": without_login(data.one_source)}


def file_listing(data: DataSection) -> list[list[Any]] | None:
    """Name and size of each local file, the same on all machines that have the source."""
    files = find_files(data.one_source)
    if not files:
        return None
    root = Path(os.path.commonpath([path.parent for path in files]))
    return [[path.relative_to(root).as_posix(), path.stat().st_size] for path in files]


def tokenizer_of(data: DataSection) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = build_tokenizer(data.tokenizer, ())
    return tokenizer, chat_format(tokenizer.hf, data.tokenizer) if data.format == "chat" else None
