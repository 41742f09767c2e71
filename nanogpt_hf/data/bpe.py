"""Train byte-level BPE merges on text, and encode text with them.

Text is split by GPT-2's or GPT-4's pattern and every byte is a token, so any text can be
encoded. The merges depend on the text alone, not on the number of threads: pairs are ordered by
how often they occur, then by their tokens.
"""

import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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


def spread_sample(texts: Iterable[str], limit: int = TRAINING_BYTES) -> list[str]:
    """All of `texts` in pieces, or pieces at equal distances if `texts` have more than `limit`
    bytes of UTF-8.

    Reads `texts` once, with at most `limit` bytes in memory. The sample has at least half of
    `limit`, and depends on nothing but the texts and their order.
    """
    sample, size, number, stride = [], 0, 0, 1
    for text in texts:
        for start in range(0, len(text), _SAMPLE_PIECE):
            if number % stride == 0:
                sample.append(text[start : start + _SAMPLE_PIECE])
                size += len(sample[-1].encode())
            while size > limit:
                sample, stride = sample[::2], 2 * stride
                size = sum(len(piece.encode()) for piece in sample)
            number += 1
    return sample


def train_merges(
    sample: list[str], count: int, pattern: BpePattern = "gpt2"
) -> list[tuple[str, str]]:
    """Merges that make `count` new tokens, the most frequent pair first; fewer if no pair occurs
    twice any more.
    """
    tokenizer = _byte_level(models.BPE(), pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=shows_bars(),
    )
    _run_interruptibly(lambda: tokenizer.train_from_iterator(sample, trainer, length=len(sample)))
    # A process that is forked from here on must not use the library's threads: they exist only in
    # this one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def byte_level_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: BpePattern
) -> Tokenizer:
    """A byte-level BPE tokenizer of the library `tokenizers`, without special tokens."""
    return _byte_level(models.BPE(vocab=vocabulary, merges=merges), pattern)


def byte_level_encoder(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: BpePattern = "gpt2"
) -> Callable[[str], np.ndarray]:
    """A function text -> ids.

    It has no special tokens, and encodes long text in pieces to save memory.
    """
    tokenizer = byte_level_tokenizer(vocabulary, merges, pattern)

    def encode(text: str) -> np.ndarray:
        encodings = (
            tokenizer.encode_batch_fast([piece])[0] for piece in split_at_words(text, ENCODE_PIECE)
        )
        return np.concatenate([np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings])

    return encode


def split_at_words(text: str, size: int) -> Iterator[str]:
    """Pieces of `size` characters or a few more, each but the first with a space in front.

    Both patterns always split before a space that follows a word, so the pieces have the tokens
    of the whole text.
    """
    start = 0
    while word_end := _WORD_END.search(text, start + size):
        yield text[start : word_end.start()]
        start = word_end.start()
    yield text[start:]


def _byte_level(model: models.BPE, pattern: BpePattern) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # splits by GPT-2's pattern
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "gpt4":
        words = pre_tokenizers.Split(Regex(GPT4_PATTERN), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _run_interruptibly(task: Callable[[], object]) -> None:
    """Run `task` in a thread: Python handles signals in the main thread only while it runs
    Python code.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            task()
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, daemon=True).start()
    if error := outcome.get():
        raise error
