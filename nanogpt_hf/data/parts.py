"""Prepare data in parts: on several machines, or one after another, with an end at `data.max_tokens`; then join them.

The joined folder equals that of data prepared at once byte for byte: parts are runs of documents in the order of the
source, documents are encoded alike whether they are trained or validated on, and the validation documents are drawn at
the end. Parts are complete or absent, so that a stream of hours continues after an interruption.
"""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.chat_template import ChatFormat, chat_format
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.encode import count_rows, encode_split, save_counted
from nanogpt_hf.data.hold_out import held_out_rows
from nanogpt_hf.data.manifest import DECIDING_KNOBS, MANIFEST, Manifest, fitting_manifest, tool_versions
from nanogpt_hf.data.place import make_once, parts_of
from nanogpt_hf.data.prepared import write_facts
from nanogpt_hf.data.progress import TokenProgress
from nanogpt_hf.data.shards import ShardFacts, check_bytes, describe_shards
from nanogpt_hf.data.source import (
    UNKNOWN_REVISION,
    Part,
    check_source,
    file_digests,
    files_of_part,
    find_files,
    load_documents,
)
from nanogpt_hf.data.space import BYTES_PER_TOKEN, check_token_space
from nanogpt_hf.data.stream import open_stream
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, end_of_text_id_of, vocabulary_hash
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import plural

_PART = "part.json"
_FORMAT = 2
_CHUNK_BYTES = 256_000_000  # of text that is read, and then encoded by several processes, at once
_MAX_PARTS = 1000  # of a stream; of more files each part has several

logger = logging.getLogger(__name__)
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


def prepare_part(data: DataSection, part: Part) -> tuple[PartFacts, bool]:
    """Encode one part of the documents of a source; return its facts and whether anything had to be done.

    Raises DataError if the folder holds parts of another number, another recipe, or another process writes this part.
    """
    _check_tokenizer(data)
    return _make_part(data, part, lambda folder: _Encoder(data).encode(folder, part, data.max_tokens))


def prepare_in_parts(folder: Path, data: DataSection) -> Manifest:
    """Encode part after part, as many as `data.max_tokens` needs, and join them in `folder`.

    Parts that an earlier call has finished are kept, those of a stream with its revision.
    """
    parts = parts_folder(data)
    finished = [facts for index, number in _parts_in(parts) if (facts := _read_part(parts / f"{index}-of-{number}"))]
    encoder = _Encoder(data, next((facts.revision for facts in finished if facts.revision != UNKNOWN_REVISION), None))
    number = encoder.number_of_parts
    if encoder.stream:
        datasets.disable_progress_bars()  # one for each chunk would hide the lines about the tokens
        line = check_token_space(data, encoder.stream.text_bytes, encoder.tokenizer.vocab_size, parts)
        logger.info(f"{data.dir}: streaming {data.one_source}: {line}")
        if finished:
            logger.info(f"{data.dir}: {len(finished)} of {number} parts are in {parts} already")
    for index in range(number):
        part, remaining = Part(index, number), encoder.remaining
        kept = f"{index} of {number} parts are kept, and the same command continues after them"
        write = partial(encoder.encode, part=part, limit=remaining)
        facts, now = _make_part(data, part, write, kept=kept if index else "nothing was kept")
        if not now:
            encoder.progress.add(facts.tokens["train"], str(parts), new=False)
        if encoder.remaining is not None and encoder.remaining < 0:
            break
    return _merge(folder, data)


def _make_part(
    data: DataSection, part: Part, write: Callable[[Path], PartFacts], kept: str = "nothing was kept"
) -> tuple[PartFacts, bool]:
    folder = parts_folder(data)
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
        write=write,
        last=_PART,
        busy="another process is preparing this part; give each process its own --shard",
        kept=kept,
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
    """What decides a part; the path of a source that is not streamed may differ from machine to machine."""
    knobs = ("streaming", *(knob for knob in DECIDING_KNOBS if data.streaming or knob != "source"))
    return {knob: getattr(data, knob) for knob in knobs}


def _listing(data: DataSection) -> list[list[Any]] | None:
    """Name and size of each local file, the same on all machines that have the source."""
    files = find_files(data.one_source)
    if not files:
        return None
    root = Path(os.path.commonpath([path.parent for path in files]))
    return [[path.relative_to(root).as_posix(), path.stat().st_size] for path in files]


