"""Read text to evaluate a model on: one stream of the model's tokens, and the size of the text."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.data.blocks import TokenStream
from nanogpt_hf.data.encode import encoded
from nanogpt_hf.data.files import BUILT_IN, find_files, is_url
from nanogpt_hf.data.formats import text_encoder, token_stream
from nanogpt_hf.data.manifest import MANIFEST
from nanogpt_hf.data.prepared import require_manifest
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.data.tokenizer import Tokenizer, vocabulary_hash
from nanogpt_hf.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Concatenated documents as in training: each after the tokenizer's start token, if it has
    one, and if there are several, with the end-of-text token at its end."""

    name: str
    stream: TokenStream
    documents: int
    bytes: int  # UTF-8 text
    revision: str  # the source's: sha256 of files, a Hub commit, ...


def read_corpus(
    data: DataSection, split: str | None, tokenizer: Tokenizer, scratch: Path
) -> Corpus:
    """All the text of `data.source`: a file, folder, glob, URL, built-in source, a Hub data set, or
    prepared data.

    `split` is required for a Hub data set; for prepared data it is validation by default. Raises
    DataError if there is no such text, or the model's tokenizer cannot encode it.
    """
    if is_mixture(data):
        raise DataError("--data: expected one source, got a list; evaluate each source alone")
    try:
        folder = Path(os.path.expanduser(data.one_source))
        if os.path.isdir(folder) and (folder / MANIFEST).is_file():
            corpus = _read_prepared(folder, split or "validation", tokenizer)
        else:
            corpus = _read_text(data, split, tokenizer, scratch)
    except DataError as error:
        raise DataError(
            str(error).replace("data.source:", "--data:").replace("data.text", "--data.text")
        ) from None
    if len(corpus.stream) < 2:
        raise DataError(
            f"--data: {corpus.name}: {len(corpus.stream)} tokens of text; at least two are needed"
        )
    return corpus


def _read_prepared(folder: Path, split: str, tokenizer: Tokenizer) -> Corpus:
    manifest = require_manifest(folder)
    if split not in ("train", "validation"):
        raise DataError(
            f"--data.split: prepared data has the splits train and validation, not {split!r}"
        )
    if vocabulary_hash(tokenizer.hf) != manifest.tokenizer_hash:
        raise DataError(
            f"--data: {folder}: prepared with another tokenizer than the model's; "
            "give the text itself"
        )
    facts = getattr(manifest, split)
    if facts.assistant_tokens is not None:
        raise DataError(f"--data: {folder}: conversations, which only a run evaluates; give a text")
    stream = token_stream(folder, split, manifest)
    return Corpus(f"{folder} ({split})", stream, facts.documents, facts.bytes, manifest.revision)


def _read_text(data: DataSection, split: str | None, tokenizer: Tokenizer, scratch: Path) -> Corpus:
    source = data.one_source
    if not find_files(source) and source not in BUILT_IN and not is_url(source):
        if split is None:
            raise DataError(
                f"--data: {source}: no file here; for a data set on the Hub give --data.split test"
            )
        data = replace(data, split=split)
    elif split is not None:
        raise DataError("--data.split: only a Hub data set and prepared data have splits")
    documents = load_documents(data, scratch)
    name = source if split is None else f"{source} ({split})"
    texts = list(documents.train())
    encode = text_encoder(tokenizer, tokenizer.end_of_text_id if len(texts) > 1 else None)
    rows = [rows for _, rows in encoded(texts, encode)]
    stream = TokenStream([batch.ids for batch in rows])
    count = sum(len(batch.lengths) for batch in rows)
    size = sum(int(batch.bytes.sum()) for batch in rows)
    return Corpus(name, stream, count, size, documents.revision)
