"""Decoders of transformers as rows of Architecture: loss, gradients, initial weights, folders on
disk, refusals.
"""

import dataclasses

import pytest
import torch
import transformers
from decoder_types import VOCAB
from packaging.version import parse
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from decoder_batch import batch, gradients
from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.architecture import architecture_of, count_parameters, part_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.checks import check_causal

DECODERS = ["qwen3", "llama", "nanochat", "olmo2", "smollm3"]


def section(architecture: str, **knobs) -> ModelSection:
    return ModelSection(
        architecture=architecture, n_layer=2, n_head=4, n_embd=32, n_positions=32, **knobs
    )


def model_of(architecture: str, seed: int = 0, **knobs):
    """A tiny model with weights large enough that a mistake shows."""
    model = build_model(build_config(section(architecture, **knobs), VOCAB), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1
            )
    return model


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("architecture", "extra", "linear"),
    [
        *((name, {}, True) for name in DECODERS),
        ("gemma2", {"final_logit_softcapping": 2.0}, True),
        ("phi", {}, True),  # a head with a bias
        ("granite", {"logits_scaling": 3.0}, False),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(
    architecture, extra, linear, tied, chunked, monkeypatch
):
    if chunked:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", VOCAB * 7)
    model = model_of(architecture, n_kv_head=2, extra=extra | {"tie_word_embeddings": tied}).train()
    assert model._is_linear == linear
    standard = AutoModelForCausalLM.from_config(model.config).train()
    standard.load_state_dict(model.state_dict())
    ids, labels = batch().values()
    theirs = standard(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=7).loss
    ours = model(input_ids=ids, shift_labels=labels, num_items_in_batch=7, skip_logits=True)
    assert ours.logits is None or not linear
    torch.testing.assert_close(ours.loss, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradients(model, ours.loss), gradients(standard, theirs), atol=1e-5, rtol=1e-5
    )
    model.eval()
    logits = model(input_ids=ids, shift_labels=labels, skip_logits=False).logits
    torch.testing.assert_close(logits, standard.eval()(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", DECODERS)
def test_parts_of_a_block(architecture):
    model = model_of(architecture)
    row = architecture_of(model)
    block = row.blocks(model)[0]
    attention, mlp = (list(layers.values()) for layers in row.linear_layers(block))
    assert attention[-1] is block.self_attn.o_proj
    assert mlp[-1].out_features == 32
    assert row.embeddings(model) == [model.model.embed_tokens]
    assert row.final_norm(model) is model.model.norm
    assert {part_of(name) for name, _ in model.named_parameters()} >= {
        "attention",
        "MLP",
        "token embedding and head",
    }
    assert count_parameters(model.config) == model.num_parameters()


def test_initial_weights_own_gpt2_and_zero_residual():
    config = build_config(
        ModelSection(architecture="llama", n_layer=8, n_head=4, n_embd=64, n_positions=32), VOCAB
    )
    own, gpt2, zeros = (build_model(config, 0, init) for init in ("own", "gpt2", "zero_residual"))
    row = architecture_of(config)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        std = [
            torch.cat([b.get_submodule(name).weight for b in row.blocks(m)]).std().item()
            for m in (own, gpt2, zeros)
        ]
        assert std == pytest.approx([0.02, 0.005, 0], rel=0.05)
    for model in (gpt2, zeros):
        assert torch.equal(
            model.model.layers[0].mlp.up_proj.weight, own.model.layers[0].mlp.up_proj.weight
        )


def test_narrow_heads_are_rotated_whole():
    """GPT-J rotates 64 values of a head by default; a narrower head has fewer."""
    section = ModelSection(architecture="gptj", n_layer=1, n_head=2, n_embd=32, n_positions=8)
    config = build_config(section, 11)
    assert config.rotary_dim == 16
    assert build_model(config, 1)(input_ids=torch.arange(8)[None]).logits.shape == (1, 8, 11)
    wide = dataclasses.replace(section, n_head=1, n_embd=128)
    assert build_config(wide, 11).rotary_dim == 64


def test_dropout_is_off_unless_stated():
    config = build_config(section("opt"), VOCAB)
    assert config.dropout == config.attention_dropout == config.layerdrop == 0
    assert build_config(section("opt", extra={"dropout": 0.2}), VOCAB).dropout == 0.2


def test_default_inner_width_costs_the_same_gated_or_not():
    gated, plain = (
        build_config(section(name), VOCAB).intermediate_size for name in ("llama", "nanochat")
    )
    assert (gated, plain) == (96, 128)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"architecture": "qwen4"},
            "model.architecture: qwen4 is no model type of transformers; did you mean qwen",
        ),
        ({"architecture": "t5"}, "model.architecture: t5 is not a causal language model"),
        ({"architecture": "gemma3"}, "several models"),
        ({"architecture": "bert"}, "has an encoder, is one"),
        ({"architecture": "openai-gpt"}, "has no single list of blocks"),
        ({"architecture": "mamba"}, "model.n_head: mamba's config has 1; set it so"),
        ({"architecture": "gptj", "n_kv_head": 2}, "config has no num_key_value_heads; leave it"),
        (
            {"architecture": "llama", "extra": {"atention_bias": True}},
            "no such field; did you mean attention_bias",
        ),
        (
            {"architecture": "llama", "extra": {"attention_bias": "maybe"}},
            "attention_bias expected bool, got str",
        ),
        (
            {"architecture": "llama", "extra": {"hidden_size": 7}},
            "model.extra.hidden_size: is model.n_embd",
        ),
    ],
)
def test_build_config_refuses_what_does_not_fit(knobs, message):
    with pytest.raises(UserError) as error:
        build_config(ModelSection(n_layer=2, n_head=4, n_embd=32, n_positions=32, **knobs), VOCAB)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# transformers 5.24 keeps the packed documents of falcon apart.
