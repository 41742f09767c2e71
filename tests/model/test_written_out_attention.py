"""Attention written out in bfloat16: equal to the fused kernel, which all other calls take."""

import pytest
import torch
from torch.nn import functional as F

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.head_gpt import CACHE
from nanogpt_hf.model.written_out_attention import (
    MAX_POSITIONS,
    attend_written_out,
    write_out_attention,
)

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 2 * MAX_POSITIONS}
MODELS = {
    "gpt2": {},
    "llama": {"architecture": "llama", "n_kv_head": 2},
    "qwen3": {"architecture": "qwen3", "n_kv_head": 1},
}


@pytest.fixture
def fused_calls(monkeypatch) -> list[int]:
    """The numbers of positions of the calls that take the fused kernel."""
    calls = []
    fused = F.scaled_dot_product_attention

    def count(query, *arguments, **options):
        calls.append(query.shape[2])
        return fused(query, *arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_attention_and_gradients_equal_the_fused_kernel(name, fused_calls):
    model = build_model(build_config(ModelSection(**SIZES | MODELS[name]), 50), seed=0)
    tokens = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))

    def losses_and_gradients(precision: torch.dtype):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    fused_calls.clear()  # a decoder is checked by one step when it is built
    exact, gradients = losses_and_gradients(torch.float32)
    _, fused = losses_and_gradients(torch.bfloat16)
    assert len(fused_calls) == 4
    write_out_attention(model)
    loss, written_out = losses_and_gradients(torch.bfloat16)
    assert len(fused_calls) == 4
    assert loss == pytest.approx(exact, abs=2e-3)
    # no farther from float32 than the fused kernel is
    assert (written_out - gradients).norm() < 1.2 * (fused - gradients).norm()


def test_other_calls_take_the_fused_kernel(fused_calls):
    model = build_model(build_config(ModelSection(**SIZES), 50), seed=0).eval()
    plain = build_model(build_config(ModelSection(**SIZES), 50), seed=0).eval()
    write_out_attention(model)
    tokens = torch.randint(50, (2, MAX_POSITIONS + 1))
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[0, 0] = 0
    with torch.no_grad():
        assert model(tokens[:, :8]).logits.equal(plain(tokens[:, :8]).logits)
        with torch.autocast("cpu", torch.bfloat16):
            for options in (
                {"input_ids": tokens},
                {"input_ids": tokens[:, :8], "attention_mask": padded},
            ):
                assert model(**options).logits.equal(plain(**options).logits)
            first = model(tokens[:, :8], use_cache=True)
            before = len(fused_calls)
            model(tokens[:, 8:9], **{CACHE: first[CACHE]}, use_cache=True)
    assert len(fused_calls) == before + SIZES["n_layer"]


def test_dropout_keeps_the_mean_of_attention():
    query, key = torch.randn(2, 1, 2, 64, 8).bfloat16().unbind()
    ones = torch.ones_like(key)
    drawn, _ = attend_written_out(torch.nn.Module(), query, key, ones, None, dropout=0.3)
    assert drawn.std() > 0.05
    assert drawn.float().mean().item() == pytest.approx(1, abs=0.1)
