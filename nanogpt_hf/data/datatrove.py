"""Read the token files of Hugging Face's datatrove in place: NAME.ds, and the ends of its documents in NAME.ds.index.

A .ds file has the ids of all documents, little-endian, 2 or 4 bytes each; its index has for each document the number of
tokens up to its end, 8 bytes each (datatrove 0.10, pipeline/tokens/tokenizer.py).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.manifest import SplitFacts
from nanogpt_hf.data.source import file_digest, local_files
from nanogpt_hf.data.tokenizer import Tokenizer, bytes_of_tokens
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.errors import DataError

logger = logging.getLogger(__name__)
_AT_ONCE = 2**22  # tokens


@dataclass(frozen=True)
class TokenFile:
    """A .ds file, memory-mapped."""

    path: Path
    tokens: np.ndarray
    ends: np.ndarray  # of its documents


def open_token_files(data: DataSection) -> list[TokenFile]:
    """The token files of `data.source`, sorted by path; empty ones are left out.

    Raises DataError if there are none, or the size of one does not fit its index.
    """
    paths = local_files(data)
    if not paths:
        raise DataError(f"data.source: {data.one_source}: expected .ds files of datatrove on this machine")
    files = [_open(path) for path in paths if path.stat().st_size]
    if not files:
        raise DataError(f"data.source: {data.one_source}: all .ds files are empty")
    return files


def _open(path: Path) -> TokenFile:
    index = path.with_name(f"{path.name}.index")
    if path.suffix != ".ds":
        raise DataError(f"{path}: expected a .ds file of datatrove")
    try:
        if not index.stat().st_size or index.stat().st_size % 8:
            raise DataError(f"{index}: {index.stat().st_size:,} bytes are not numbers of 8 bytes; copy it again")
        ends = np.memmap(index, dtype="<u8", mode="r")
        size, tokens = path.stat().st_size, int(ends[-1])
        if size not in (2 * tokens, 4 * tokens):
            raise DataError(
                f"{path}: {size:,} bytes are not the {tokens:,} tokens of its index, of 2 or 4 bytes each; copy both"
            )
        return TokenFile(path, np.memmap(path, dtype="<u2" if size == 2 * tokens else "<u4", mode="r"), ends)
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read: {error.strerror}; datatrove writes .ds and .ds.index"
        ) from None


def token_stream(data: DataSection, split: str, train_tokens: int, vocab_size: int) -> TokenStream:
    """The tokens of a split: the first `train_tokens` of all files, or the rest."""
    files = open_token_files(data)
    return TokenStream([tokens for _, tokens, _ in _pieces(files, split, train_tokens)], vocab_size)


def _pieces(files: list[TokenFile], split: str, train_tokens: int) -> list[tuple[TokenFile, np.ndarray, int]]:
    """(file, its tokens that belong to the split, their documents)"""
    pieces, start = [], 0
    for file in files:
        cut = min(max(train_tokens - start, 0), len(file.tokens))
        documents = int(np.searchsorted(file.ends, cut, side="right")) if cut < len(file.tokens) else len(file.ends)
        if split == "train":
            pieces.append((file, file.tokens[:cut], documents))
        else:
            pieces.append((file, file.tokens[cut:], len(file.ends) - documents))
        start += len(file.tokens)
    return pieces


def describe_token_files(data: DataSection, tokenizer: Tokenizer) -> tuple[str, int | None, dict[str, SplitFacts]]:
    """Revision, end-of-text id and facts of token files. Reads all tokens, to count the bytes of their text.

    Validation takes whole documents at the end. Raises DataError for a token beyond the vocabulary.
    """
    files = open_token_files(data)
    _check_name(files[0].path, data.tokenizer)
    train_tokens = _end_of_training(files, data)
    lengths, facts = bytes_of_tokens(tokenizer), {}
    for split in ("train", "validation"):
        pieces = _pieces(files, split, train_tokens)
        size = sum(_count_bytes(file, tokens, lengths, tokenizer) for file, tokens, _ in pieces)
        tokens, documents = sum(len(tokens) for _, tokens, _ in pieces), sum(count for *_, count in pieces)
        facts[split] = SplitFacts(documents, tokens, max(1, size))
    last, end = int(files[0].tokens[int(files[0].ends[0]) - 1]), tokenizer.end_of_text_id
    return file_digest([file.path for file in files]), end if last == end else None, facts


def _end_of_training(files: list[TokenFile], data: DataSection) -> int:
    """The number of training tokens: up to the last end of a document that leaves enough for validation."""
    total = sum(len(file.tokens) for file in files)
    wanted, start, end = int(total * (1 - data.validation_fraction)), 0, 0
    for file in files:
        before = int(np.searchsorted(file.ends, min(wanted, total - 1) - start, side="right"))
        if before:
            end = start + int(file.ends[before - 1])
        start += len(file.tokens)
    if not end:
        raise DataError(
            f"data.source: {data.one_source}: no document ends within the first {wanted:,} of its {total:,} tokens; "
            "there is too little to train on"
        )
    return end


def _count_bytes(file: TokenFile, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> int:
    total = 0
    bar = datasets.utils.tqdm(range(0, len(tokens), _AT_ONCE), f"reading {file.path.name}", unit=" pieces")
    for start in bar:
        piece = tokens[start : start + _AT_ONCE]
        if piece.max() >= tokenizer.vocab_size:
            raise DataError(
                f"{file.path}: token {piece.max()} is beyond the vocabulary of "
                f"data.tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} tokens); name the tokenizer that made it"
            )
        total += int(lengths[piece].sum())
    return total


def _check_name(path: Path, tokenizer: str) -> None:
    """Warn if datatrove's metadata names another tokenizer; the ids alone cannot show it."""
    metadata = path.with_name(f"{path.name}.metadata")
    name = metadata.read_text(encoding="utf-8", errors="replace").partition("|")[0] if metadata.is_file() else tokenizer
    if name != tokenizer:
        logger.warning(f"{path}: made with the tokenizer {name}; data.tokenizer {tokenizer} must have the same ids")
