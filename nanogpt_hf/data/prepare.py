"""Text or conversations -> arrow shards of token ids and a manifest that says what they are.

Whole or absent, whoever else is at it.
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
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, save_tokenizer, vocabulary_hash
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
        return self.tokenizer.eos_token_id


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data` in its folder; return the manifest and whether anything had to be done.

    Safe to call from several processes at once: one prepares, the others wait for it. An interruption leaves nothing
    behind, SIGKILL nothing that looks finished. Raises DataError where the text cannot be read or the folder holds
    something else, and Stopped at a signal.
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
        lock.touch()  # filelock would retry for ever if no file can be made, as in /proc
        with raise_on_signals(), filelock.FileLock(lock):
            if manifest := read_manifest(folder):  # another process was faster
                check_fits(manifest, config.data)
                return manifest, False
            if not is_vacant(folder):
                raise DataError(f"{folder}: exists and holds no {MANIFEST}; choose another --data.dir")
            partial = partial_of(folder)
            shutil.rmtree(partial, ignore_errors=True)  # what a killed process left: nobody else is at it now
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
    """Raises DataError where a local source is not there, or would read the prepared data in `folder` as text."""
    find_files(data.source)
    source = Path(os.path.expanduser(data.source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(f"{folder}: lies in data.source {data.source}, and would be read as text; choose another")


def load_prepared(config: Config) -> PreparedData:
    """Open prepared data. Raises DataError where it is missing, unfit for the recipe, or too short for a block."""
    folder = Path(config.data.dir)
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data; run `prepare` first")
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


def open_tokenizer(folder: Path, manifest: Manifest) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of prepared data. Raises DataError where it is not the manifest's."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if (vocabulary_hash(tokenizer), len(tokenizer)) != (manifest.tokenizer_hash, manifest.vocab_size):
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made these tokens; prepare the data anew")
    return tokenizer


def open_tokens(folder: Path, split: str, manifest: Manifest) -> TokenStream:
    """The tokens of a split. Raises DataError where they cannot be read, or are more or fewer than the manifest says.

    Their values are checked as they are read (the vocabulary), and all bytes by `check_prepared`.
    """
    facts = getattr(manifest, split)
    if facts.shards is not None:
        check_sizes(folder / split, facts.shards)
    stream = TokenStream.open(folder / split, manifest.vocab_size)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens, but {MANIFEST} says {facts.tokens:,}; "
            "copy the prepared data again, or remove it to prepare it anew"
        )
    return stream


def check_prepared(folder: Path) -> bool:
    """Read all of the prepared data; whether there are checksums to compare with (older versions recorded none).

    Raises DataError for a byte that has changed since it was prepared, and for a token beyond the vocabulary.
    """
    manifest = read_manifest(folder)
    open_tokenizer(folder, manifest)
    for split in ("train", "validation"):
        stream, shards = open_tokens(folder, split, manifest), getattr(manifest, split).shards
        if shards is None:
            stream.check_vocabulary()
        else:
            check_bytes(folder / split, shards)
    return manifest.train.shards is not None


def _hold_out(documents: Documents, data: DataSection) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Train and validation text: a lone document is cut near its end, otherwise whole documents are drawn by seed."""
    if documents.validation is not None:
        return documents.train, documents.validation
    count = len(documents.train)
    if count == 1 and data.format == "chat":
        raise DataError(f"data.source: {data.source}: one conversation leaves none to validate on; give at least two")
    if count == 1:
        text = documents.train[0]["text"] or ""
        cut = int(len(text) * (1 - data.validation_fraction))
        kind = documents.train.features.arrow_schema.field("text").type
        # With a fingerprint of ours: for one of its own, datasets would pickle the whole text.
        return tuple(
            datasets.Dataset(pyarrow.table({"text": pyarrow.array([part], kind)}), fingerprint=name)
            for name, part in (("train", text[:cut]), ("validation", text[cut:]))
        )
    held_out = max(1, round(count * data.validation_fraction))
    # argsort of raw bits: a permutation that no version of NumPy changes
    bits = np.random.Philox(key=derive_seed(data.validation_seed, "validation")).random_raw(count)
    order = np.argsort(bits, kind="stable")
    return documents.train.select(np.sort(order[held_out:])), documents.train.select(np.sort(order[:held_out]))


