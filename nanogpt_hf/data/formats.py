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
from nanogpt_hf.data.documents import (
    DocumentBlocks,
    document_lengths,
    document_starts,
    read_from_end,
)
from nanogpt_hf.data.encode import Encode, Rows
from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.files import ROW_ENDINGS, TEXT_ENDINGS, find_files, text_of
from nanogpt_hf.data.manifest import SPLITS, Manifest, SplitFacts
from nanogpt_hf.data.tokenizer import Tokenizer, bytes_of_tokens
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import shows_bars

Document = str | Conversation | None  # None and "" are the empty rows of a Hub data set
Pieces = list[tuple[Path, np.ndarray, int]]  # for token files: path, ids, documents

logger = logging.getLogger(__name__)
_AT_ONCE = 2**22  # tokens


@dataclass(frozen=True)
class Format:
    """A value of `data.format`."""

    endings: tuple[str, ...]  # its files' in a folder
    # the blocks of a split
    blocks: Callable[[Path, str, Manifest, DataSection], Blocks]
    line: Callable[[SplitFacts, Blocks | None], str]  # describes a split
    # reads a row, or a file of plain text; raises ValueError if it is none
    document: Callable[[Any, DataSection], Document] | None = None
    reads_plain_text: bool = False
    # from the tokenizer and the id that ends each document; None if the tokens are made already
    encoder: Callable[[Tokenizer, int | None], Encode] | None = None
    in_threads: bool = False  # whether the encoder may run in several; chat templates may not
    mask_bytes: int = 0  # on the disk for each token


def local_files(data: DataSection) -> list[Path]:
    """`find_files` of the recipe's source and format; token files without tokens are left out."""
    form = FORMATS[data.format]
    files = find_files(data.one_source, form.endings)
    return files if form.encoder else [path for path in files if path.stat().st_size]


def bytes_of_a_token(data: DataSection, vocab_size: int) -> int:
    """Bytes of a prepared token on the disk."""
    return np.dtype(token_dtype(vocab_size)).itemsize + FORMATS[data.format].mask_bytes


def text_encoder(tokenizer: Tokenizer, end_of_text_id: int | None) -> Encode:
    """Encode texts, each after the token that the tokenizer itself puts there, if any."""
    name, vocab_size = tokenizer.name, tokenizer.vocab_size
    kind = token_dtype(vocab_size)
    start, end = ([] if i is None else [i] for i in (tokenizer.start_of_text_id, end_of_text_id))
    tokenizer.encode_batch([""])  # sets options of the library, which threads may not

    def encode(texts: list[str | None], first: int) -> Rows:
        numbers = [number for number, text in enumerate(texts, first) if text]
        kept, rows = [text for text in texts if text], []
        for ids in tokenizer.encode_batch(kept) if kept else []:
            if len(ids) and ids.max() >= vocab_size:
                raise DataError(
                    f"data.tokenizer: {name} gave id {ids.max()}, beyond its own vocabulary"
                )
            # checked above: larger ids would wrap
            rows.append(np.concatenate((start, ids, end), dtype=kind, casting="unsafe"))
        return Rows.of(rows, numbers, [len(text.encode()) for text in kept])

    return encode


def _chat_encoder(tokenizer: Tokenizer, _: int | None) -> Encode:
    chat, kind = chat_format(tokenizer.hf, tokenizer.name), token_dtype(tokenizer.vocab_size)

    def encode(conversations: list[Conversation], first: int) -> Rows:
        examples = chat.examples(conversations)
        return Rows.of(
            [np.array(example.input_ids, dtype=kind) for example in examples],
            [first + example.conversation for example in examples],
            [example.bytes for example in examples],
            [np.array(example.assistant_mask, dtype=np.uint8) for example in examples],
        )

    return encode


def token_stream(
    folder: Path, split: str, manifest: Manifest, data: DataSection | None = None
) -> TokenStream:
    """The tokens of a split; those of datatrove are in the source of `data`.

    Raises DataError if they cannot be read. Ids are checked against the vocabulary when they are
    read, and all bytes by `check_prepared`.
    """
    if getattr(manifest, split).shards is not None:
        return TokenStream.open(folder / split, manifest.vocab_size)
    if data is None:
        raise DataError(
            f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote"
        )
    pieces = _pieces(open_token_files(data), split, manifest.train.tokens)
    return TokenStream([tokens for _, tokens, _ in pieces], manifest.vocab_size)


