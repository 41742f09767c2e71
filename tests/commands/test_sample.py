"""Sampling as a user does it, and the generation underneath."""

import pytest
import torch

from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import build_tokenizer, char_tokenizer
from nanogpt_hf.generate import TextStream, generate_tokens
from nanogpt_hf.model import GPTConfig, GPTForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=31, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = GPTForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def written(model, prompt=(1, 2, 3), **options) -> list[list[int]]:
    """The new tokens, sample by sample."""
    steps = list(generate_tokens(model, list(prompt), **{"max_new_tokens": 15, "seed": 5} | options))
    assert steps
    return [[t for t in sample if t is not None] for sample in zip(*steps, strict=True)]


def test_greedy_tokens_are_those_of_transformers_generate(model):
    (ours,) = written(model, temperature=0)
    theirs = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=15, do_sample=False, pad_token_id=0)
    assert ours == theirs[0, 3:].tolist()


def test_the_same_seed_writes_the_same_and_another_something_else(model):
    assert written(model) == written(model)
    assert written(model) != written(model, seed=6)


def test_a_sample_is_the_same_however_many_are_drawn_beside_it(model):
    four = written(model, num_samples=4)
    assert len({tuple(sample) for sample in four}) > 1
    for i in range(4):
        assert written(model, seed=5 + i) == [four[i]]


def test_top_k_and_top_p_leave_the_unlikely_out(model):
    greedy = written(model, temperature=0)
    assert written(model, top_k=1) == greedy
    assert written(model, top_p=1e-6) == greedy
    assert written(model, temperature=3.0) != greedy


def test_writing_goes_on_past_the_models_positions(model):
    (tokens,) = written(model, max_new_tokens=100, temperature=0)
    assert len(tokens) == 100
    inside, everything = written(model, max_new_tokens=21, temperature=0)[0], tokens
    assert everything[:21] == inside
    # each later token comes from a context of the model's own length at most
    context = [1, 2, 3, *tokens[:22]][-12:]
    with torch.no_grad():
        assert model(torch.tensor([context])).logits[0, -1].argmax().item() == tokens[22]


def test_a_prompt_longer_than_the_models_positions_keeps_its_end(model):
    assert written(model, prompt=[9] * 50 + list(range(24)), max_new_tokens=1) == written(
        model, prompt=list(range(24)), max_new_tokens=1
    )


def test_a_sample_ends_at_the_end_of_text_token(model):
    (tokens,) = written(model, temperature=0)
    model.config.eos_token_id = tokens[4]
    first = tokens.index(tokens[4])
    (ended,) = written(model, temperature=0)
    assert ended == tokens[:first]


def test_characters_that_are_spread_over_tokens_come_out_whole():
    tokenizer = build_tokenizer("gpt2", ())
    text = "naïve 🙂 日本語 done"
    stream = TextStream(tokenizer.hf)
    pieces = [stream.add(token) for token in tokenizer.encode_batch([text])[0].tolist()]
    assert "".join(pieces) + stream.end() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "" in pieces  # some token was only a part of a character


def test_text_stream_decodes_a_few_tokens_at_a_time(monkeypatch):
    tokenizer, decoded = build_tokenizer("gpt2", ()), []
    decode = tokenizer.hf.decode

    def counting(ids, **options):
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer.hf, "decode", counting)
    stream, ids = TextStream(tokenizer.hf), tokenizer.encode_batch(["A cat sat. " * 100])[0].tolist()
    assert "".join(map(stream.add, ids)) + stream.end() == "A cat sat. " * 100
    assert max(decoded) <= 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with a character tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = char_tokenizer(sorted("abcdefg \n"))
    torch.manual_seed(0)
    GPTForCausalLM(
        GPTConfig(vocab_size=9, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    ).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def sample(capsys, *arguments: object) -> str:
    assert main(["sample", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_command_writes_on_from_the_prompt(capsys, folder, tmp_path):
    out = sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30)
    assert out.startswith("abc")
    assert len(out) == 34
    assert out == sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30)
    assert out != sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30, "--seed", 1)
    for mark in (b"", b"\xef\xbb\xbf"):  # a byte order mark is no text, as in data
        (tmp_path / "prompt.txt").write_bytes(mark + b"abc")
        assert out == sample(capsys, folder, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 30)


def test_several_samples_are_told_apart(capsys, folder):
    out = sample(capsys, folder, "--prompt", "abc", "--max-new-tokens", 5, "--num-samples", 3)
    assert out.count("abc") == 3
    assert "--- sample 3 of 3 ---" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "abcX"], "the tokenizer knows no 'X'"),
        (["--prompt", ""], "the prompt must not be empty"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file: nowhere.txt cannot be read"),
    ],
)
def test_mistakes_are_one_clear_line(capsys, folder, arguments, message):
    assert main(["sample", str(folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_run_without_a_model_yet_and_a_folder_without_any(capsys, tmp_path):
    assert main(["sample", str(tmp_path)]) == 2
    assert "not a model folder" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("")
    assert main(["sample", str(tmp_path)]) == 2
    assert "this run has no model yet" in capsys.readouterr().err
