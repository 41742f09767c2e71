"""Prepare data: text or conversations -> arrow shards of token ids and a manifest.

The folder is complete or absent, also if several processes prepare it.
"""

import itertools
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import filelock
import numpy as np
import pyarrow
import transformers

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.conversations import encode_conversations, set_chat_template
from nanogpt_hf.data.examples import Examples, examples_sha256
from nanogpt_hf.data.interruption import Interrupted, raise_on_signals
from nanogpt_hf.data.manifest import (
    DECIDING_KNOBS,
    FORMAT,
    MANIFEST,
    Manifest,
    SplitFacts,
    check_fits,
    read_manifest,
    tool_versions,
    write_manifest,
)
from nanogpt_hf.data.place import is_vacant, lock_of, partial_of, put_in_place
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.data.shards import check_bytes, check_sizes, describe_shards
from nanogpt_hf.data.source import Documents, file_state, find_files, load_documents, without_login
from nanogpt_hf.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    end_of_text_id_of,
    load_tokenizer,
    save_tokenizer,
    vocabulary_hash,
)
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.errors import DataError, Stopped

TOKENIZER = "tokenizer"
_SHARD_BYTES = 500_000_000
_PARALLEL_FROM_BYTES = 20_000_000  # below, starting processes costs more than they save


@dataclass(frozen=True)
class PreparedData:
    """Prepared tokens, ready to train on."""

    train: TokenBlocks | Examples
    validation: TokenBlocks | Examples
    tokenizer: transformers.PreTrainedTokenizerBase
    manifest: Manifest

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def end_of_text_id(self) -> int | None:
        return end_of_text_id_of(self.tokenizer)


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data` in its folder; return the manifest and whether anything had to be done.

    Safe to call from several processes at once: one prepares, the others wait for it. An interruption leaves nothing,
    SIGKILL nothing that looks complete. Raises DataError if the text cannot be read or the folder contains something
    else, and Stopped at a signal.
    """
    if not shows_bars():
        datasets.disable_progress_bars()
    folder = Path(config.data.dir).resolve()  # of a link, its target: no folder can be renamed over the link itself
    try:
        # In this order: a folder that another process has just finished is full, but its manifest is there by then.
        occupied = not is_vacant(folder) and not partial_of(folder).exists()
        if manifest := read_manifest(folder):
            check_fits(manifest, config.data)
            return manifest, False
        if occupied:
            raise DataError(f"{folder}: exists and holds no {MANIFEST}; choose another --data.dir")
        _check_source(config.data, folder)  # before any folder is made
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_of(folder)
        lock.touch()  # if no file can be made, as in /proc, filelock would retry for ever
        with raise_on_signals(), filelock.FileLock(lock):
            if manifest := read_manifest(folder):  # another process was faster
                check_fits(manifest, config.data)
                return manifest, False
            if not is_vacant(folder):
                raise DataError(f"{folder}: exists and holds no {MANIFEST}; choose another --data.dir")
            partial = partial_of(folder)
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process: we hold the lock
            partial.mkdir()
            try:
                manifest = _prepare_in(partial, config.data)
                put_in_place(partial, folder, last=MANIFEST)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    except Interrupted as signal:
        raise Stopped(f"{folder}: stopped by {signal} while it was being prepared; nothing was kept") from None
    except MemoryError:
        source = without_login(config.data.source)
        raise DataError(f"data.source: {source}: too large for the memory of this machine") from None
    return manifest, True


def _check_source(data: DataSection, folder: Path) -> None:
    """Raises DataError if a local source is missing, or contains `folder`, which would be read as text."""
    find_files(data.source)
    source = Path(os.path.expanduser(data.source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(f"{folder}: is inside data.source {data.source}, and would be read as text; choose another")


def load_prepared(config: Config) -> PreparedData:
    """Open prepared data. Raises DataError if it is missing, does not fit the recipe, or is too short for a block."""
    folder = Path(config.data.dir)
    manifest = require_manifest(folder)
    check_fits(manifest, config.data)
    tokenizer = open_tokenizer(folder, manifest)
    tokens = [open_tokens(folder, split, manifest) for split in ("train", "validation")]
    block_size, packing = config.data.block_size, config.data.packing
    if config.data.format == "chat":
        sizes = {"block_size": block_size, "packing": packing, "vocab_size": manifest.vocab_size}
        train, validation = (Examples.open(folder / split, **sizes) for split in ("train", "validation"))
        for split, examples in (("train", train), ("validation", validation)):
            if not len(examples):
                raise DataError(
                    f"data.block_size: {block_size} tokens are too few for every conversation of {folder / split}: "
                    "none has an answer within them"
                )
        return PreparedData(train, validation, tokenizer, manifest)
    train, validation = tokens
    if len(train) <= block_size:
        raise DataError(
            f"data.block_size: {block_size} tokens and a next one are more than "
            f"the {len(train):,} training tokens in {folder}"
        )
    if len(validation) < 2:
        raise DataError(f"{folder}: {len(validation)} validation tokens; raise data.validation_fraction")
    blocks = TokenBlocks(train, block_size, stride=1 if config.data.order == "random" else None)
    return PreparedData(blocks, TokenBlocks(validation, block_size, partial=True), tokenizer, manifest)


def require_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises DataError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data; run `prepare` first")
    return manifest


def open_tokenizer(folder: Path, manifest: Manifest) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of prepared data. Raises DataError if it is not the manifest's."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if (vocabulary_hash(tokenizer), len(tokenizer)) != (manifest.tokenizer_hash, manifest.vocab_size):
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made these tokens; prepare the data again")
    return tokenizer


def open_tokens(folder: Path, split: str, manifest: Manifest) -> TokenStream:
    """The tokens of a split. Raises DataError if they cannot be read or their number is not the manifest's.

    Ids are checked against the vocabulary when they are read, and all bytes by `check_prepared`.
    """
    facts = getattr(manifest, split)
    if facts.shards is not None:
        check_sizes(folder / split, facts.shards)
    stream = TokenStream.open(folder / split, manifest.vocab_size)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens, but {MANIFEST} says {facts.tokens:,}; "
            "copy the prepared data again, or remove it to prepare it again"
        )
    return stream


def check_prepared(folder: Path) -> bool:
    """Verify all prepared data; false if there are no checksums (older versions recorded none).

    Raises DataError for a byte that changed since it was prepared, and for a token beyond the vocabulary.
    """
    manifest = require_manifest(folder)
    open_tokenizer(folder, manifest)
    for split in ("train", "validation"):
        stream, shards = open_tokens(folder, split, manifest), getattr(manifest, split).shards
        if shards is None:
            stream.check_vocabulary()
        else:
            check_bytes(folder / split, shards)
    return manifest.train.shards is not None


def _hold_out(documents: Documents, data: DataSection) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split into train and validation: a single document is cut near its end, of several some are drawn by seed."""
    if documents.validation is not None:
        return documents.train, documents.validation
    count = len(documents.train)
    if count == 1 and data.format == "chat":
        raise DataError(f"data.source: {data.source}: one conversation is too few to validate on another; give two")
    if count == 1:
        text = documents.train[0]["text"] or ""
        cut = int(len(text) * (1 - data.validation_fraction))
        kind = documents.train.features.arrow_schema.field("text").type

        def lone(part: str, name: str) -> datasets.Dataset:
            # With a given fingerprint, since datasets would pickle the whole text to compute one.
            return datasets.Dataset(pyarrow.table({"text": pyarrow.array([part], kind)}), fingerprint=name)

        return lone(text[:cut], "train"), lone(text[cut:], "validation")
    held_out = max(1, round(count * data.validation_fraction))
    # argsort of raw bits: a permutation that no version of NumPy changes
    bits = np.random.Philox(key=derive_seed(data.validation_seed, "validation")).random_raw(count)
    order = np.argsort(bits, kind="stable")
    return documents.train.select(np.sort(order[held_out:])), documents.train.select(np.sort(order[:held_out]))


def _processes(text: datasets.Dataset, num_proc: int | None) -> int:
    """Number of processes that tokenize: `num_proc`, or one per core if the text is large enough for that to pay.

    At most four per core: more are of no use, and each takes memory.
    """
    size = text.data.nbytes * text.num_rows // max(1, text.data.num_rows)  # a selection has the data of all rows
    cores = allowed_cores()
    return min(text.num_rows, 4 * cores, num_proc or (cores if size > _PARALLEL_FROM_BYTES else 1))


def _tokenize(
    text: datasets.Dataset, tokenizer: Tokenizer, end_of_text_id: int | None, num_proc: int, target: Path
) -> datasets.Dataset:
    """Rows of text -> rows of `input_ids` and the text's `bytes`, in the file `target`; without empty rows."""
    # Not `tokenizer` itself: the closure of `encode` is sent to every process, and tokenizer.hf takes a second each.
    name, encode_batch, vocab_size = tokenizer.name, tokenizer.encode_batch, tokenizer.vocab_size
    kind = np.uint16 if vocab_size <= 2**16 else np.uint32
    ending = [] if end_of_text_id is None else [end_of_text_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        texts = [text for text in batch["text"] if text]  # rows of a Hub data set may be empty or null
        rows = []
        for ids in encode_batch(texts) if texts else []:
            if len(ids) and ids.max() >= vocab_size:
                raise DataError(f"data.tokenizer: {name} gave id {ids.max()}, beyond its own vocabulary")
            rows.append(
                np.concatenate((ids, ending), dtype=kind, casting="unsafe")
            )  # checked above: larger ids would wrap
        return {"input_ids": rows, "bytes": [len(text.encode()) for text in texts]}

    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value(np.dtype(kind).name)), "bytes": datasets.Value("int64")}
    )
    return text.map(
        encode,
        batched=True,
        remove_columns=text.column_names,
        features=features,
        num_proc=num_proc if num_proc > 1 else None,
        cache_file_name=str(target),  # the default leaves a Hub data set's tokens in its cache
        load_from_cache_file=False,
        new_fingerprint=target.stem,  # the default hashes the tokenizer, which takes seconds
        desc="tokenizing",
    )


def _tokenize_conversations(
    conversations: datasets.Dataset, hf: transformers.PreTrainedTokenizerBase, num_proc: int, target: Path
) -> datasets.Dataset:
    """Rows of messages -> rows of `input_ids`, `assistant_mask` (1 for tokens of answers) and the answers' `bytes`.

    They are written to the file `target`.
    """
    kind = np.uint16 if len(hf) <= 2**16 else np.uint32

    def encode(batch: dict[str, list]) -> dict[str, list]:
        ids, masks = encode_conversations(hf, batch["messages"])
        answers = (
            "".join(message["content"].strip() for message in messages if message["role"] == "assistant")
            for messages in batch["messages"]
        )
        return {
            "input_ids": [np.asarray(row, dtype=np.uint32).astype(kind) for row in ids],
            "assistant_mask": [np.asarray(row, dtype=np.uint8) for row in masks],
            "bytes": [len(text.encode()) for text in answers],
        }

    columns = {"input_ids": np.dtype(kind).name, "assistant_mask": "uint8"}
    features = {name: datasets.List(datasets.Value(dtype)) for name, dtype in columns.items()}
    return conversations.map(
        encode,
        batched=True,
        remove_columns=conversations.column_names,
        features=datasets.Features(features | {"bytes": datasets.Value("int64")}),
        num_proc=num_proc if num_proc > 1 else None,
        cache_file_name=str(target),
        load_from_cache_file=False,
        new_fingerprint=target.stem,
        desc="tokenizing",
    )


def save_split(rows: datasets.Dataset, facts: SplitFacts, folder: Path) -> SplitFacts:
    """Write rows of `input_ids` as arrow shards; return their facts with the checksums."""
    itemsize = np.dtype(rows.features["input_ids"].feature.dtype).itemsize
    shards = -(-facts.tokens * itemsize // _SHARD_BYTES)
    rows.save_to_disk(folder, num_shards=max(1, min(shards, rows.num_rows)))
    sha256 = TokenStream.open(folder).sha256() if facts.assistant_tokens is None else examples_sha256(folder)
    return replace(facts, sha256=sha256, shards=describe_shards(folder))


def _assistant_tokens(rows: datasets.Dataset) -> int:
    chunks = rows.data.column("assistant_mask").chunks
    return sum(int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in chunks)


def _texts(splits: Collection[datasets.Dataset]) -> Iterator[str]:
    """Every text, and of conversations every message."""
    rows = sum(split.num_rows for split in splits)
    for row in datasets.utils.tqdm(itertools.chain(*splits), "reading for the tokenizer", rows, unit=" documents"):
        if "messages" in row:
            yield from (message["content"] for message in row["messages"])
        else:
            yield row["text"] or ""


def _prepare_in(folder: Path, data: DataSection) -> Manifest:
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = load_documents(data, scratch)
    splits = dict(zip(("train", "validation"), _hold_out(documents, data), strict=True))
    chat = data.format == "chat"
    # `char` has to know the characters of both splits; `bpe` learns from the training split alone.
    read = [splits["train"]] if data.tokenizer == "bpe" else splits.values()
    tokenizer = build_tokenizer(data.tokenizer, _texts(read), data.vocab_size)
    if chat:
        set_chat_template(tokenizer.hf, data.tokenizer)
    # A single document needs no end-of-text token (nor does the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = end_of_text_id_of(tokenizer.hf) if several else None
    facts = {}
    for name, split in splits.items():
        num_proc = _processes(split, data.num_proc)
        target = scratch / f"{name}.arrow"
        if chat:
            rows = _tokenize_conversations(split, tokenizer.hf, num_proc, target)
        else:
            rows = _tokenize(split, tokenizer, end_of_text_id, num_proc, target)
        lengths = [len(chunk.flatten()) for chunk in rows.data.column("input_ids").chunks]
        facts[name] = SplitFacts(
            rows.num_rows, sum(lengths), sum(rows["bytes"]), assistant_tokens=_assistant_tokens(rows) if chat else None
        )
        if not facts[name].tokens:
            raise DataError(f"data.source: {data.source}: too little text: none is left for {name}")
        facts[name] = save_split(rows.remove_columns("bytes"), facts[name], folder / name)
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    local = find_files(data.source)
    manifest = Manifest(
        format=FORMAT,
        recipe={knob: getattr(data, knob) for knob in DECIDING_KNOBS},
        revision=documents.revision,
        file_state=file_state(local) if local else None,
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end_of_text_id,
        **facts,
        versions=tool_versions(),
    )
    shutil.rmtree(scratch)
    write_manifest(folder, manifest)
    return manifest
