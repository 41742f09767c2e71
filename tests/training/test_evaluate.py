"""Evaluation: which tokens count, and that the number is the plain mean over them."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs.state import Evaluation
from nanogpt_hf.training.evaluate import evaluate, evaluation_indices
from nanogpt_hf.training.objective import next_token_loss


def blocks(length: int, block_size: int) -> TokenBlocks:
    return TokenBlocks(TokenStream([np.arange(length, dtype=np.uint16)]), block_size, partial=True)


@pytest.mark.parametrize("length", [2, 16, 17, 18, 100, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_all_predicts_every_token_but_the_first_exactly_once(length, block_size):
    some = blocks(length, block_size)
    targets = some.batch(evaluation_indices(some, "all"))["shift_labels"].flatten()
    assert targets[targets != -100].tolist() == list(range(1, length))


def test_fewer_tokens_are_spread_over_the_stream():
    some = blocks(10_001, 10)
    indices = evaluation_indices(some, 500)
    assert len(set(indices)) == len(indices) == 50
    assert (indices[0], indices[-1]) == (0, 999)
    gaps = np.diff(indices)
    assert gaps.max() - gaps.min() <= 1
    assert np.array_equal(evaluation_indices(some, 10**9), evaluation_indices(some, "all"))
    assert len(evaluation_indices(some, 1)) == 1


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPTForCausalLM(GPTConfig(vocab_size=23, n_positions=16, n_embd=16, n_layer=1, n_head=2, dropout=0.5))


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_loss_is_the_token_weighted_mean_whatever_the_batches(model, micro_batch_size):
    tokens = np.random.default_rng(0).integers(0, 23, 501).astype(np.uint16)
    # windows of 16 from 501 tokens: the last one predicts 4 only, and must count as 4
    model.train()
    result = evaluate(
        Accelerator(),
        Mesh(),
        model,
        next_token_loss,
        TokenBlocks(TokenStream([tokens[:200], tokens[200:]]), 16, partial=True),
        micro_batch_size=micro_batch_size,
        tokens="all",
        bytes_per_token=2.0,
    )
    assert model.training
    model.eval()
    total = 0.0
    flat = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for start in range(0, 500, 16):
            window = flat[start : start + 17]
            logits = model(window[None, :-1]).logits[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").double().item()
    assert result.tokens == 500
    assert result.loss == pytest.approx(total / 500, abs=1e-6)


def test_perplexity_and_bits_per_byte():
    result = Evaluation(loss=math.log(8), tokens=10, bytes_per_token=4.0)
    assert result.perplexity == pytest.approx(8)
    assert result.bits_per_byte == pytest.approx(3 / 4)
