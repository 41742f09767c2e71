"""Prepare data on several machines: each encodes a part of the documents, and a merge makes the prepared folder.

The merged folder equals that of one machine byte for byte: parts are runs of documents in the order of the source,
documents are encoded alike whether they are trained or validated on, and the merge draws the validation documents.
"""

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.chat_template import ChatFormat, chat_format
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.encode import count_rows, encode_split
from nanogpt_hf.data.manifest import DECIDING_KNOBS, MANIFEST, Manifest, tool_versions
from nanogpt_hf.data.place import make_once, parts_of
from nanogpt_hf.data.prepare import check_source, fitting_manifest, held_out_rows, save_counted, write_facts
from nanogpt_hf.data.shards import ShardFacts, check_bytes, describe_shards
from nanogpt_hf.data.source import Part, file_digests, files_of_part, find_files, load_documents
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, end_of_text_id_of, vocabulary_hash
from nanogpt_hf.errors import DataError

_PART = "part.json"
_FORMAT = 1
_NAME = re.compile(r"(\d+)-of-(\d+)")


@dataclass(frozen=True)
class PartFacts:
    """What part.json records of a part."""

    format: int
    index: int
    number: int
    recipe: dict[str, Any]  # the deciding knobs, without the source's path
    files: list[list[Any]] | None  # name and size of each file of a local source
    revision: str  # of the whole source, or of the part's own files
    tokenizer_hash: str
    documents: dict[str, int]  # by split, empty ones included
    tokens: int
    splits: dict[str, dict[str, ShardFacts]]
    versions: dict[str, str]


def parts_folder(data: DataSection) -> Path:
    return parts_of(Path(data.dir).resolve())


def prepare_part(data: DataSection, part: Part) -> tuple[PartFacts, bool]:
    """Encode one part of the documents of a source; return its facts and whether anything had to be done.

    Raises DataError if the folder holds parts of another number, another recipe, or another process writes this part.
    """
    folder = parts_folder(data)
    _check_tokenizer(data)
    others = {number for _, number in _parts_in(folder)} - {part.number}
    if others:
        raise DataError(
            f"{folder}: holds parts of {min(others)}, not of {part.number}; give --shard I/{min(others)}, or remove it "
            "to divide the text again"
        )
    target = folder / f"{part.index}-of-{part.number}"

    def find() -> PartFacts | None:
        facts = _read_part(target)
        if facts:
            _check_part(target, facts, data)
        return facts

    return make_once(
        target,
        find=find,
        check=lambda: check_source(data, folder),
        write=lambda partial: _encode_part(partial, data, part),
        last=_PART,
        busy="another process is preparing this part; give each process its own --shard",
    )


def merge_parts(data: DataSection) -> tuple[Manifest, bool]:
    """Make the prepared folder of all parts, and remove them; return the manifest and whether it was made now.

    Raises DataError if a part is missing, damaged, or does not agree with the others, the recipe or the text.
    """
    folder = Path(data.dir).resolve()
    manifest, merged = make_once(
        folder,
        find=lambda: fitting_manifest(folder, data),
        check=lambda: None,
        write=lambda partial: _merge(partial, data),
        last=MANIFEST,
    )
    shutil.rmtree(parts_folder(data), ignore_errors=True)
    return manifest, merged