def _token_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    stream, starts = token_stream(folder, split, manifest, data), None
    apart, from_end = data.mask == "documents", read_from_end(manifest)
    if data.packing == "documents":
        lengths, size = document_lengths(folder / split), data.block_size
        rows = DocumentBlocks(stream, lengths, block_size=size, from_end=from_end, apart=apart)
        if not len(rows):
            raise DataError(f"{folder}: no {split} document has two tokens; add text")
        return rows
    if apart:
        starts = document_starts(document_lengths(folder / split), from_end)
    if split == "validation":
        if len(stream) < 2:
            raise DataError(
                f"{folder}: {len(stream)} validation tokens; raise data.validation_fraction"
            )
        return TokenBlocks(stream, data.block_size, partial=True, starts=starts)
    if len(stream) <= data.block_size:
        raise DataError(
            f"data.block_size: {data.block_size} tokens and a next one are more than "
            f"the {len(stream):,} training tokens in {folder}"
        )
    stride = 1 if data.order == "random" else None
    return TokenBlocks(stream, data.block_size, stride=stride, starts=starts)


def _chat_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    examples = Examples.open(
        folder / split,
        block_size=data.block_size,
        packing=data.packing,
        vocab_size=manifest.vocab_size,
    )
    if not len(examples):
        raise DataError(
            f"data.block_size: {data.block_size} tokens are too few for every conversation of "
            f"{folder / split}: none has an answer within them"
        )
    return examples


def _text_line(facts: SplitFacts, blocks: Blocks | None = None) -> str:
    line = (
        f"{facts.documents:,} documents, {facts.tokens:,} tokens, "
        f"{facts.bytes_per_token:.2f} bytes per token"
    )
    if not isinstance(blocks, DocumentBlocks):
        return line
    padding = 1 - blocks.filled / (len(blocks) * blocks.block_size)
    line += f"; {len(blocks):,} rows of whole documents, {padding:.2%} padding"
    return f"{line}; {blocks.cut:,} documents are longer than a row, and cut"


def _chat_line(facts: SplitFacts, blocks: Blocks | None) -> str:
    if not isinstance(blocks, Examples):
        return _text_line(facts)
    filled = blocks.filled / (len(blocks) * blocks.block_size)
    line = (
        f"{facts.documents:,} conversations, {facts.tokens:,} tokens, {facts.assistant_tokens:,} "
        f"of them in answers; {len(blocks):,} blocks of {blocks.block_size} ({blocks.packing}), "
        f"{filled:.0%} full"
    )
    if blocks.cut:
        line += f"; {blocks.cut:,} conversations are longer than a block and are cut at their end"
    if blocks.skipped:
        line += f"; {blocks.skipped:,} have no answer within a block and are left out"
    return line


class TokenFile(NamedTuple):
    """A .ds file, memory-mapped."""

    path: Path
    tokens: np.ndarray
    ends: np.ndarray  # where its documents end


def open_token_files(data: DataSection) -> list[TokenFile]:
    """The token files of `data.source`, sorted by path; empty ones are left out.

    Raises DataError if there are none, or the size of one does not fit its index.
    """
    if files := [_open_token_file(path) for path in local_files(data)]:
        return files
    raise DataError(
        f"data.source: {data.one_source}: expected .ds files of datatrove on this machine, with "
        "tokens"
    )


def _open_token_file(path: Path) -> TokenFile:
    index = path.with_name(f"{path.name}.index")
    if path.suffix != ".ds":
        raise DataError(f"{path}: expected a .ds file of datatrove")
    try:
        size, index_size = path.stat().st_size, index.stat().st_size
        if not index_size or index_size % 8:
            raise DataError(
                f"{index}: {index_size:,} bytes are not numbers of 8 bytes; copy it again"
            )
        ends = np.memmap(index, dtype="<u8", mode="r")
        tokens = int(ends[-1])
        if size not in (2 * tokens, 4 * tokens):
            raise DataError(
                f"{path}: {size:,} bytes are not the {tokens:,} tokens of its index, of 2 or 4 "
                "bytes each; copy both"
            )
        kind = "<u2" if size == 2 * tokens else "<u4"
        return TokenFile(path, np.memmap(path, dtype=kind, mode="r"), ends)
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read: {error.strerror}; datatrove writes .ds and "
            ".ds.index"
        ) from None


