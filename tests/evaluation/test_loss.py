"""Loss on blocks and on text: equal to plain PyTorch, each token once; standard errors."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation import text
from nanogpt_hf.evaluation.base import Subject
from nanogpt_hf.evaluation.loss import evaluate_blocks, evaluation_indices
from nanogpt_hf.evaluation.text import Corpus, bootstrap_error, evaluate_text
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.architecture import next_token_loss


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPTForCausalLM(
        GPTConfig(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2, dropout=0.3)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def corpus():
    tokens = np.random.default_rng(0).integers(0, 23, 301).astype(np.uint16)
    return Corpus("tokens", TokenStream([tokens[:77], tokens[77:]]), 1, 602, "none")


def blocks_of(length: int, block_size: int) -> TokenBlocks:
    return TokenBlocks(TokenStream([np.arange(length, dtype=np.uint16)]), block_size, partial=True)


def test_evaluation_indices_are_evenly_spaced():
    blocks = blocks_of(10_001, 10)
    indices = evaluation_indices(blocks, 500)
    assert (indices[0], indices[-1], len(indices)) == (0, 999, 50)
    assert set(np.diff(indices)) <= {20, 21}
    assert np.array_equal(evaluation_indices(blocks, 10**9), evaluation_indices(blocks, "all"))
    assert len(evaluation_indices(blocks, 1)) == 1


def measure_blocks(model, corpus, size):
    blocks = TokenBlocks(corpus.stream, 16, partial=True)
    options = {"micro_batch_size": size, "tokens": "all", "bytes_per_token": 2.0}
    return evaluate_blocks(Accelerator(), Mesh(), model, next_token_loss, blocks, **options)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_evaluate_blocks_is_the_mean_over_tokens_for_any_batch_size(
    model, corpus, micro_batch_size
):
    model.train()
    result = measure_blocks(model, corpus, micro_batch_size)
    assert model.training
    model.eval()
    total, ids = 0.0, torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    with torch.no_grad():
        for start in range(0, 300, 16):  # the last block has 12 targets and must count as 12
            window = ids[start : start + 17]
            logits = model(window[None, :-1]).logits[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").double().item()
    assert result.tokens == 300
    assert result.loss == pytest.approx(total / 300, abs=1e-6)


def subject(model, batch_size=4) -> Subject:
    return Subject("model", model, None, Accelerator(), Mesh(), batch_size)


@pytest.mark.parametrize(
    ("block_size", "stride", "batch_size"),
    [(16, 16, 4), (16, 5, 64), pytest.param(16, 1, 7, marks=pytest.mark.slow), (9, 4, 1)],
)
def test_evaluate_text_equals_transformers_token_by_token(
    tmp_path, model, corpus, block_size, stride, batch_size
):
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    nats, first = [], 0
    for target in range(1, len(ids)):
        while target - first > block_size:  # a later window predicts this token
            first += stride
        with torch.no_grad():
            logits = reference(ids[None, first:target]).logits[0, -1]
        nats.append(F.cross_entropy(logits.double(), ids[target]).item())
    model.train()
    result, _, _ = evaluate_text(subject(model, batch_size), corpus, block_size, stride)
    assert model.training
    assert result.tokens == 300
    assert result.loss == pytest.approx(np.mean(nats), abs=1e-6)
    assert result.bits_per_byte == pytest.approx(np.mean(nats) / math.log(2) * 301 / 602, rel=1e-6)
    if stride == block_size:
        assert result.loss == pytest.approx(measure_blocks(model, corpus, 3).loss, abs=1e-6)


def test_bootstrap_error_equals_the_formula():
    draw = np.random.default_rng(1)
    nats, counts = draw.normal(100, 20, 400), np.full(400, 10)
    expected = nats.std(ddof=1) / math.sqrt(400) / 10
    assert bootstrap_error(nats, counts) == pytest.approx(expected, rel=0.1)
    # each value repeated four times holds no more information: blocks of four show that
    assert bootstrap_error(nats.repeat(4), counts.repeat(4), windows_at_once=4) == pytest.approx(
        expected, rel=0.1
    )
    assert bootstrap_error(nats.repeat(4), counts.repeat(4)) < 0.6 * expected


def test_figures_of_too_little_text_have_no_error(model):
    corpus = Corpus("few", TokenStream([np.arange(5, dtype=np.uint16)]), 1, 5, "none")
    *_, result = text._measure(corpus, 16, 16, {}, subject(model))
    figures = result.figures["text"]
    assert figures["loss"] > 0
    assert figures["loss_standard_error"] is None
    assert figures["tokens_predicted"] == 4
