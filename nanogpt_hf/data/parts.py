"""Prepare data in parts: on several machines, or one after another, with an end at `data.max_tokens`; then join them.

The joined folder equals that of data prepared at once byte for byte: parts are runs of documents in the order of the
source, documents are encoded alike whether they are trained or validated on, and the validation documents are drawn at
the end. Parts are complete or absent, so that a stream of hours continues after an interruption.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import datasets

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.encode import count_rows, encode_split
from nanogpt_hf.data.join import join_parts
from nanogpt_hf.data.manifest import Manifest, tool_versions
from nanogpt_hf.data.part_facts import (
    FORMAT,
    PART,
    PartFacts,
    check_part,
    file_listing,
    part_recipe,
    parts_folder,
    parts_in,
    read_part,
    tokenizer_of,
)
from nanogpt_hf.data.place import make_once
from nanogpt_hf.data.progress import TokenProgress
from nanogpt_hf.data.shards import describe_shards
from nanogpt_hf.data.source import (
    UNKNOWN_REVISION,
    Part,
    check_source,
    load_documents,
)
from nanogpt_hf.data.space import BYTES_PER_TOKEN, check_token_space
from nanogpt_hf.data.stream import open_stream
from nanogpt_hf.data.tokenizer import end_of_text_id_of, vocabulary_hash
from nanogpt_hf.errors import DataError

_CHUNK_BYTES = 256_000_000  # of text that is read, and then encoded by several processes, at once
_MAX_PARTS = 1000  # of a stream; of more files each part has several

logger = logging.getLogger(__name__)


def prepare_part(data: DataSection, part: Part) -> tuple[PartFacts, bool]:
    """Encode one part of the documents of a source; return its facts and whether anything had to be done.

    Raises DataError if the folder holds parts of another number, another recipe, or another process writes this part.
    """
    _check_tokenizer(data)
    revision, _ = _finished(data)
    return _make_part(data, part, lambda folder: _Encoder(data, revision).encode(folder, part, data.max_tokens))


def prepare_in_parts(folder: Path, data: DataSection) -> Manifest:
    """Encode part after part, as many as `data.max_tokens` needs, and join them in `folder`.

    Parts that an earlier call has finished are kept, those of a stream with its revision.
    """
    parts = parts_folder(data)
    revision, finished = _finished(data)
    encoder = _Encoder(data, revision)
    number = encoder.number_of_parts
    if encoder.stream:
        datasets.disable_progress_bars()  # one for each chunk would hide the lines about the tokens
        line = check_token_space(data, encoder.stream.text_bytes, encoder.tokenizer.vocab_size, parts)
        logger.info(f"{data.dir}: streaming {data.one_source}: {line}")
        if finished:
            logger.info(f"{data.dir}: {finished} of {number} parts are in {parts} already")
    for index in range(number):
        part, remaining = Part(index, number), encoder.remaining
        kept = f"{index} of {number} parts are kept, and the same command continues after them"
        write = partial(encoder.encode, part=part, limit=remaining)
        facts, now = _make_part(data, part, write, kept=kept if index else "nothing was kept")
        if not now:
            encoder.progress.add(facts.tokens["train"], str(parts), new=False)
        if encoder.remaining is not None and encoder.remaining < 0:
            break
    return join_parts(folder, data)


def _finished(data: DataSection) -> tuple[str | None, int]:
    """The revision of the finished parts, if they have one, and their number. Raises DataError if `check_part` does."""
    folder, revision, count = parts_folder(data), None, 0
    for index, number in parts_in(folder):
        path = folder / f"{index}-of-{number}"
        if facts := read_part(path):
            check_part(path, facts, data)
            revision, count = (None if facts.revision == UNKNOWN_REVISION else facts.revision), count + 1
    return revision, count


def _make_part(
    data: DataSection, part: Part, write: Callable[[Path], PartFacts], kept: str = "nothing was kept"
) -> tuple[PartFacts, bool]:
    folder = parts_folder(data)
    others = {number for _, number in parts_in(folder)} - {part.number}
    if others:
        raise DataError(
            f"{folder}: holds parts of {min(others)}, not of {part.number}; give --shard I/{min(others)}, or remove it "
            "to divide the text again"
        )
    target = folder / f"{part.index}-of-{part.number}"

    def find() -> PartFacts | None:
        facts = read_part(target)
        if facts:
            check_part(target, facts, data)
        return facts

    return make_once(
        target,
        find=find,
        check=lambda: check_source(data, folder),
        write=write,
        last=PART,
        busy="another process is preparing this part; give each process its own --shard",
        kept=kept,
    )


def _check_tokenizer(data: DataSection) -> None:
    if data.format == "datatrove":
        raise DataError(f"data.source: {data.one_source}: datatrove has made the tokens already; leave --shard out")
    if data.tokenizer in ("char", "bpe"):
        raise DataError(
            f"data.tokenizer: {data.tokenizer} is made from the whole text, of which a part has not all; use gpt2 or a "
            "tokenizer's folder"
        )


class _Encoder:
    """Encodes the parts that this process prepares: source and tokenizer are opened once."""

    def __init__(self, data: DataSection, revision: str | None = None):
        self.data = data
        self.stream = open_stream(data, revision) if data.streaming else None
        self.tokenizer, self.chat = tokenizer_of(data)
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
            format=FORMAT,
            index=part.index,
            number=part.number,
            recipe=part_recipe(data),
            files=file_listing(data),
            revision=revision,
            tokenizer_hash=vocabulary_hash(self.tokenizer.hf),
            documents=documents,
            tokens=tokens,
            splits=shards,
            versions=tool_versions(),
        )
        text = json.dumps(dataclasses.asdict(facts), indent=2, ensure_ascii=False)
        (folder / PART).write_text(text + "\n", encoding="utf-8")
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