def _pieces(files: list[TokenFile], split: str, train_tokens: int) -> Pieces:
    """What belongs to a split: the first `train_tokens` of all files, or the rest."""
    pieces, left = [], train_tokens
    for path, tokens, ends in files:
        cut = min(left, len(tokens))
        left -= cut
        documents = int(np.searchsorted(ends, cut, side="right"))
        if split == "train":
            pieces.append((path, tokens[:cut], documents))
        else:
            pieces.append((path, tokens[cut:], len(ends) - documents))
    return pieces


def describe_token_files(
    data: DataSection, tokenizer: Tokenizer
) -> tuple[int | None, dict[str, SplitFacts]]:
    """End-of-text id and facts of token files. Reads all tokens, to count the bytes of their text.

    Validation takes whole documents at the end. Raises DataError for a token beyond the vocabulary.
    """
    files = open_token_files(data)
    _check_name(files[0].path, data.tokenizer)
    train_tokens = _end_of_training(files, data)
    sizes, facts = bytes_of_tokens(tokenizer), {}
    for split in SPLITS:
        pieces = _pieces(files, split, train_tokens)
        size = sum(_count_bytes(path, tokens, sizes, tokenizer) for path, tokens, _ in pieces)
        facts[split] = SplitFacts(
            sum(documents for _, _, documents in pieces),
            sum(len(tokens) for _, tokens, _ in pieces),
            max(1, size),
        )
    last, end = int(files[0].tokens[int(files[0].ends[0]) - 1]), tokenizer.end_of_text_id
    return (end if last == end else None), facts


def _end_of_training(files: list[TokenFile], data: DataSection) -> int:
    """The number of training tokens: up to the last end of a document that leaves enough for
    validation.
    """
    total = sum(len(file.tokens) for file in files)
    wanted, start, end = int(total * (1 - data.validation_fraction)), 0, 0
    for file in files:
        before = int(np.searchsorted(file.ends, min(wanted, total - 1) - start, side="right"))
        if before:
            end = start + int(file.ends[before - 1])
        start += len(file.tokens)
    if not end:
        raise DataError(
            f"data.source: {data.one_source}: no document ends within the first {wanted:,} of its "
            f"{total:,} tokens; there is too little to train on"
        )
    return end


def _count_bytes(path: Path, tokens: np.ndarray, sizes: np.ndarray, tokenizer: Tokenizer) -> int:
    total = 0
    starts = range(0, len(tokens), _AT_ONCE)
    bar = tqdm(starts, f"reading {path.name}", unit=" pieces", disable=not shows_bars())
    for start in bar:
        piece = tokens[start : start + _AT_ONCE]
        if piece.max() >= tokenizer.vocab_size:
            raise DataError(
                f"{path}: token {piece.max()} is beyond the vocabulary of "
                f"data.tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} tokens); name the "
                "tokenizer that made it"
            )
        total += int(sizes[piece].sum())
    return total


def _check_name(path: Path, tokenizer: str) -> None:
    """Warn if datatrove's metadata names another tokenizer; the ids alone cannot show it."""
    metadata = path.with_name(f"{path.name}.metadata")
    if not metadata.is_file():
        return
    name = metadata.read_text(encoding="utf-8", errors="replace").partition("|")[0]
    if name != tokenizer:
        logger.warning(
            f"{path}: made with the tokenizer {name}; data.tokenizer {tokenizer} must have the "
            "same ids"
        )


FORMATS = {
    "text": Format(
        endings=TEXT_ENDINGS,
        document=lambda row, data: text_of(row, data.text_column),
        reads_plain_text=True,
        encoder=text_encoder,
        in_threads=True,
        blocks=_token_blocks,
        line=_text_line,
    ),
    "chat": Format(
        endings=ROW_ENDINGS,
        document=lambda row, _: conversation_of(row),
        encoder=_chat_encoder,
        mask_bytes=1,
        blocks=_chat_blocks,
        line=_chat_line,
    ),
    "datatrove": Format(endings=(".ds",), blocks=_token_blocks, line=_text_line),
}
