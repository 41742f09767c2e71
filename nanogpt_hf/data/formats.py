"""The formats of data: how the documents of each are found, encoded, and opened as blocks.

Text and conversations are encoded as arrow shards. The token files of Hugging Face's datatrove are
read in place: NAME.ds has the ids of all documents, little-endian, 2 or 4 bytes each, and
NAME.ds.index for each document the number of tokens up to its end, 8 bytes each (datatrove 0.10,
pipeline/tokens/tokenizer.py).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks, TokenBlocks, TokenStream, token_dtype
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.data.conversations import Conversation, conversation_of
from nanogpt_hf.data.encode import Encode, Row
from nanogpt_hf.data.examples import (
    DocumentBlocks,
    Examples,
    document_starts,
    read_from_end,
    row_lengths,
)
from nanogpt_hf.data.files import ROW_ENDINGS, TEXT_ENDINGS, find_files
from nanogpt_hf.data.manifest import SPLITS, Manifest, SplitFacts
from nanogpt_hf.data.rows import text_of
from nanogpt_hf.data.tokenizer import Tokenizer, bytes_of_tokens
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import shows_bars

Document = str | Conversation | None  # None and "" are the empty rows of a Hub data set

logger = logging.getLogger(__name__)
_AT_ONCE = 2**22  # tokens


@dataclass(frozen=True)
class Format:
    """A value of `data.format`."""

    endings: tuple[str, ...]  # its files' in a folder
    # the blocks of a split
    blocks: Callable[[Path, str, Manifest, DataSection], Blocks]
    # reads a row, or a file of plain text; raises ValueError if it is none
    document: Callable[[Any, DataSection], Document] | None = None
    reads_plain_text: bool = False
    # from the tokenizer and the id that ends each document; None if the tokens are made already
    encoder: Callable[[Tokenizer, int | None], Encode] | None = None
    in_threads: bool = False  # whether the encoder may run in several; chat templates may not


def local_files(data: DataSection) -> list[Path]:
    """`find_files` of the recipe's source and format; token files without tokens are left out."""
    form = FORMATS[data.format]
    files = find_files(data.one_source, form.endings)
    return files if form.encoder else [path for path in files if path.stat().st_size]


def text_encoder(tokenizer: Tokenizer, end_of_text_id: int | None) -> Encode:
    """Encode texts, each after the token that the tokenizer itself puts there, if any."""
    name, vocab_size = tokenizer.name, tokenizer.vocab_size
    kind = token_dtype(vocab_size)
    start, end = ([] if i is None else [i] for i in (tokenizer.start_of_text_id, end_of_text_id))
    tokenizer.encode_batch([""])  # sets options of the library, which threads may not

    def encode(texts: list[str | None], first: int) -> list[Row]:
        kept = {number: text for number, text in enumerate(texts, first) if text}
        rows, encoded = [], tokenizer.encode_batch([*kept.values()]) if kept else []
        for (number, text), ids in zip(kept.items(), encoded, strict=True):
            if len(ids) and ids.max() >= vocab_size:
                raise DataError(
                    f"data.tokenizer: {name} gave id {ids.max()}, beyond its own vocabulary"
                )
            # checked above: larger ids would wrap
            ids = np.concatenate((start, ids, end), dtype=kind, casting="unsafe")
            rows.append(Row(number, ids, len(text.encode())))
        return rows

    return encode


def _chat_encoder(tokenizer: Tokenizer, _: int | None) -> Encode:
    chat, kind = chat_format(tokenizer.hf, tokenizer.name), token_dtype(tokenizer.vocab_size)

    def encode(conversations: list[Conversation], first: int) -> list[Row]:
        return [
            Row(
                first + example.conversation,
                np.array(example.input_ids, dtype=kind),
                example.bytes,
                np.array(example.assistant_mask, dtype=np.uint8),
            )
            for example in chat.examples(conversations)
        ]

    return encode


def token_stream(
    folder: Path, split: str, manifest: Manifest, data: DataSection | None = None
) -> TokenStream:
    """The tokens of a split; those of datatrove are in the source of `data`.

    Raises DataError if they cannot be read. Ids are checked against the vocabulary when they are
    read, and all bytes by `check_prepared`.
    """
    if getattr(manifest, split).shards is not None:
        return _opened(folder, split, manifest, manifest.vocab_size)
    if data is None:
        raise DataError(
            f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote"
        )
    chunks = _tokens_of(open_token_files(data), split, manifest.train.tokens)
    return TokenStream(chunks, manifest.vocab_size)