LEAKS = {"opt"} | ({"falcon"} if parse(transformers.__version__) < parse("5.24") else set())


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "gemma2", "falcon", "opt"])
def test_packing_that_leaks_is_refused(architecture):
    model = build_model(build_config(section(architecture), VOCAB), seed=0).train()
    if architecture in LEAKS:
        with pytest.raises(UserError, match="set --data"):
            check_causal(model, packs=True)
    else:
        check_causal(model, packs=True)
    assert model.training


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "granite"])
def test_row_losses_are_those_of_the_logits(architecture):
    extra = {"granite": {"logits_scaling": 3.0}, "gemma2": {"final_logit_softcapping": 2.0}}.get(
        architecture, {}
    )
    model = model_of(architecture, extra=extra).eval()
    ids, labels = batch().values()
    with torch.no_grad():
        losses = model.row_losses(ids, labels)
        expected = F.cross_entropy(
            model(input_ids=ids).logits.transpose(1, 2), labels, reduction="none"
        ).sum(-1)
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "nanochat", "smollm3", "granite"])
def test_padded_vocabulary_is_never_predicted_or_saved(
    architecture, chunked, tmp_path, monkeypatch
):
    if chunked:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", VOCAB * 7)
    model = model_of(architecture, pad_vocab_to_multiple_of=16).train()
    head = model.get_output_embeddings().weight
    assert (len(head), model.config.vocab_size) == (64, VOCAB)
    ids, labels = batch().values()
    loss = model(input_ids=ids, shift_labels=labels).loss
    loss.backward()
    assert not head.grad[VOCAB:].any()
    assert model(ids).logits.shape[-1] == VOCAB
    architecture_of(model).write_model(tmp_path, model.config, model.state_dict())
    standard = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(standard.get_output_embeddings().weight) == standard.config.vocab_size == VOCAB
    assert not hasattr(standard.config, "padded_vocab_size")
    torch.testing.assert_close(
        standard(ids, labels=ids, shift_labels=labels).loss, loss, atol=1e-5, rtol=1e-5
    )
    assert count_parameters(model.config) == standard.num_parameters()


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "nanochat", "phi"])
def test_training_never_holds_all_logits(architecture, monkeypatch):
    rows = 256
    vocab = 5000
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", vocab * rows // 8)
    model = build_model(build_config(section(architecture), vocab), 0).train()
    ids = torch.arange(rows).view(8, 32)
    sizes = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            sizes.update(t.numel() for t in tensors if t.shape[-1:] == (vocab,))
            return out

    with Sizes():
        model(input_ids=ids, labels=ids).loss.backward()
    assert max(sizes) == rows * vocab // 8


@pytest.mark.parametrize("tied", [False, True])
def test_freeze_and_depths_of_a_decoder(tied):
    model = model_of("qwen3", extra={"tie_word_embeddings": tied})
    row = architecture_of(model)
    depths = row.depths(model)
    assert set(depths.values()) == {0, 1, 2, 3}
    assert depths["model.embed_tokens.weight"] == 0
    assert depths["model.layers.1.mlp.down_proj.weight"] == 2
    assert depths["model.norm.weight"] == 3
    assert depths.get("lm_head.weight", 3) == 3
    row.freeze(model, 1)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, depth in depths.items() if depth < 2}
    assert model.lm_head.weight.requires_grad != tied


def test_flops_count_the_head_but_not_what_is_only_looked_up():
    tied, untied = (
        build_config(section("llama", extra={"tie_word_embeddings": tied}), VOCAB)
        for tied in (True, False)
    )
    row = architecture_of(tied)
    assert count_parameters(untied) == count_parameters(tied) + VOCAB * 32
    assert row.flops_per_token(tied, 16) == row.flops_per_token(untied, 16)
    assert row.flops_per_token(tied, 16) == 6 * count_parameters(tied) + 12 * 2 * 32 * 16
