"""Initial weights whose first heads look back."""

import pytest
import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import build_config, build_model

pytestmark = pytest.mark.long

TIED = {"extra": {"tie_word_embeddings": True}}
SHAPES = {
    "gpt2": {"n_head": 4, "n_embd": 128, "n_positions": 64},
    # twelve offsets, and a context in which evenly spaced waves would come back
    "gpt2, wide": {"n_head": 12, "n_embd": 384, "n_positions": 256},
    "gpt2, odd": {"n_head": 3, "n_embd": 39, "n_positions": 24, "bias": True},
    "llama, fewer heads of keys": {"n_head": 4, "n_kv_head": 2, "n_embd": 128, "n_positions": 64},
    "qwen2": {"n_head": 4, "n_embd": 128, "n_positions": 64},
    "qwen3, tied": {"n_head": 4, "n_embd": 128, "n_positions": 64, **TIED},
    "qwen3, wide heads": {
        "n_head": 6,
        "n_embd": 384,
        "n_positions": 64,
        "extra": {"head_dim": 128},
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_head_of_the_first_block_looks_at_its_offset(name):
    section = ModelSection(architecture=name.partition(",")[0], n_layer=2, **SHAPES[name])
    config = build_config(section, 65)
    for seed in (1, 2):
        model = build_model(config, seed, "look_back").eval()
        model.set_attn_implementation("eager")
        tokens = torch.randint(65, (4, section.n_positions), generator=torch.Generator())
        with torch.no_grad():
            first, second = model(tokens, output_attentions=True).attentions
        for head in range(section.n_head):
            looked_at = [
                weights[:, head].diagonal(-offset, 1, 2).mean().item()
                for weights in (first, second)
                for offset in range(section.n_positions // 2)
            ]
            assert looked_at.index(max(looked_at)) == head + 1
            assert max(looked_at) > 0.4


@pytest.mark.parametrize("name", ["gpt2", "qwen3, tied"])
def test_other_weights_are_those_of_the_architecture(name):
    section = ModelSection(architecture=name.partition(",")[0], n_layer=2, **SHAPES[name])
    config = build_config(section, 65)
    plain, changed = (
        dict(build_model(config, 1, init).named_parameters()) for init in ("own", "look_back")
    )
    differ = {name for name in plain if not torch.equal(plain[name], changed[name])}
    expected = {
        "gpt2": {"transformer.wpe.weight"},
        "qwen3, tied": {"model.embed_tokens.weight"}
        | {f"model.layers.0.self_attn.{norm}_norm.weight" for norm in "qk"},
    }[name]
    block = "transformer.h.0.attn" if name == "gpt2" else "model.layers.0.self_attn"
    assert differ == expected | {f"{block}.{layer}_proj.weight" for layer in "qk"}


def test_tied_head_does_not_see_the_direction_of_all_tokens():
    config = build_config(
        ModelSection(architecture="qwen3", n_layer=1, **SHAPES["qwen3, tied"]), 65
    )
    plain, changed = (build_model(config, 1, init).lm_head for init in ("own", "look_back"))
    hidden = torch.randn(5, 128)
    expected = plain(hidden).log_softmax(-1)
    logits = changed(hidden).log_softmax(-1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"architecture": "gpt_neox"}, "gpt_neox"),
        ({"n_embd": 12, "n_head": 2}, "6"),
    ],
)
def test_models_whose_heads_cannot_look_back_are_refused(knobs, named):
    with pytest.raises(UserError) as error:
        build_config(ModelSection(init="look_back", **{"n_embd": 32, "n_head": 2} | knobs), 65)
    assert str(error.value).startswith("model.init: look_back")
    assert named in str(error.value)
