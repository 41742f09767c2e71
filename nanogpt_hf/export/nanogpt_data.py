"""Import nanoGPT's train.bin and val.bin as prepared data, in the format that `prepare` writes."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm

from nanogpt_hf.data.encode import save_split
from nanogpt_hf.data.manifest import FORMAT, Manifest, SplitFacts, tool_versions, write_manifest
from nanogpt_hf.data.prepared import TOKENIZER
from nanogpt_hf.data.tokenizer import Tokenizer, bytes_of_tokens, gpt2_tokenizer, save_tokenizer, vocabulary_hash
from nanogpt_hf.errors import DataError
from nanogpt_hf.export.nanogpt import load_meta

BINS = {"train": "train.bin", "validation": "val.bin"}
TOKENS_PER_READ = 2**22  # tokens read at once
MAX_ROW_TOKENS = 2**30  # tokens; arrow's offsets within a batch have 31 bits
_FEATURES = datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})


def import_bins(source: Path, folder: Path, meta: Path | None = None) -> Manifest:
    """Write the tokens in `source` to `folder` as prepared data, one row per document if there are end-of-text tokens.

    The vocabulary is that of `meta`, else of the meta.pkl in `source`, else GPT-2's, as in nanoGPT. The files are read
    in pieces. Raises DataError if they are no such files, or have tokens beyond the vocabulary.
    """
    bins = {split: _open(source / name) for split, name in BINS.items()}
    if meta is None and (source / "meta.pkl").is_file():
        meta = source / "meta.pkl"
    tokenizer = load_meta(meta) if meta else gpt2_tokenizer()
    end_of_text_id = tokenizer.end_of_text_id
    counts, digest = {}, hashlib.sha256()
    for split, tokens in bins.items():  # check everything before anything is written
        counts[split] = _count(tokens, source / BINS[split], tokenizer, digest)
    facts, lengths = {}, bytes_of_tokens(tokenizer)
    for split, tokens in bins.items():
        scratch = folder / f"{split}.scratch"
        documents = _write_rows(tokens, end_of_text_id, scratch, f"writing {split}")
        split_facts = SplitFacts(documents, len(tokens), int(counts[split] @ lengths))
        facts[split] = save_split(datasets.Dataset.from_file(str(scratch)), split_facts, folder / split)
        scratch.unlink()
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    has_end_of_text = end_of_text_id is not None and any(count[end_of_text_id] for count in counts.values())
    manifest = Manifest(
        format=FORMAT,
        recipe={"source": str(source), "tokenizer": tokenizer.name},
        revision=f"sha256:{digest.hexdigest()}",
        file_state=None,  # there is no text whose changes could be noticed
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end_of_text_id if has_end_of_text else None,
        **facts,
        versions=tool_versions(),
    )
    write_manifest(folder, manifest)
    return manifest


def _open(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise DataError(f"{path}: {size:,} bytes are not tokens of two bytes each; the file is empty or incomplete")
        return np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; nanoGPT's data is train.bin and val.bin") from None


def _count(tokens: np.ndarray, path: Path, tokenizer: Tokenizer, digest) -> np.ndarray:
    """Count each token and update `digest` with the bytes. Raises DataError for a token beyond the vocabulary."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with tqdm(total=len(tokens), desc=f"reading {path.name}", unit=" tokens", unit_scale=True, disable=None) as bar:
        for start in range(0, len(tokens), TOKENS_PER_READ):
            piece = tokens[start : start + TOKENS_PER_READ]
            if piece.max() >= tokenizer.vocab_size:
                position = int(np.argmax(piece >= tokenizer.vocab_size))
                raise DataError(
                    f"{path}: token {piece[position]} at {start + position:,} is beyond the vocabulary "
                    f"({tokenizer.name}, {tokenizer.vocab_size:,} tokens); name the matching meta.pkl with --meta"
                )
            counts += np.bincount(piece, minlength=tokenizer.vocab_size)
            digest.update(piece)
            bar.update(len(piece))
    return counts


def _write_rows(tokens: np.ndarray, end_of_text_id: int | None, file: Path, description: str) -> int:
    """Write an arrow file whose rows end at end-of-text tokens; return the number of rows."""
    rows = 0
    bar = tqdm(total=len(tokens), desc=description, unit=" tokens", unit_scale=True, disable=None)
    with bar, ArrowWriter(features=_FEATURES, path=str(file)) as writer:
        for start, ends in row_pieces(tokens, end_of_text_id):
            offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
            values = pa.array(tokens[start : start + ends[-1]])
            writer.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)}))
            rows += len(ends)
            bar.update(int(ends[-1]))
        writer.finalize()
    return rows


def row_pieces(tokens: np.ndarray, end_of_text_id: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Cut the tokens into pieces of whole rows; yield each one's start and the ends of its rows from there."""
    shortest = MAX_ROW_TOKENS if end_of_text_id is None else min(TOKENS_PER_READ, MAX_ROW_TOKENS)
    start, size = 0, shortest
    while start < len(tokens):
        piece = tokens[start : start + size]
        ends = np.flatnonzero(piece == end_of_text_id) + 1 if end_of_text_id is not None else np.zeros(0, np.int64)
        if start + len(piece) == len(tokens) or size == MAX_ROW_TOKENS:  # the last piece, or the longest allowed
            if not len(ends) or ends[-1] < len(piece):
                ends = np.append(ends, len(piece))
        elif not len(ends):
            size = min(2 * size, MAX_ROW_TOKENS)
            continue
        yield start, ends
        start, size = start + int(ends[-1]), shortest
