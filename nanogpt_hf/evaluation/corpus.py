"""Text to measure a model on -> one stream of the model's own tokens, and how much text that is."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.manifest import MANIFEST, read_manifest
from nanogpt_hf.data.prepare import open_tokens
from nanogpt_hf.data.source import PYTHON_DOCS, find_files, is_url, load_documents
from nanogpt_hf.data.tokenizer import Tokenizer, vocabulary_hash
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.errors import DataError

_TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class Corpus:
    """Documents one after another, as in training: each ended by the end-of-text token where there are several."""

    name: str
    stream: TokenStream
    documents: int
    bytes: int  # of UTF-8 text
    revision: str  # of the source: sha256 of files, a Hub commit, ...


def read_corpus(data: DataSection, split: str | None, tokenizer: Tokenizer, scratch: Path) -> Corpus:
    """All the text of `data.source`: a file, folder, glob, URL, python-docs, a Hub data set, or prepared data.

    `split` is one of a Hub data set, which must be named, or of prepared data (left out: validation). Raises DataError
    where there is no such text, or the model's tokenizer cannot express it.
    """
    try:
        folder = Path(os.path.expanduser(data.source))
        if os.path.isdir(folder) and (folder / MANIFEST).is_file():
            corpus = _read_prepared(folder, split or "validation", tokenizer)
        else:
            corpus = _read_text(data, split, tokenizer, scratch)
    except DataError as error:
        raise DataError(str(error).replace("data.source:", "--data:").replace("data.text", "--data.text")) from None
    if len(corpus.stream) < 2:
        raise DataError(f"--data: {corpus.name}: {len(corpus.stream)} tokens of text; two are the least to predict one")
    return corpus


def _read_prepared(folder: Path, split: str, tokenizer: Tokenizer) -> Corpus:
    manifest = read_manifest(folder)
    if split not in ("train", "validation"):
        raise DataError(f"--data.split: prepared data has the splits train and validation, not {split!r}")
    if vocabulary_hash(tokenizer.hf) != manifest.tokenizer_hash:
        raise DataError(f"--data: {folder}: made by another tokenizer than the model's; give the text itself")
    facts = getattr(manifest, split)
    if facts.answered is not None:
        raise DataError(f"--data: {folder}: conversations, whose answers a run measures as it trains; give a text")
    stream = open_tokens(folder, split, manifest)
    return Corpus(f"{folder} ({split})", stream, facts.documents, facts.bytes, manifest.revision)


def _read_text(data: DataSection, split: str | None, tokenizer: Tokenizer, scratch: Path) -> Corpus:
    if not find_files(data.source) and data.source != PYTHON_DOCS and not is_url(data.source):
        if split is None:
            raise DataError(f"--data: {data.source}: no file here; of a data set on the Hub, say --data.split test")
        data = replace(data, split=split)
    elif split is not None:
        raise DataError("--data.split: only a Hub data set and prepared data have splits")
    documents = load_documents(data, scratch)
    name = data.source if split is None else f"{data.source} ({split})"
    return corpus_of(documents.train["text"], tokenizer, name, documents.revision)


def corpus_of(texts: Sequence[str | None], tokenizer: Tokenizer, name: str, revision: str) -> Corpus:
    """Texts, each a document, as one stream. Raises DataError where the tokenizer has no token for a character."""
    end_of_text_id = tokenizer.hf.eos_token_id if len(texts) > 1 else None  # a lone document has no neighbour
    ending = [] if end_of_text_id is None else [end_of_text_id]
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    chunks, count, size = [], 0, 0
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = [text for text in texts[first : first + _TEXTS_AT_ONCE] if text]  # a Hub data set has empty rows
        for ids in tokenizer.encode_batch(batch) if batch else []:
            chunks.append(np.concatenate((ids, ending), dtype=kind, casting="unsafe"))
        count += len(batch)
        size += sum(len(text.encode()) for text in batch)
    return Corpus(name, TokenStream(chunks), count, size, revision)