def _opened(
    folder: Path, split: str, manifest: Manifest, largest: int | None, column: str = "input_ids"
) -> TokenStream:
    """A column of our shards. Raises DataError if it has not as many tokens as the manifest says,
    such as shards of another split.
    """
    stream = TokenStream.open(folder / split, largest, column)
    if len(stream) != (expected := getattr(manifest, split).tokens):
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens in {column}, and manifest.json says "
            f"{expected:,}; copy it again, or remove {folder} to prepare it again"
        )
    return stream


def _token_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    stream, starts = token_stream(folder, split, manifest, data), None
    apart, from_end = data.mask == "documents", read_from_end(manifest)
    if data.packing == "documents":
        lengths, size = row_lengths(folder / split), data.block_size
        return DocumentBlocks(stream, lengths, block_size=size, from_end=from_end, apart=apart)
    if apart:
        starts = document_starts(row_lengths(folder / split), from_end)
    stride = 1 if data.order == "random" and split == "train" else None
    partial = split == "validation"
    return TokenBlocks(stream, data.block_size, stride=stride, partial=partial, starts=starts)


def _chat_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    return Examples(
        _opened(folder, split, manifest, manifest.vocab_size),
        _opened(folder, split, manifest, None, "assistant_mask"),
        row_lengths(folder / split),
        block_size=data.block_size,
        packing=data.packing,
    )


class TokenFile(NamedTuple):
    """A .ds file, memory-mapped."""

    tokens: np.ndarray
    ends: np.ndarray  # where its documents end


def open_token_files(data: DataSection) -> list[TokenFile]:
    """The token files of `data.source`, sorted by path; empty ones are left out.

    Raises DataError if there are none, or the size of one does not fit its index.
    """
    files = []
    for path in local_files(data):
        try:
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
    """What belongs to a split: the first `train_tokens` of all files, or the rest."""
    chunks, left = [], train_tokens
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
    files, start, ends = open_token_files(data), 0, []
    _check_name(local_files(data)[0], data.tokenizer)
    for file in files:
        ends.append(file.ends.astype(np.int64) + start)
        start += len(file.tokens)
    ends, wanted = np.concatenate(ends), min(int(start * (1 - data.validation_fraction)), start - 1)
    if not (documents := int(np.searchsorted(ends, wanted, side="right"))):
        raise DataError(
            f"data.source: {data.one_source}: no document ends within the first {wanted:,} of its "
            f"{start:,} tokens; there is too little to train on"
        )
    cut, sizes = int(ends[documents - 1]), bytes_of_tokens(tokenizer.hf, tokenizer.name)
    counts = (documents, cut), (len(ends) - documents, start - cut)
    facts = {
        split: SplitFacts(
            *count, max(1, _count_bytes(_tokens_of(files, split, cut), sizes, tokenizer))
        )
        for split, count in zip(SPLITS, counts, strict=True)
    }
    last, end = int(files[0].tokens[int(files[0].ends[0]) - 1]), tokenizer.end_of_text_id
    return (end if last == end else None), facts


def _count_bytes(chunks: list[np.ndarray], sizes: np.ndarray, tokenizer: Tokenizer) -> int:
    total = 0
    for tokens in tqdm(chunks, "reading", unit=" files", disable=not shows_bars()):
        for start in range(0, len(tokens), _AT_ONCE):
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
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.is_file():
        name = metadata.read_text(encoding="utf-8", errors="replace").partition("|")[0]
        if name != tokenizer:
            logger.warning(
                f"{path}: made with the tokenizer {name}, not {tokenizer}; check its ids"
            )


FORMATS = {
    "text": Format(
        endings=TEXT_ENDINGS,
        document=lambda row, data: text_of(row, data.text_column),
        reads_plain_text=True,
        encoder=text_encoder,
        in_threads=True,
        blocks=_token_blocks,
    ),
    "chat": Format(
        endings=ROW_ENDINGS,
        document=lambda row, _: conversation_of(row),
        encoder=_chat_encoder,
        blocks=_chat_blocks,
    ),
    "datatrove": Format(endings=(".ds",), blocks=_token_blocks),
}
