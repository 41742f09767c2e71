"""Format `datatrove`: token files of Hugging Face's datatrove, which are read in place.

NAME.ds has the ids of all documents, little-endian, 2 or 4 bytes each, and NAME.ds.index for each
document the number of tokens up to its end, 8 bytes each (datatrove 0.10,
pipeline/tokens/tokenizer.py).
"""

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks, TokenStream
from nanogpt_hf.data.formats import Format
from nanogpt_hf.data.hf_tokenizer import bytes_of_tokens
from nanogpt_hf.data.local_files import local_files
from nanogpt_hf.data.manifest import SPLITS, Manifest, SplitFacts
from nanogpt_hf.data.text import end_to_end
from nanogpt_hf.data.tokenizer import Tokenizer
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import shows_bars

logger = logging.getLogger(__name__)
_AT_ONCE = 2**22  # tokens


class TokenFile(NamedTuple):
    """A .ds file, memory-mapped."""

    tokens: np.ndarray
    ends: np.ndarray  # where its documents end


def open_token_files(data: DataSection) -> list[TokenFile]:
    """Return the token files of `data.source`, sorted by path; empty ones are left out.

    Raises DataError if there are none, or the size of one does not fit its index.
    """
    files = []
    for path in local_files(data):
        try:
            # The index has no header. Its last entry is the number of all tokens, which tells how
            # many bytes a token has.
            ends = np.memmap(path.with_name(f"{path.name}.index"), dtype="<u8", mode="r")
            count = int(ends[-1])
            kind = {2 * count: "<u2", 4 * count: "<u4"}[path.stat().st_size]
            files.append(TokenFile(np.memmap(path, dtype=kind, mode="r"), ends))
        except (OSError, ValueError, LookupError) as error:
            raise DataError(
                f"{path}: not a .ds file of datatrove, with tokens of 2 or 4 bytes, beside its "
                f".ds.index: {error}; copy both again"
            ) from None
    if files:
        return files
    raise DataError(f"data.source: {data.one_source}: no .ds file of datatrove with tokens here")


def _tokens_of(files: list[TokenFile], split: str, train_tokens: int) -> list[np.ndarray]:
    """Tokens of a split: the first `train_tokens` of all files, or the rest."""
    chunks = []
    left = train_tokens  # tokens of the training split from this file on
    for tokens, _ in files:
        cut = max(0, min(left, len(tokens)))
        left -= len(tokens)
        chunks.append(tokens[:cut] if split == "train" else tokens[cut:])
    return chunks


def describe_token_files(
    data: DataSection, tokenizer: Tokenizer
) -> tuple[int | None, dict[str, SplitFacts]]:
    """End-of-text id and facts of token files. Reads all tokens, to count the bytes of their text.

    Validation takes whole documents at the end, after the last end of a document that leaves
    enough. Raises DataError for a token beyond the vocabulary.
    """
    files = open_token_files(data)
    _check_name(local_files(data)[0], data.tokenizer)
    # The ends of all documents, counted over all files.
    total = 0
    ends_of_files = []
    for file in files:
        ends_of_files.append(file.ends.astype(np.int64) + total)
        total += len(file.tokens)
    ends = np.concatenate(ends_of_files)
    # At least one token is left for validation, even if its fraction rounds to none.
    wanted = min(int(total * (1 - data.validation_fraction)), total - 1)
    # Training takes whole documents: those that end within the wanted tokens.
    documents = int(np.searchsorted(ends, wanted, side="right"))
    if not documents:
        raise DataError(
            f"data.source: {data.one_source}: no document ends within the first {wanted:,} of its "
            f"{total:,} tokens; there is too little to train on"
        )
    cut = int(ends[documents - 1])
    sizes = bytes_of_tokens(tokenizer.hf, tokenizer.name)
    counts = (documents, cut), (len(ends) - documents, total - cut)
    facts = {
        split: SplitFacts(
            *count, max(1, _count_bytes(_tokens_of(files, split, cut), sizes, tokenizer))
        )
        for split, count in zip(SPLITS, counts, strict=True)
    }
    # datatrove may or may not have put end-of-text behind documents: the first one shows it.
    last = int(files[0].tokens[int(files[0].ends[0]) - 1])
    end = tokenizer.end_of_text_id
    return (end if last == end else None), facts


def _count_bytes(chunks: list[np.ndarray], sizes: np.ndarray, tokenizer: Tokenizer) -> int:
    total = 0
    for tokens in tqdm(chunks, "reading", unit=" files", disable=not shows_bars()):
        for start in range(0, len(tokens), _AT_ONCE):
            # In pieces, so that a file of any size takes little memory.
            piece = tokens[start : start + _AT_ONCE]
            if piece.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"data.tokenizer: {tokenizer.name} has {tokenizer.vocab_size:,} tokens, and "
                    f"not the token {piece.max()} of data.source; name the tokenizer that made it"
                )
            total += int(sizes[piece].sum())
    return total


def _check_name(path: Path, tokenizer: str) -> None:
    """Warn if datatrove's metadata names another tokenizer; the ids alone cannot show it."""
    # The metadata begins with the tokenizer's name and "|".
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.is_file():
        name = metadata.read_text(encoding="utf-8", errors="replace").partition("|")[0]
        if name != tokenizer:
            logger.warning(
                f"{path}: made with the tokenizer {name}, not {tokenizer}; check its ids"
            )


def _blocks(_: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    chunks = _tokens_of(open_token_files(data), split, manifest.train.tokens)
    return end_to_end(TokenStream(chunks, manifest.vocab_size), split, data)


FORMAT = Format(endings=(".ds",), blocks=_blocks, describe=describe_token_files)
