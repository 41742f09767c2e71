"""Train byte-level BPE merges on text, and split text for them.

Text is split by GPT-2's or GPT-4's pattern, and every byte is a token, so any text can be encoded.
The merges depend on the text alone, not on the number of threads: pairs are ordered by how often
they occur, then by their tokens.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Literal

import tokenizers
from tiktoken_ext.openai_public import ENDOFTEXT
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import shows_bars

BpePattern = Literal["gpt2", "gpt4"]
_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# OpenAI's cl100k_base as Llama 3 and DBRX write it for this library; Qwen's has single digits.
GPT4_PATTERN = _BEFORE_DIGITS + r"\p{N}{1,3}" + _AFTER_DIGITS
QWEN_PATTERN = _BEFORE_DIGITS + r"\p{N}" + _AFTER_DIGITS

TRAINING_BYTES = 100_000_000  # text that merges are trained on
_SAMPLE_PIECE = 4096  # characters
ENCODE_PIECE = 2**16  # characters; while they are encoded a token takes about 100 bytes
_WORD_END = re.compile(r"(?<=\S) ")


def train_merges(
    texts: Iterable[str], vocab_size: int, pattern: BpePattern
) -> tuple[list[tuple[str, str]], list[str]]:
    """Merges of byte-level BPE trained on `texts`, and the names of the `vocab_size` tokens: bytes,
    merges, end-of-text. Raises DataError if the texts support fewer tokens.
    """
    rust = byte_level(models.BPE(), pattern)
    sample = spread_sample(texts)
    # A pair that occurs once says nothing about other text: at least two are asked for.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without end-of-text
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=shows_bars(),
    )
    # In a thread: Python handles signals in the main thread only while it runs Python code. A
    # signal that comes just before a wait does not end it, so each is short.
    with ThreadPool(1) as pool:
        training = pool.apply_async(rust.train_from_iterator, (sample, trainer, len(sample)))
        while not training.ready():
            training.wait(0.1)
        training.get()
    # A process that is forked from here on must not use the library's threads: they exist only in
    # this one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    merges = [tuple(pair) for pair in json.loads(rust.to_str())["model"]["merges"]]
    # Two merges may make the same token, for example of a row of dashes.
    names = list(
        dict.fromkeys(
            [*printable_bytes(), *(first + second for first, second in merges), ENDOFTEXT]
        )
    )
    if len(names) < vocab_size:
        raise DataError(
            f"data.vocab_size: {vocab_size:,} is more than the training text supports: training "
            f"ended at {len(names):,} tokens, when no pair of them occurred twice; use at most "
            f"{len(names):,}, or more text"
        )
    return merges, names


def spread_sample(texts: Iterable[str], limit: int = TRAINING_BYTES) -> list[str]:
    """All of `texts` in pieces, or pieces at equal distances if `texts` have more than `limit`
    bytes of UTF-8.

    Reads `texts` once, with at most `limit` bytes in memory. The sample has at least half of
    `limit`, and depends on nothing but the texts and their order.
    """
    sample: list[str] = []
    # Bytes of the sample.
    size = 0
    # The number of the next piece, counted over all texts.
    number = 0
    # Every stride-th piece is in the sample.
    stride = 1
    for text in texts:
        for start in range(0, len(text), _SAMPLE_PIECE):
            # With stride 1, until the limit is reached, the sample is all of the texts.
            if number % stride == 0:
                sample.append(text[start : start + _SAMPLE_PIECE])
                size += len(sample[-1].encode())
            # Too much: drop every second piece, and take half as many from here on. The pieces
            # that are left are those with a number that the new stride divides.
            while size > limit:
                sample = sample[::2]
                stride *= 2
                size = sum(len(piece.encode()) for piece in sample)
            number += 1
    return sample


def split_at_words(text: str, size: int) -> Iterator[str]:
    """Pieces of `size` characters or a few more, each but the first with a space in front.

    Both patterns always split before a space that follows a word, so the pieces have the tokens
    of the whole text.
    """
    # The last piece is what remains after the last such space.
    start = 0
    while word_end := _WORD_END.search(text, start + size):
        yield text[start : word_end.start()]
        start = word_end.start()
    yield text[start:]


def byte_level(model: models.BPE, pattern: BpePattern) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    # This splits by GPT-2's pattern, and names bytes by printable characters.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "gpt4":
        words = pre_tokenizers.Split(Regex(GPT4_PATTERN), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def printable_bytes() -> dict[str, int]:
    """GPT-2's names for single bytes, in the order of their ids: the printable ones stand for
    themselves, and the others are moved up from U+0100 on.
    """
    return {character: byte for byte, character in bytes_to_unicode().items()}
