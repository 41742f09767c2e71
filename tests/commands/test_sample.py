"""Generation (generate.py) and the `sample` command."""

import pytest
import torch

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.generate import TextStream, generate_tokens
from nanogpt_hf.model import GPTConfig, GPTForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPTForCausalLM(GPTConfig(**sizes, bos_token_id=None, eos_token_id=None))
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


def test_sample_depends_on_its_seed_and_not_on_num_samples(model):
    assert generate(model) != generate(model, seed=6)
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
    assert generate(model, max_new_tokens=21, temperature=0) == [tokens[:21]]
    # each later token comes from a context of at most n_positions
    context = [1, 2, 3, *tokens[:22]][-12:]
    with torch.no_grad():
        assert model(torch.tensor([context])).logits[0, -1].argmax().item() == tokens[22]


def test_text_stream_joins_characters_of_several_tokens():
    tokenizer = build_tokenizer("gpt2", ())
    text = "naïve 🙂 日本語 done"
    stream = TextStream(tokenizer.hf)
    pieces = [stream.add(token) for token in tokenizer.encode_batch([text])[0].tolist()]
    assert "".join(pieces) + stream.end() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "" in pieces  # some token was only a part of a character


def test_sample_continues_the_prompt(capsys, letter_model, tmp_path):
    def sample(options: str, *places) -> str:
        command = f"sample {{}} --max-new-tokens 30 {options}"
        assert main(argv(command, letter_model, *places)) == 0
        return capsys.readouterr().out

    out = sample("--prompt abc")
    assert out.startswith("abc")
    assert len(out) == 34
    assert out == sample("--prompt abc")
    assert out != sample("--prompt abc --seed 1")
    several = sample("--prompt abc --num-samples 3")
    assert several.startswith(out)
    assert "--- sample 3 of 3 ---\nabc" in several
