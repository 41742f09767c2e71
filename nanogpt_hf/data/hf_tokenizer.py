"""Hugging Face tokenizers: load and save them, encode text, and find their special tokens, the size
of their vocabulary and the bytes of their tokens.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import PreTrainedTokenizerBase

from nanogpt_hf.config.names import CHARACTER_TOKENIZERS, folder_or_hub_id, vocab_size_by_name
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.bpe import printable_bytes
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.errors import DataError, UserError, one_line
from nanogpt_hf.program import program


def end_of_text_id_of(hf: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the end-of-text token, or None."""
    end: Any = hf.eos_token_id
    return None if end is None else int(end)


def start_of_text_id_of(hf: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that the tokenizer itself puts before every text, as Llama's does,
    or None.
    """
    if hf.bos_token_id is None:
        return None
    ids: Any = hf("", verbose=False)["input_ids"]
    return int(ids[0]) if ids and ids[0] == hf.bos_token_id else None


def vocabulary_hash(hf: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the vocabulary: tokens with their ids."""
    return hashlib.sha256(json.dumps(sorted(hf.get_vocab().items())).encode()).hexdigest()


@contextlib.contextmanager
def unknown_characters_named(hf: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[None]:
    """Context for encoding `texts`: raise DataError that names the characters without a token."""
    try:
        yield
    except DataError:  # has its reason already
        raise
    except Exception as error:  # the Rust library raises plain Exception for an unknown character
        # A tokenizer without byte tokens, such as `char`, has no token for other characters.
        unknown = sorted(set[str]().union(*texts) - hf.get_vocab().keys())
        if not unknown:
            if type(error) is Exception:
                raise DataError(f"the tokenizer fails: {one_line(error)}") from None
            raise
        raise DataError(
            f"the tokenizer knows no {' '.join(map(repr, unknown[:8]))}; leave it out of the text, "
            f"or train a model with a token for each byte: `{program()} pretrain quickstart "
            "--data.source FILE`"
        ) from None


def encode_texts(hf: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text without special tokens, neither added nor from the text.

    Raises DataError if the tokenizer has no token for a character.
    """
    with unknown_characters_named(hf, texts):
        return hf(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]


def encode_ordinary(hf: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of one text, as by `encode_texts`."""
    return encode_texts(hf, [text])[0]


def prompt_ids(hf: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text to continue: as by `encode_ordinary`, after the start token if the tokenizer
    itself adds one.

    Raises ValueError for an empty text if there is no start token.
    """
    # As documents are encoded for training: a model expects the start token it was trained with.
    start = start_of_text_id_of(hf)
    ids = [*([] if start is None else [start]), *encode_ordinary(hf, text)]
    if not ids and not isinstance(hf.bos_token_id, int):
        raise ValueError(
            "this model's tokenizer has no start token, so the prompt must not be empty"
        )
    # An empty prompt begins with the start token, even if the tokenizer does not add it itself.
    return ids or [hf.bos_token_id]  # pyright: ignore[reportReturnType]


def load_tokenizer(name: str | Path, knob: str = "") -> PreTrainedTokenizerBase:
    """A Hugging Face tokenizer from a folder or the Hub. Raises DataError if there is none, which
    names the knob that states it.
    """
    stated = f"{knob}: " if knob else ""
    try:
        name = folder_or_hub_id(str(name))
    except UserError as error:
        raise DataError(f"{stated}{error}") from None
    # A name may be a folder or an id on the Hub, and the message says which one was tried.
    where = "in that folder" if Path(name).is_dir() else "here or on the Hub"
    try:
        hf = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # missing, damaged, of an unknown kind: the Rust library raises plain Exception
        reason = str(error).strip().partition("\n")[0]
        if "trust_remote_code" in str(error):  # the library's text says how to run that code
            reason = (
                "it needs Python code that comes with it, and code of a model is never run here"
            )
        raise DataError(f"{stated}{name}: no Hugging Face tokenizer {where}: {reason}") from None
    # From a model's config.json alone, transformers makes a tokenizer that turns every text into
    # nothing.
    if not hf.get_vocab().keys() - set(hf.all_special_tokens):
        raise DataError(f"{stated}{name}: no Hugging Face tokenizer {where}: it has no vocabulary")
    return hf


def known_vocab_size(data: DataSection, manifest: Manifest | None) -> tuple[int, str]:
    """Return the tokens of the vocabulary before and after `prepare`, and how that is known.

    Raises DataError if the recipe's tokenizer cannot be loaded.
    """
    if manifest:
        return manifest.vocab_size, "of the prepared data"
    # Before the data is prepared, the name alone has to tell.
    by_name = vocab_size_by_name(data.tokenizer, data.vocab_size)
    return by_name or (
        len(load_tokenizer(data.tokenizer, "data.tokenizer")),
        f"of {data.tokenizer}",
    )


def check_vocabulary(name: str, tokens: int, rows: int) -> None:
    """Raises UserError if the tokenizer has more tokens than the model has rows in its
    embedding.
    """
    if tokens > rows:
        raise UserError(f"{name}: its tokenizer has {tokens} tokens, its model only {rows}")


def save_tokenizer(hf: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face tokenizer. Raises OSError if it cannot be written."""
    try:
        hf.save_pretrained(folder)
    except Exception as error:
        # The Rust library raises plain Exception, such as "Permission denied (os error 13)". A full
        # disk has to be known as one, so the number is read from the text.
        if type(error) is Exception and (number := re.search(r"\(os error (\d+)\)$", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from None
        raise


def bytes_of_tokens(hf: PreTrainedTokenizerBase, name: str) -> np.ndarray:
    """Bytes of text per token of the tokenizer `name`, by id; 0 for special tokens.

    In names of byte-level tokens a letter is a byte. Others are text, with U+2581 for a space
    and <0x0A> for a byte.
    """
    names = hf.convert_ids_to_tokens(list(range(len(hf))))
    special = set(hf.all_special_tokens)
    letters = printable_bytes().keys()
    # Special tokens are written by no text, so they have no bytes.
    plain = [token for token in names if token is not None and token not in special]
    if name not in CHARACTER_TOKENIZERS and all(letters >= set(token) for token in plain):
        sizes = {token: len(token) for token in plain}
    else:
        sizes = {
            token: 1
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token)
            else len(token.replace("\u2581", " ").encode())
            for token in plain
        }
    return np.array([sizes.get(token, 0) for token in names])
