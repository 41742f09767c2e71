"""Loss on text: equal to a few bare lines with transformers, every token once, an error that can be trusted."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation.corpus import Corpus
from nanogpt_hf.evaluation.text import bootstrap_error, evaluate_text
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.training.evaluate import evaluate
from nanogpt_hf.training.objective import next_token_loss


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2, dropout=0.3))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def corpus():
    tokens = np.random.default_rng(0).integers(0, 23, 301).astype(np.uint16)
    return Corpus("tokens", TokenStream([tokens[:77], tokens[77:]]), 1, 602, "none")


def measure(model, corpus, **options):
    return evaluate_text(
        Accelerator(), Mesh(), model, corpus, **{"block_size": 16, "stride": 16, "batch_size": 4} | options
    )


@pytest.mark.parametrize(("block_size", "stride", "batch_size"), [(16, 16, 4), (16, 5, 64), (16, 1, 7), (9, 4, 1)])
def test_loss_is_that_of_transformers_model_token_by_token(tmp_path, model, corpus, block_size, stride, batch_size):
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    nats, first = [], 0
    for target in range(1, len(ids)):
        while target - first > block_size:  # the window that predicts this token has not been reached yet
            first += stride
        with torch.no_grad():
            logits = reference(ids[None, first:target]).logits[0, -1]
        nats.append(F.cross_entropy(logits.double(), ids[target]).item())
    model.train()
    result = measure(model, corpus, block_size=block_size, stride=stride, batch_size=batch_size)
    assert model.training
    assert result.tokens == 300
    assert result.loss == pytest.approx(np.mean(nats), abs=1e-6)
    assert result.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(np.mean(nats) / math.log(2) * 301 / 602, rel=1e-6)


def test_windows_with_stride_are_those_of_the_perplexity_guide(tmp_path, model, corpus):
    # transformers' guide cuts windows of max_length tokens and shifts inside them: one token fewer is read
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))[None]
    max_length, stride, end_before, total, count = 16, 6, 0, 0.0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : end_before - begin] = -100
        with torch.no_grad():
            logits = reference(ids[:, begin:end]).logits[0, :-1].double()
        total += F.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += (labels[0, 1:] != -100).sum().item()
        end_before = end
        if end == ids.shape[1]:
            break
    result = measure(model, corpus, block_size=max_length - 1, stride=stride)
    assert result.tokens == count
    assert result.loss == pytest.approx(total / count, abs=1e-6)


def test_end_to_end_it_is_the_validation_loss_of_training(model, corpus):
    during_training = evaluate(
        Accelerator(),
        Mesh(),
        model,
        next_token_loss,
        TokenBlocks(corpus.stream, 16, partial=True),
        micro_batch_size=3,
        tokens="all",
        bytes_per_token=2.0,
    )
    result = measure(model, corpus)
    assert result.loss == pytest.approx(during_training.loss, abs=1e-6)
    assert result.tokens == during_training.tokens


def test_the_bootstrapped_error_is_the_one_of_the_formula():
    draw = np.random.default_rng(1)
    nats, counts = draw.normal(100, 20, 400), np.full(400, 10)
    expected = nats.std(ddof=1) / math.sqrt(400) / 10
    assert bootstrap_error(nats, counts) == pytest.approx(expected, rel=0.1)
    assert bootstrap_error(nats, counts) == bootstrap_error(nats, counts)
    # each value four times over says no more than once: drawn four at a time, it does not look like more
    assert bootstrap_error(nats.repeat(4), counts.repeat(4), windows_at_once=4) == pytest.approx(expected, rel=0.1)
    assert bootstrap_error(nats.repeat(4), counts.repeat(4)) < 0.6 * expected
    assert math.isnan(bootstrap_error(nats[:1], counts[:1]))


def test_too_little_text_has_no_error_and_the_figures_say_null(model):
    corpus = Corpus("few", TokenStream([np.arange(5, dtype=np.uint16)]), 1, 5, "none")
    figures = measure(model, corpus).figures()
    assert figures["loss"] > 0
    assert figures["loss_standard_error"] is None
    assert figures["tokens_predicted"] == 4