def _processes(text: datasets.Dataset, num_proc: int | None) -> int:
    """Number of processes that tokenize: `num_proc`, or one per core if the text is large enough for that to pay.

    At most four per core: a larger number has no use, and each process takes memory of its own.
    """
    size = text.data.nbytes * text.num_rows // max(1, text.data.num_rows)  # a selection of rows has the data of all
    cores = allowed_cores()
    return min(text.num_rows, 4 * cores, num_proc or (cores if size > _PARALLEL_FROM_BYTES else 1))


def _tokenize(
    text: datasets.Dataset, tokenizer: Tokenizer, end_of_text_id: int | None, num_proc: int, target: Path
) -> datasets.Dataset:
    """Rows of text -> rows of `input_ids` and the text's `bytes`, in the file `target`. Rows with no text go."""
    # Not `tokenizer` itself: what `encode` holds is sent to every process, and tokenizer.hf takes a second each.
    name, encode_batch, vocab_size = tokenizer.name, tokenizer.encode_batch, tokenizer.vocab_size
    kind = np.uint16 if vocab_size <= 2**16 else np.uint32
    ending = [] if end_of_text_id is None else [end_of_text_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        texts = [text for text in batch["text"] if text]  # rows of a Hub data set may be empty or null
        rows = []
        for ids in encode_batch(texts) if texts else []:
            if len(ids) and ids.max() >= vocab_size:
                raise DataError(f"data.tokenizer: {name} gave id {ids.max()}, beyond its own vocabulary")
            rows.append(np.concatenate((ids, ending), dtype=kind, casting="unsafe"))  # checked: larger ids would wrap
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
        cache_file_name=str(target),  # left out, a Hub data set's tokens would lie in its cache for good
        load_from_cache_file=False,
        new_fingerprint=target.stem,  # left out, seconds go into a hash of the tokenizer that names a cache's entry
        desc="tokenizing",
    )


def _tokenize_conversations(
    conversations: datasets.Dataset, hf: transformers.PreTrainedTokenizerBase, num_proc: int, target: Path
) -> datasets.Dataset:
    """Rows of messages -> rows of `input_ids`, `answered` (1 where a token is part of an answer) and answers' `bytes`.

    They lie in the file `target`.
    """
    kind = np.uint16 if len(hf) <= 2**16 else np.uint32

    def encode(batch: dict[str, list]) -> dict[str, list]:
        ids, answered = encode_conversations(hf, batch["messages"])
        answers = (
            "".join(message["content"].strip() for message in messages if message["role"] == "assistant")
            for messages in batch["messages"]
        )
        return {
            "input_ids": [np.asarray(row, dtype=np.uint32).astype(kind) for row in ids],
            "answered": [np.asarray(row, dtype=np.uint8) for row in answered],
            "bytes": [len(text.encode()) for text in answers],
        }

    columns = {"input_ids": np.dtype(kind).name, "answered": "uint8"}
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
    sha256 = TokenStream.open(folder).sha256() if facts.answered is None else examples_sha256(folder)
    return replace(facts, sha256=sha256, shards=describe_shards(folder))


def _answered_tokens(rows: datasets.Dataset) -> int:
    return sum(int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in rows.data.column("answered").chunks)


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
    # A lone document has no neighbour to be told apart from, so nothing marks its end (nor the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = tokenizer.hf.eos_token_id if several else None
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
            rows.num_rows, sum(lengths), sum(rows["bytes"]), answered=_answered_tokens(rows) if chat else None
        )
        if not facts[name].tokens:
            raise DataError(f"data.source: {data.source}: too little text: there is none left for {name}")
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
