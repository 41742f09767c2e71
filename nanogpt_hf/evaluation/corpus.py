"""Text to measure a model on, as one stream of tokens: of a source, of prepared data, or of texts
in memory.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.errors import DataError

if TYPE_CHECKING:
    from nanogpt_hf.data.blocks import TokenStream
    from nanogpt_hf.data.tokenizer import Tokenizer


class Corpus(NamedTuple):
    """Concatenated documents as in training. Each follows the tokenizer's start token, if it has
    one. If there are several, each ends with the end-of-text token.
    """

    name: str
    stream: "TokenStream"
    documents: int
    bytes: int  # UTF-8 text
    revision: str  # the source's: sha256 of files, a Hub commit, ...
    first_bytes: float = 0.0  # the bytes of the first token, which is not predicted


def read_corpus(
    data: DataSection, split: str | None, tokenizer: "Tokenizer", scratch: Path
) -> Corpus:
    """Read all the text of `data.source`: a file, folder, glob, URL, built-in source, a Hub data
    set, or prepared data.

    `split` is required for a Hub data set; for prepared data it is validation by default. Raises
    DataError if there is no such text, or the model's tokenizer cannot encode it.
    """
    from nanogpt_hf.data.manifest import MANIFEST

    folder = Path(os.path.expanduser(data.one_source))
    try:
        if os.path.isdir(folder) and (folder / MANIFEST).is_file():
            corpus = _read_prepared(folder, split or "validation", tokenizer)
        else:
            corpus = _read_text(data, split, tokenizer, scratch)
    except DataError as error:
        # The functions name knobs of a recipe; this command has options instead.
        message = str(error).replace("data.source:", "--data:")
        raise DataError(message.replace("data.text", "--data.text")) from None
    return _with_first_bytes(corpus, tokenizer, f"--data: {corpus.name}: ")


def corpus_of_texts(texts: Sequence[str], tokenizer: "Tokenizer") -> Corpus:
    """Encode texts in memory. Raises DataError if there is no token to predict."""
    return _with_first_bytes(_encoded("texts", texts, "", tokenizer), tokenizer)


def _with_first_bytes(corpus: Corpus, tokenizer: "Tokenizer", where: str = "") -> Corpus:
    """The corpus with the bytes of its first token; a start token has none.

    They are computed as a share of all bytes, since some tokenizers change the text, so that the
    bytes of their tokens do not add up to the bytes of the text. Raises DataError, which begins
    with `where`, if there is no token after the first.
    """
    from nanogpt_hf.data.hf_tokenizer import bytes_of_tokens
    from nanogpt_hf.evaluation.loss import bytes_of_stream

    tokens = len(corpus.stream)
    if tokens < 2:
        raise DataError(f"{where}{tokens} tokens of text; at least two are needed")
    sizes = bytes_of_tokens(tokenizer.hf, tokenizer.name)
    first = int(sizes[corpus.stream.chunks[0][0]])
    first_bytes = corpus.bytes * first / max(1, bytes_of_stream(corpus.stream, sizes))
    return corpus._replace(first_bytes=first_bytes)


def _read_prepared(folder: Path, split: str, tokenizer: "Tokenizer") -> Corpus:
    from nanogpt_hf.data.blocks import open_tokens
    from nanogpt_hf.data.hf_tokenizer import vocabulary_hash
    from nanogpt_hf.data.prepared import require_manifest

    manifest = require_manifest(folder)
    if split not in ("train", "validation"):
        raise DataError(
            f"--data.split: prepared data has the splits train and validation, not {split!r}"
        )
    facts = getattr(manifest, split)
    # The shards hold token ids. They mean another text to another vocabulary, and in conversations
    # most of them are no targets.
    same_tokens = vocabulary_hash(tokenizer.hf) == manifest.tokenizer_hash
    if not same_tokens or facts.assistant_tokens is not None:
        raise DataError(
            f"--data: {folder}: prepared with another tokenizer than the model's, or only a "
            "part of each document is learned, as of conversations; give the text itself"
        )
    stream = open_tokens(folder, split, manifest)
    return Corpus(f"{folder} ({split})", stream, facts.documents, facts.bytes, manifest.revision)


def _read_text(
    data: DataSection, split: str | None, tokenizer: "Tokenizer", scratch: Path
) -> Corpus:
    from nanogpt_hf.data.built_in import BUILT_IN
    from nanogpt_hf.data.local_files import find_files, is_url
    from nanogpt_hf.data.source import load_documents

    name = data.one_source
    # A data set on the Hub is split by its authors, and which split is evaluated must be stated.
    on_hub = not find_files(name) and name not in BUILT_IN and not is_url(name)
    if on_hub != (split is not None):
        raise DataError(
            f"--data.split: {name}: a data set on the Hub needs it, such as test, and a file or "
            "another text has none"
        )
    if split is not None:
        name = f"{name} ({split})"
        data = replace(data, split=split)
    documents = load_documents(data, scratch)
    return _encoded(name, documents.read(), documents.revision, tokenizer)


def _encoded(name: str, texts: Sequence[str], revision: str, tokenizer: "Tokenizer") -> Corpus:
    from nanogpt_hf.data.blocks import TokenStream
    from nanogpt_hf.data.formats import encoded
    from nanogpt_hf.data.text import text_encoder

    # As in training: the end-of-text token separates documents, so a single one needs none.
    end_of_text_id = tokenizer.end_of_text_id if len(texts) > 1 else None
    rows = []
    for _, batch in encoded(texts, text_encoder(tokenizer, end_of_text_id)):
        rows += batch
    stream = TokenStream([row.ids for row in rows])
    size = sum(row.bytes for row in rows)
    return Corpus(name, stream, len(rows), size, revision)