def _parts_in(folder: Path) -> list[tuple[int, int]]:
    """(index, number) of the complete parts in a folder, sorted."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob(f"*/{_PART}") for path in [path.parent])
    return sorted((int(name[1]), int(name[2])) for name in names if name)


def _check_tokenizer(data: DataSection) -> None:
    if data.format == "datatrove":
        raise DataError(f"data.source: {data.one_source}: datatrove has made the tokens already; leave --shard out")
    if data.tokenizer in ("char", "bpe"):
        raise DataError(
            f"data.tokenizer: {data.tokenizer} is made from the whole text, of which a part has not all; use gpt2 or a "
            "tokenizer's folder"
        )


def _tokenizer_of(data: DataSection) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = build_tokenizer(data.tokenizer, ())
    return tokenizer, chat_format(tokenizer.hf, data.tokenizer) if data.format == "chat" else None


def _recipe(data: DataSection) -> dict[str, Any]:
    """The deciding knobs; the path of the source may differ from machine to machine."""
    return {knob: getattr(data, knob) for knob in DECIDING_KNOBS if knob != "source"}


def _listing(data: DataSection) -> list[list[Any]] | None:
    """Name and size of each local file, the same on all machines that have the source."""
    files = find_files(data.one_source)
    if not files:
        return None
    root = Path(os.path.commonpath([path.parent for path in files]))
    return [[path.relative_to(root).as_posix(), path.stat().st_size] for path in files]


def _encode_part(folder: Path, data: DataSection, part: Part) -> PartFacts:
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = load_documents(data, scratch, part)
    tokenizer, chat = _tokenizer_of(data)
    end_of_text_id, tokens = end_of_text_id_of(tokenizer.hf), 0
    splits = {"train": documents.train, "validation": documents.validation}
    splits = {name: split for name, split in splits.items() if split is not None}
    shards = {}
    for name, split in splits.items():
        target = scratch / f"{name}.arrow"
        rows = encode_split(split, tokenizer, end_of_text_id, chat, data.num_proc, target, numbered=True)
        rows.save_to_disk(folder / name)
        shards[name] = describe_shards(folder / name)
        tokens += count_rows(rows, 0).tokens
    shutil.rmtree(scratch)
    facts = PartFacts(
        format=_FORMAT,
        index=part.index,
        number=part.number,
        recipe=_recipe(data),
        files=_listing(data),
        revision=documents.revision,
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        documents={name: split.num_rows for name, split in splits.items()},
        tokens=tokens,
        splits=shards,
        versions=tool_versions(),
    )
    text = json.dumps(dataclasses.asdict(facts), indent=2, ensure_ascii=False)
    (folder / _PART).write_text(text + "\n", encoding="utf-8")
    return facts


def _read_part(folder: Path) -> PartFacts | None:
    path = folder / _PART
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["splits"] = {
            split: {name: ShardFacts(**facts) for name, facts in shards.items()}
            for split, shards in raw["splits"].items()
        }
        return PartFacts(**raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a prepared part: {error}; remove {folder} to prepare it again") from None


def _check_part(folder: Path, facts: PartFacts, data: DataSection) -> None:
    """Raises DataError if a part was prepared from another recipe or other files."""
    wanted = _recipe(data)
    for knob, prepared in facts.recipe.items():
        if wanted.get(knob) != prepared:
            raise DataError(
                f"{folder}: prepared with data.{knob} {prepared!r}, the recipe says {wanted.get(knob)!r}; remove it to "
                "prepare it again"
            )
    if facts.files != _listing(data):
        raise DataError(
            f"{folder}: prepared from other files than those of {without_login(data.one_source)} here; their names or "
            "sizes differ; remove it to prepare it again"
        )


def _merge(folder: Path, data: DataSection) -> Manifest:
    source = parts_folder(data)
    found = _parts_in(source)
    if not found:
        raise DataError(f"{source}: holds no parts; run `prepare --shard 0/N` to `--shard N-1/N` first")
    numbers = sorted({number for _, number in found})
    if len(numbers) > 1:
        raise DataError(
            f"{source}: holds parts of {' and of '.join(map(str, numbers))}; remove those that do not belong here"
        )
    number = numbers[0]
    if missing := sorted(set(range(number)) - {index for index, _ in found}):
        raise DataError(
            f"{source}: {len(missing)} of {number} parts are missing: {', '.join(map(str, missing[:20]))}; prepare "
            f"them with --shard {missing[0]}/{number}"
        )
    tokenizer, _ = _tokenizer_of(data)
    folders = [source / f"{index}-of-{number}" for index in range(number)]
    parts = [facts for facts in map(_read_part, folders) if facts]
    for path, facts in zip(folders, parts, strict=True):
        _check_part(path, facts, data)
        for name, ours, theirs in (
            ("libraries", facts.versions, parts[0].versions),
            ("tokenizer", facts.tokenizer_hash, vocabulary_hash(tokenizer.hf)),
            ("splits", list(facts.splits), list(parts[0].splits)),
        ):
            if ours != theirs:
                raise DataError(f"{path}: made with other {name} than part 0: {ours} and {theirs}; prepare it again")
        for split, shards in facts.splits.items():
            check_bytes(path / split, shards)
    revision = _revision(data, folders, parts)
    scratch = folder / "scratch"
    scratch.mkdir()
    if "validation" in parts[0].splits:
        chosen = {split: (split, None) for split in ("train", "validation")}
    else:
        count = sum(part.documents["train"] for part in parts)
        train, validation = held_out_rows(count, data)
        chosen = {"train": ("train", train), "validation": ("train", validation)}
    facts = {}
    for name, (split, documents) in chosen.items():
        rows, count = _join(folders, parts, split, documents, scratch / f"{name}.arrow")
        facts[name] = save_counted(rows, count, folder / name, data)
    shutil.rmtree(scratch)
    return write_facts(folder, data, tokenizer, revision, end_of_text_id_of(tokenizer.hf), facts)


def _join(
    folders: list[Path], parts: list[PartFacts], split: str, documents: np.ndarray | None, target: Path
) -> tuple[datasets.Dataset, int]:
    """The rows of all parts, or of the given documents, in the file `target`; and the number of documents.

    They are what `encode_split` writes for the same documents on one machine.
    """
    joined = [datasets.Dataset.load_from_disk(str(folder / split)) for folder in folders]
    counts = [part.documents[split] for part in parts]
    firsts = np.cumsum(counts) - counts
    numbers = [first + np.asarray(rows["document"], dtype=np.int64) for first, rows in zip(firsts, joined, strict=True)]
    wanted = np.ones(sum(counts), dtype=bool)
    if documents is not None:
        wanted = np.isin(np.arange(sum(counts)), documents, assume_unique=True)
    rows = datasets.concatenate_datasets(joined).select(np.flatnonzero(wanted[np.concatenate(numbers)]))
    features = datasets.Features({name: kind for name, kind in rows.features.items() if name != "document"})
    rows = rows.with_format("numpy").map(
        lambda batch: {name: batch[name] for name in features},
        batched=True,
        remove_columns=["document"],
        features=features,
        cache_file_name=str(target),
        load_from_cache_file=False,
        new_fingerprint=target.stem,
        desc="merging",
    )
    # Not with_format(None), which would change the fingerprint in state.json.
    return datasets.Dataset(rows.data, rows.info, fingerprint=target.stem), int(wanted.sum())


def _revision(data: DataSection, folders: list[Path], parts: list[PartFacts]) -> str:
    """The revision of the whole source. Raises DataError if the parts were not made from the text that is here."""
    files = find_files(data.one_source)
    if not files:
        if len({facts.revision for facts in parts}) > 1:
            raise DataError(f"{folders[0].parent}: the parts were made from different revisions of the source")
        return parts[0].revision
    groups = [files_of_part(files, Part(facts.index, facts.number)) for facts in parts]
    if groups[0] == groups[-1] == files:
        groups = [files]
    whole, digests = file_digests(groups)
    for path, facts, digest in zip(folders, parts, digests * (len(parts) // len(digests)), strict=True):
        if facts.revision != digest:
            raise DataError(f"{path}: its text has changed since it was prepared; remove it to prepare it again")
    return whole
