"""Generation (generate.py) and the `sample` command."""

import random

import pytest
import torch

from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import build_tokenizer, char_tokenizer
from nanogpt_hf.generate import StopText, TextStream, generate_tokens
from nanogpt_hf.model import GPTConfig, GPTForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=31,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPTForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def generate(model, prompt=(1, 2, 3), **options) -> list[list[int]]:
    """The new tokens of each sample."""
    steps = list(
        generate_tokens(model, list(prompt), **{"max_new_tokens": 15, "seed": 5} | options)
    )
    assert steps
    return [[t for t in sample if t is not None] for sample in zip(*steps, strict=True)]


def test_greedy_tokens_equal_transformers(model):
    (ours,) = generate(model, temperature=0)
    theirs = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=15, do_sample=False, pad_token_id=0
    )
    assert ours == theirs[0, 3:].tolist()


def test_seed_determines_the_sample(model):
    assert generate(model) == generate(model)
    assert generate(model) != generate(model, seed=6)


def test_sample_does_not_depend_on_num_samples(model):
    four = generate(model, num_samples=4)
    assert len({tuple(sample) for sample in four}) > 1
    for i in range(4):
        assert generate(model, seed=5 + i) == [four[i]]


def test_top_k_and_top_p_restrict_tokens(model):
    greedy = generate(model, temperature=0)
    assert generate(model, top_k=1) == greedy
    assert generate(model, top_p=1e-6) == greedy
    assert generate(model, temperature=3.0) != greedy


def test_generation_continues_beyond_n_positions(model):
    (tokens,) = generate(model, max_new_tokens=100, temperature=0)
    assert len(tokens) == 100
    shorter, longer = generate(model, max_new_tokens=21, temperature=0)[0], tokens
    assert longer[:21] == shorter
    # each later token comes from a context of at most n_positions
    context = [1, 2, 3, *tokens[:22]][-12:]
    with torch.no_grad():
        assert model(torch.tensor([context])).logits[0, -1].argmax().item() == tokens[22]


def test_long_prompt_keeps_its_end(model):
    assert generate(model, prompt=[9] * 50 + list(range(24)), max_new_tokens=1) == generate(
        model, prompt=list(range(24)), max_new_tokens=1
    )


def test_sample_ends_at_end_of_text(model):
    (tokens,) = generate(model, temperature=0)
    model.config.eos_token_id = tokens[4]
    first = tokens.index(tokens[4])
    (ended,) = generate(model, temperature=0)
    assert ended == tokens[:first]


def test_text_stream_joins_characters_of_several_tokens():
    tokenizer = build_tokenizer("gpt2", ())
    text = "naïve 🙂 日本語 done"
    stream = TextStream(tokenizer.hf)
    pieces = [stream.add(token) for token in tokenizer.encode_batch([text])[0].tolist()]
    assert "".join(pieces) + stream.end() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "" in pieces  # some token was only a part of a character


def test_stop_text_does_not_depend_on_the_pieces():
    draw = random.Random(0)
    endings = 0
    for _ in range(2000):
        stops = [
            "".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))
        ]
        text, shown, stopped = "".join(draw.choices("abc", k=12)), "", False
        ends = [end for end in range(13) if any(text[:end].endswith(stop) for stop in stops)]
        longest = max(
            (len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0
        )
        stream, rest = StopText(stops), text
        while rest and not stopped:
            size = draw.randint(1, 4)
            piece, stopped = stream.add(rest[:size])
            shown, rest = shown + piece, rest[size:]
            assert text.startswith(shown)
        shown += "" if stopped else stream.end()
        assert (shown, stopped) == ((text[: ends[0] - longest], True) if ends else (text, False))
        endings += stopped
    assert 500 < endings < 1900


def test_text_stream_decodes_a_few_tokens_at_a_time(monkeypatch):
    tokenizer, decoded = build_tokenizer("gpt2", ()), []
    decode = tokenizer.hf.decode

    def counting(ids, **options):
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer.hf, "decode", counting)
    stream, ids = (
        TextStream(tokenizer.hf),
        tokenizer.encode_batch(["A cat sat. " * 100])[0].tolist(),
    )
    assert "".join(map(stream.add, ids)) + stream.end() == "A cat sat. " * 100
    assert max(decoded) <= 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with a character tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = char_tokenizer(sorted("abcdefg \n"))
    torch.manual_seed(0)
    GPTForCausalLM(
        GPTConfig(
            vocab_size=9,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def sample(capsys, *arguments: object) -> str:
    assert main(["sample", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_sample_continues_the_prompt(capsys, folder, tmp_path):
    out = sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30)
    assert out.startswith("abc")
    assert len(out) == 34
    assert out == sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30)
    assert out != sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30, "--seed", 1)
    for prefix in (b"", b"\xef\xbb\xbf"):  # a byte order mark is dropped, as in data
        (tmp_path / "prompt.txt").write_bytes(prefix + b"abc")
        assert out == sample(
            capsys, folder, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 30
        )


def test_several_samples_are_numbered(capsys, folder):
    out = sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 5, "--num-samples", 3)
    assert out.count("abc") == 3
    assert "--- sample 3 of 3 ---" in out


def test_run_without_model_and_folder_without_model(capsys, tmp_path):
    assert main(["sample", str(tmp_path)]) == 2
    assert "not a model folder" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("")
    assert main(["sample", str(tmp_path)]) == 2
    assert "this run has no model yet" in capsys.readouterr().err
