"""Format `text`: each document is a text, and every token is a target."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanogpt_hf.config.names import ANY_OFFSET
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks, TokenBlocks, TokenStream, open_tokens
from nanogpt_hf.data.examples import DocumentBlocks, document_starts, read_from_end, row_lengths
from nanogpt_hf.data.formats import Encode, Format
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.data.rows import TEXT_ENDINGS, text_of
from nanogpt_hf.data.shards import Row, token_dtype
from nanogpt_hf.data.tokenizer import Tokenizer
from nanogpt_hf.errors import DataError


def text_encoder(tokenizer: Tokenizer, end_of_text_id: int | None) -> Encode:
    """Encode texts, each after the token that the tokenizer itself puts there, if any."""
    kind = token_dtype(tokenizer.vocab_size)
    # No token, or one, on each side of a text.
    start = [] if tokenizer.start_of_text_id is None else [tokenizer.start_of_text_id]
    end = [] if end_of_text_id is None else [end_of_text_id]
    # The first call sets options of the library, which threads must not do at the same time.
    tokenizer.encode_batch([""])

    def encode(texts: list[str | None], first: int) -> list[Row]:
        # Empty rows of a Hub data set have a number, so that which documents are held out does not
        # depend on them, but no tokens.
        kept = {number: text for number, text in enumerate(texts, first) if text}
        rows = []
        encoded = tokenizer.encode_batch([*kept.values()]) if kept else []
        for (number, text), ids in zip(kept.items(), encoded, strict=True):
            # A larger id would wrap around in the dtype of the shards.
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"data.tokenizer: {tokenizer.name} gave id {ids.max()}, beyond its own "
                    "vocabulary"
                )
            ids = np.concatenate((start, ids, end), dtype=kind, casting="unsafe")
            rows.append(Row(number, ids, len(text.encode())))
        return rows

    return encode


def text_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Blocks:
    """Return the blocks of a split: documents end to end, or rows that begin with a document."""
    stream = open_tokens(folder, split, manifest)
    apart = data.mask == "documents"
    if data.packing == "documents":
        return DocumentBlocks(
            stream,
            row_lengths(folder / split),
            block_size=data.block_size,
            from_end=read_from_end(manifest),
            apart=apart,
        )
    # Where documents begin is needed, and read, only to keep them apart.
    starts = None
    if apart:
        starts = document_starts(row_lengths(folder / split), read_from_end(manifest))
    return end_to_end(stream, split, data, starts)


def end_to_end(
    stream: TokenStream, split: str, data: DataSection, starts: np.ndarray | None = None
) -> TokenBlocks:
    """Blocks of a stream of documents end to end; `starts` keeps the documents apart.

    Blocks at any offset are for training alone: validation predicts every token once.
    """
    stride = 1 if data.order in ANY_OFFSET and split == "train" else None
    partial = split == "validation"
    return TokenBlocks(stream, data.block_size, stride=stride, partial=partial, starts=starts)


def _cut(text: str | None, validation_fraction: float) -> tuple[str, str]:
    text = text or ""
    end = int(len(text) * (1 - validation_fraction))
    return text[:end], text[end:]


def _texts(text: str | None) -> Iterator[str]:
    yield text or ""


FORMAT = Format(
    endings=TEXT_ENDINGS,
    document=lambda row, data: text_of(row, data.text_column),
    texts=_texts,
    encoder=text_encoder,
    blocks=text_blocks,
    reads_plain_text=True,
    in_threads=True,
    starts_documents=True,
    cut=_cut,
)