class _Encoder:
    """Encodes the parts that this process prepares: source and tokenizer are opened once."""

    def __init__(self, data: DataSection, revision: str | None = None):
        self.data = data
        self.stream = open_stream(data, revision) if data.streaming else None
        self.tokenizer, self.chat = _tokenizer_of(data)
        self.progress = TokenProgress(data.max_tokens)

    @property
    def number_of_parts(self) -> int:
        return min(self.stream.number_of_files, _MAX_PARTS) if self.stream else 1

    @property
    def remaining(self) -> int | None:
        """Training tokens to `data.max_tokens`, below 0 beyond it; None without a limit."""
        return None if self.data.max_tokens is None else self.data.max_tokens - self.progress.tokens

    def encode(self, folder: Path, part: Part, limit: int | None) -> PartFacts:
        """Write a part to `folder`, with the first document that is beyond `limit` tokens as its last."""
        data, scratch = self.data, folder / "scratch"
        scratch.mkdir()
        revision, splits = self._splits(part, scratch, limit)
        documents, tokens, shards = {}, {}, {}
        for name, chunks in splits.items():
            end = limit if name == "train" else data.max_tokens
            rows, documents[name], tokens[name] = self._encode_chunks(chunks, scratch / name, end)
            rows.save_to_disk(folder / name, num_shards=None if rows.num_rows else 1)
            shards[name] = describe_shards(folder / name)
        shutil.rmtree(scratch)
        facts = PartFacts(
            format=_FORMAT,
            index=part.index,
            number=part.number,
            recipe=_recipe(data),
            files=_listing(data),
            revision=revision,
            tokenizer_hash=vocabulary_hash(self.tokenizer.hf),
            documents=documents,
            tokens=tokens,
            splits=shards,
            versions=tool_versions(),
        )
        text = json.dumps(dataclasses.asdict(facts), indent=2, ensure_ascii=False)
        (folder / _PART).write_text(text + "\n", encoding="utf-8")
        return facts

    def _splits(
        self, part: Part, scratch: Path, limit: int | None
    ) -> tuple[str, Mapping[str, Iterable[datasets.Dataset]]]:
        """The revision, and the documents of each split in chunks; small ones for a small limit."""
        size = _CHUNK_BYTES if limit is None else min(_CHUNK_BYTES, 2 * BYTES_PER_TOKEN * limit)
        if self.stream:
            streams = self.stream.splits
            return self.stream.revision, {name: self.stream.chunks(name, part, size, scratch) for name in streams}
        documents = load_documents(self.data, scratch, part)
        splits = {"train": documents.train, "validation": documents.validation}
        return documents.revision, {
            name: [rows] if limit is None else _chunks(rows, size) for name, rows in splits.items() if rows is not None
        }

    def _encode_chunks(
        self, chunks: Iterable[datasets.Dataset], target: Path, limit: int | None
    ) -> tuple[datasets.Dataset, int, int]:
        """The rows of the chunks up to the one with the first document beyond the limit, their documents and tokens."""
        pieces, documents, tokens = [], 0, 0
        for number, chunk in enumerate(chunks):
            piece = encode_split(
                chunk,
                self.tokenizer,
                end_of_text_id_of(self.tokenizer.hf),
                self.chat,
                self.data.num_proc,
                target.with_name(f"{target.name}-{number}.arrow"),
                first=documents,
            )
            pieces.append(piece)
            documents += chunk.num_rows
            count = count_rows(piece, 0).tokens
            tokens += count
            if target.name == "train":
                self.progress.add(count, self.data.dir)
            if limit is not None and tokens > limit:
                break
        return datasets.concatenate_datasets(pieces), documents, tokens


def _chunks(rows: datasets.Dataset, size: int) -> Iterator[datasets.Dataset]:
    """Runs of rows with about `size` bytes."""
    step = max(1, size * rows.num_rows // max(1, rows.data.nbytes))
    for first in range(0, rows.num_rows, step):
        yield rows.select(range(first, min(first + step, rows.num_rows)))


def _read_part(folder: Path) -> PartFacts | None:
    path = folder / _PART
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']}, not {_FORMAT}")
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
    missing = sorted(set(range(number)) - {index for index, _ in found})
    folders = [source / f"{index}-of-{number}" for index in range(missing[0] if missing else number)]
    parts = [facts for facts in map(_read_part, folders) if facts]
    enough = data.streaming and sum(facts.tokens["train"] for facts in parts) > (data.max_tokens or math.inf)
    if missing and not enough:
        raise DataError(
            f"{source}: {len(missing)} of {number} parts are missing: {', '.join(map(str, missing[:20]))}; prepare "
            f"them with --shard {missing[0]}/{number}"
        )
    tokenizer, _ = _tokenizer_of(data)
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
    facts = {}
    for split in parts[0].splits:
        rows, numbers, count = _join(folders, parts, split)
        if data.max_tokens is not None:
            count = _documents_within(data.max_tokens, rows, numbers, count)
        drawn = split == "train" and "validation" not in parts[0].splits
        if count < 1 + drawn:
            raise DataError(
                f"data.source: {without_login(data.one_source)}: {plural(count, 'document')} in the first parts, which "
                "is too few to hold some out; raise data.max_tokens, or leave it and data.streaming out"
            )
        chosen = dict(zip(("train", "validation"), held_out_rows(count, data), strict=True)) if drawn else {}
        for name, documents in (chosen or {split: np.arange(count)}).items():
            own = rows.select(np.flatnonzero(np.isin(numbers, documents)), new_fingerprint=name)
            facts[name] = save_counted(own, len(documents), folder / name, data)
    return write_facts(folder, data, tokenizer, revision, end_of_text_id_of(tokenizer.hf), facts)


def _join(folders: list[Path], parts: list[PartFacts], split: str) -> tuple[datasets.Dataset, np.ndarray, int]:
    """The rows of all parts, the number of the document of each row, and the count of documents."""
    joined = [datasets.Dataset.load_from_disk(str(folder / split)) for folder in folders]
    counts = [part.documents[split] for part in parts]
    firsts = np.cumsum(counts) - counts
    numbers = [first + rows.data.column("document").to_numpy() for first, rows in zip(firsts, joined, strict=True)]
    return datasets.concatenate_datasets(joined).remove_columns("document"), np.concatenate(numbers), sum(counts)


def _documents_within(limit: int, rows: datasets.Dataset, numbers: np.ndarray, count: int) -> int:
    """The number of first documents that have at most `limit` tokens in all."""
    offsets = (chunk.offsets.to_numpy() for chunk in rows.data.column("input_ids").chunks)
    lengths = np.concatenate([np.diff(of_chunk) for of_chunk in offsets])
    within = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), limit, side="right"))
    return int(numbers[within]) if within < len(numbers) else count


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
