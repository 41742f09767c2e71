"""BPE trained on the text: deterministic, exact, bounded; too small a text is refused in one
line.
"""

import os
import random
import re
import signal
import threading

import numpy as np
import pytest
import regex
import transformers
from tokenizers import Regex, pre_tokenizers

from assertions import refusal
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.data import bpe
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import encode_ordinary, train_bpe_tokenizer
from nanogpt_hf.errors import DataError

END = "<|endoftext|>"


def random_text(seed: int, size: int) -> str:
    """Words, numbers, punctuation, all kinds of white space, and characters of many scripts."""
    draw = random.Random(seed)
    vocabulary = [
        "the",
        " cat",
        " sat's",
        " 1,234",
        "  ",
        " \u00a0 ",
        "日本語",
        " 😀",
        END,
        "-----",
    ]
    vocabulary += [
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\x1c",
        "\x85",
        "\u2028",
        "\u3000",
        "\u180e",
        "\u200b",
    ]
    scripts = (
        draw.choice((draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))) for _ in range(50)
    )
    return "".join(draw.choices([*vocabulary, *map(chr, scripts)], k=size))


TEXTS = [random_text(seed, 200) for seed in range(40)]


@pytest.fixture(scope="module", params=["gpt2", "gpt4"])
def pattern(request):
    return request.param


@pytest.fixture(scope="module")
def trained(pattern):
    return train_bpe_tokenizer(TEXTS, 500, pattern)


def make(source, folder, **knobs) -> Config:
    defaults = {"tokenizer": "bpe", "vocab_size": 300, "validation_fraction": 0.1, "block_size": 8}
    return Config(data=DataSection(source=str(source), dir=str(folder), **(defaults | knobs)))


def test_bpe_ids_are_bytes_then_merges_then_end_of_text(trained):
    names = trained.hf.convert_ids_to_tokens(list(range(500)))
    assert (trained.vocab_size, len(set(names))) == (500, 500)
    assert names[:4] == ["!", '"', "#", "$"], "the order of GPT-2's bytes"
    assert {len(name) for name in names[:256]} == {1} != {len(name) for name in names[256:499]}
    assert (names[499], trained.hf.eos_token, trained.hf.eos_token_id) == (END, END, 499)


def test_bpe_ids_equal_saved_tokenizer_and_decode_to_text(trained, tmp_path):
    trained.hf.save_pretrained(tmp_path)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        *(random_text(seed, 30) for seed in range(1000, 1500)),
        "",
        " ",
        END,
        "a" * 5000,
        " " * 3000,
    ]
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert encode_ordinary(opened, text) == ids.tolist(), repr(text)
        assert opened.decode(ids, clean_up_tokenization_spaces=False) == text
        assert 499 not in ids, "text never becomes a special token"


def test_bpe_encodes_long_text_in_pieces_exactly(trained, monkeypatch):
    monkeypatch.setattr(bpe, "ENCODE_PIECE", 3)
    for text in TEXTS:
        pieces = list(bpe.split_at_words(text, 3))
        assert "".join(pieces) == text
        assert len(pieces) > 5
        assert trained.encode_batch([text])[0].tolist() == encode_ordinary(trained.hf, text)


def test_bpe_merges_do_not_depend_on_threads(trained, pattern, monkeypatch):
    for parallel in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        repeated = train_bpe_tokenizer(iter(TEXTS), 500, pattern)
        assert repeated.hf.backend_tokenizer.to_str() == trained.hf.backend_tokenizer.to_str()


def test_gpt4_pattern_splits_as_tiktoken_writes_it():
    # cl100k_base in tiktoken 0.5's openai_public.py
    published = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(bpe.GPT4_PATTERN), behavior="isolated")
    for text in [*TEXTS, "12345 I'LL 'Tis\n\n  x!!\n\n", "  \n \n  a  "]:
        # of other kinds in another version of Unicode
        text = regex.sub("[\x1c\x85\U00010000-\U0010ffff]", "", text)
        assert [word for word, _ in split.pre_tokenize_str(text)] == regex.findall(published, text)


def test_bpe_uses_only_the_training_split(tmp_path):
    source = tmp_path / "input.txt"
    source.write_text("hello world " * 900 + "zebra crossing " * 80)
    names = load_after_prepare(make(source, tmp_path / "data", vocab_size=267)).get_vocab()
    assert "Ġworld" in names
    assert not any("z" in name and len(name) > 1 for name in names)


def load_after_prepare(config):
    prepare(config)
    return load_prepared(config).tokenizer


def test_bpe_vocabulary_decides_the_tokens(tmp_path):
    source = tmp_path / "input.txt"
    source.write_text(TEXTS[0])
    prepare(make(source, tmp_path / "data"))
    with pytest.raises(DataError, match=r"data\.vocab_size 300, .* 301"):
        prepare(make(source, tmp_path / "data", vocab_size=301))


def test_bpe_of_conversations_has_the_tokens_of_their_messages(chat_file, tmp_path):
    config = make(chat_file, tmp_path / "data", format="chat", block_size=64)
    tokenizer = load_after_prepare(config)
    assert {"red", "Ġgreen"} & tokenizer.get_vocab().keys()
    assert tokenizer.chat_template


def test_vocab_size_beyond_the_text_names_the_largest():
    text = "the cat sat on the mat " * 30
    message = refusal(train_bpe_tokenizer, [text], 9000)
    assert message.startswith("data.vocab_size: 9,000 ")
    limit_of_text = int(re.findall(r"\d+", message)[-1])
    assert train_bpe_tokenizer([text], limit_of_text).vocab_size == limit_of_text
    assert "data.vocab_size: " in refusal(train_bpe_tokenizer, [text], limit_of_text + 1)


# --- the sample that merges are trained on
# ---------------------------------------------------------------------------


def test_spread_sample_keeps_all_of_a_short_text():
    texts = ["", "a" * 10_000, "é" * 5, ""]
    assert "".join(bpe.spread_sample(iter(texts), 10_010)) == "".join(texts)


@pytest.mark.parametrize(
    "lengths",
    [[3_000_000], [10] * 10_000, [50_000, 3, 0, 200_000] * 4],
    ids=["one", "many", "mixed"],
)
def test_spread_sample_is_bounded_and_covers_the_whole_text(lengths):
    numbers = iter(range(10**9))
    texts = [
        "".join(f"{next(numbers):08}," for _ in range(length // 9 + 1))[:length]
        for length in lengths
    ]
    limit = sum(lengths) // 7
    sample = bpe.spread_sample(iter(texts), limit)
    assert limit / 2 - 4096 <= sum(map(len, sample)) <= limit
    assert sample == bpe.spread_sample(texts, limit)
    joined = "".join(texts)
    places = [joined.index(piece) / len(joined) for piece in sample if len(piece) >= 10]
    assert places == sorted(places)
    gaps = np.diff([0, *places, 1])
    assert max(gaps) < 0.2, "no part of the text is left out"


# --- interruption
# ------------------------------------------------------------------------------


def test_bpe_training_stops_at_a_signal():
    stop = threading.Event()
    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def train() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            bpe._run_interruptibly(train)
    finally:
        stop.set()
        signal.signal(signal.SIGINT, before)
