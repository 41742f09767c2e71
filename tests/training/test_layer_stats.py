"""Per-layer statistics: equal to plain PyTorch, and no effect on the run."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from nanogpt_hf.config.schema import Config, ModelSection, replace_knobs
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.training import layer_stats
from nanogpt_hf.training.layer_stats import LayerStats, attention_logit_max
from nanogpt_hf.training.tracking import read_metrics

NAMES = ["embedding", "0", "1", "head"]


@pytest.mark.long
def test_layer_stats_change_no_number(start):
    options = {"model__dropout": 0.2, "train__max_steps": 5, "tracking__every": 2, "eval__every": 3}
    options["checkpoint__every"] = 9
    plain, measured = start("plain", **options), start("measured", tracking__layers=True, **options)
    first, second = (load_file(run.final / "model.safetensors") for run in (plain, measured))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    names = ("step", "train/loss", "train/grad_norm", "val/loss")
    rows = [
        [{k: event.get(k) for k in names} for event in read_metrics(run)]
        for run in (plain, measured)
    ]
    assert len(rows[0]) == 2 + 3
    assert rows[0] == rows[1]
    keys_by_event = [
        {key for key in event if key.startswith("layers/")} for event in read_metrics(measured)
    ]
    step_keys = {
        f"layers/{n}/{kind}" for n in NAMES for kind in ("grad_norm", "weight_norm", "update_ratio")
    }
    evaluation_keys = {f"layers/{n}/activation_std" for n in NAMES} | {
        f"layers/{n}/attention_logit_max" for n in "01"
    }
    assert sorted(map(len, keys_by_event)) == [6, 6, 6, 12, 12]
    assert all(keys in (step_keys, evaluation_keys) for keys in keys_by_event)
    assert not [key for event in read_metrics(plain) for key in event if key.startswith("layers/")]


def test_frozen_layers_have_no_norms(start, tiny_base, text_file):
    run = start(
        "tuned",
        model__n_layer=4,
        model__bias=True,
        model__activation_function="gelu_new",
        data__tokenizer=str(tiny_base),
        finetune__model=str(tiny_base),
        finetune__freeze_layers=2,
        tracking__layers=True,
        train__max_steps=2,
    )
    last, evaluation = read_metrics(run)[-2:]
    norms = {key.split("/")[1] for key in last if key.startswith("layers/")}
    assert norms == {"2", "3", "head"}
    assert {key.split("/")[1] for key in evaluation if key.endswith("activation_std")} == {
        "embedding",
        *"0123",
        "head",
    }


@pytest.fixture(scope="module")
def model() -> GPTForCausalLM:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=11,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPTForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_logit_max_equals_explicit_attention(monkeypatch, rows, packed):
    generator = torch.Generator().manual_seed(1)
    # two queries share a key
    query, key = (torch.randn(3, heads, 24, 8, generator=generator) for heads in (4, 2))
    key[:, :, 23] = 10 * query[:, ::2, 0]  # which the query of position 0 does not see
    segments = torch.arange(24) // 7
    mask = (segments[:, None] == segments).tril().expand(3, 1, 24, 24) if packed else None
    monkeypatch.setattr(layer_stats, "LOGITS_AT_ONCE", rows * 3 * 4 * 24)
    largest = -math.inf
    for head in range(4):
        for i in range(24):
            for j in range(i + 1):
                if not packed or i // 7 == j // 7:
                    logits = (query[:, head, i] * key[:, head // 2, j]).sum(-1) / math.sqrt(8)
                    largest = max(largest, logits.max().item())
    assert attention_logit_max(query, key, mask).item() == pytest.approx(largest, rel=1e-5)
    added = None if mask is None else torch.zeros(3, 1, 24, 24).masked_fill(~mask, -torch.inf)
    assert attention_logit_max(query, key, added, 8**-0.5).item() == pytest.approx(
        largest, rel=1e-5
    )
    unmasked = (query[:, ::2] @ key.transpose(-1, -2)).max().item() / math.sqrt(8)
    assert unmasked > largest  # so the mask matters


def stats_and_tokens() -> tuple[LayerStats, torch.Tensor]:
    """Statistics on nine blocks and a shorter one, and the tokens that they are of."""
    stream = TokenStream([np.random.default_rng(0).integers(0, 11, 24 * 9 + 5).astype(np.uint16)])
    knobs = {"data.block_size": 24, "train.micro_batch_size": 3, "tracking.layers": True}
    blocks = TokenBlocks(stream, 24, partial=True)
    rows = [stream.chunks[0][24 * i : 24 * i + 24] for i in (0, 4, 8)]
    stats = LayerStats(Accelerator(), replace_knobs(Config(), knobs), blocks, 3)
    return stats, torch.from_numpy(np.stack(rows).astype(np.int64))


def queries_and_keys(model, x):
    attention = model.transformer.h[0].attn
    return (
        p(x).view(len(x), 24, 2, 8).transpose(1, 2) for p in (attention.q_proj, attention.k_proj)
    )


def hooks_of(model) -> list[list]:
    return [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_are_of_fixed_validation_tokens(model, compiled):
    stats, tokens = stats_and_tokens()
    hidden = model.eval()(tokens, output_hidden_states=True).hidden_states
    model.train()
    if compiled:
        for block in model.transformer.h:
            block.compile(backend="eager")
    hooks = hooks_of(model)
    report = stats.evaluation_report(model)
    assert model.training
    expected = {"embedding": hidden[0], "0": hidden[1], "head": hidden[-1]}
    for name, value in expected.items():
        assert report[f"layers/{name}/activation_std"] == pytest.approx(
            value.std(correction=0).item(), rel=1e-5
        )
    query, key = queries_and_keys(model, model.transformer.h[0].ln_1(hidden[0]))
    assert report["layers/0/attention_logit_max"] == pytest.approx(
        attention_logit_max(query, key).item(), rel=1e-5
    )
    assert stats.evaluation_report(model) == report
    assert hooks_of(model) == hooks
    for block in model.transformer.h:
        block._compiled_call_impl = None
    torch.compiler.reset()


def test_attention_logit_max_is_float32_under_autocast(model):
    x = torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        query, key = queries_and_keys(model, x)
        largest = attention_logit_max(query, key)
    assert query.dtype == torch.bfloat16
    logits = query.float() @ key.float().transpose(-1, -2) / math.sqrt(8)
    logits = logits.masked_fill(~torch.ones(24, 24).tril().bool(), -math.inf)
    assert largest.dtype == torch.float32
    assert largest.item() == pytest.approx(logits.max().item(), rel=1e-6)


@pytest.mark.parametrize("architecture", ["qwen3", "nanochat", "olmo2"])
def test_attention_logit_max_after_rotation_and_norms(architecture):
    section = ModelSection(
        architecture=architecture, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_positions=24
    )
    model = build_model(build_config(section, 11), seed=0)
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))
    stats, tokens = stats_and_tokens()
    report = stats.evaluation_report(model)
    assert stats.evaluation_report(model) == report  # the function for attention is restored
    model.set_attn_implementation("eager")
    assert stats.evaluation_report(model) == pytest.approx(report, rel=1e-4)
    if architecture == "qwen3":
        normed = {}
        for name in ("q_norm", "k_norm"):
            layer = model.model.layers[1].self_attn.get_submodule(name)
            layer.register_forward_hook(
                lambda _, __, output, name=name: normed.update({name: output.transpose(1, 2)})
            )
        with torch.no_grad():
            model(tokens)
        angles = model.model.rotary_emb(normed["q_norm"], torch.arange(24)[None])
        query, key = apply_rotary_pos_emb(normed["q_norm"], normed["k_norm"], *angles)
        logits = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(8)
        largest = logits.masked_fill(~torch.ones(24, 24).tril().bool(), -math.inf).max().item()
        assert report["layers/1/attention_logit_max"] == pytest.approx(largest, rel=1e-4)
