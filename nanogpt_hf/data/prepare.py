"""Prepare data: text or conversations -> arrow shards of token ids and a manifest.

The folder is complete or absent, also if several processes prepare it.
"""

import itertools
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import datasets
import filelock
import numpy as np
import pyarrow

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.data.encode import encode_split, save_split
from nanogpt_hf.data.interruption import Interrupted, raise_on_signals
from nanogpt_hf.data.manifest import (
    DECIDING_KNOBS,
    FORMAT,
    MANIFEST,
    Manifest,
    check_fits,
    read_manifest,
    tool_versions,
    write_manifest,
)
from nanogpt_hf.data.place import is_vacant, lock_of, partial_of, put_in_place
from nanogpt_hf.data.prepared import TOKENIZER
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.data.source import Documents, file_state, find_files, load_documents, without_login
from nanogpt_hf.data.tokenizer import build_tokenizer, end_of_text_id_of, save_tokenizer, vocabulary_hash
from nanogpt_hf.errors import DataError, Stopped


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
    # `char` has to know the characters of both splits; `bpe` learns from the training split alone.
    read = [splits["train"]] if data.tokenizer == "bpe" else splits.values()
    tokenizer = build_tokenizer(data.tokenizer, _texts(read), data.vocab_size, data.bpe_pattern)
    chat = chat_format(tokenizer.hf, data.tokenizer) if data.format == "chat" else None
    # A single document needs no end-of-text token (nor does the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = end_of_text_id_of(tokenizer.hf) if several else None
    facts = {}
    for name, split in splits.items():
        target = scratch / f"{name}.arrow"
        rows, counts = encode_split(split, tokenizer, end_of_text_id, chat, data.num_proc, target)
        if not counts.tokens:
            raise DataError(f"data.source: {data.source}: too little text: none is left for {name}")
        facts[name] = save_split(rows, counts, folder / name)
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
        start_of_text_id=None if chat else tokenizer.start_of_text_id,
    )
    shutil.rmtree(scratch)
    write_manifest(folder, manifest)
    return manifest
