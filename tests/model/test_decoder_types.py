"""Every type that docs/recipes.md lists: loss and gradients are those of transformers, and no token
sees a later one. No other type is accepted.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of_type
from nanogpt_hf.model.build import build_config, build_model, check_causal
from nanogpt_hf.model.config_fields import SIZES
from nanogpt_hf.model.experts import experts_of

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
VOCAB = 61
SMALL = {
    2: "num_experts_per_tok moe_topk moe_k attn_layer_period expert_layer_period mamba_expand "
    "global_attn_every_n_layers linear_num_key_heads n_mamba_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window "
    "linear_num_value_heads mamba_n_heads qk_rope_head_dim qk_nope_head_dim attention_chunk_size "
    "laurel_rank index_n_heads index_block_size swa_num_attention_heads swa_num_key_value_heads",
    1: "n_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups "
    "attn_layer_offset expert_layer_offset moe_layer_start_index",
    8: "v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state mamba_chunk_size "
    "hidden_size_per_layer_input index_head_dim index_topk router_hidden_size o_lora_rank",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "intermediate_size_mlp q_lora_rank kv_lora_rank mamba_d_head",
    0: "num_kv_shared_layers",
    32: "word_embed_proj_dim",
    64: "mamba_d_ssm",
    VOCAB: "vocab_size_per_layer_input",
}
# where sizes follow from others, defaults are no use, or routers draw noise in training
OTHERS = {
    "bamba": {"attn_layer_indices": [1]},
    "cwm": {"bos_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1},
    "modernbert-decoder": dict.fromkeys(
        ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 0
    ),
    "phimoe": {"router_jitter_noise": 0.0},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}
LEAK = ("falcon", "gpt_oss", "opt")

FAMILIES = dict(
    re.findall(
        r"^\| ([^|]*) \| (.*) \|$",
        PAGE.read_text(encoding="utf-8").split("a test reads this table:")[1].split("\n\n")[1],
        re.MULTILINE,
    )[1:]
)
ROWS = [(family, name) for family, of in FAMILIES.items() for name in re.findall("`(.*?)`", of)]
pytestmark = [
    pytest.mark.slow,  # 30 seconds in all
    pytest.mark.skipif(
        not transformers.__version__.startswith("5.23."),
        reason="another version of transformers than the table's",
    ),
]


def tiny(architecture: str):
    """A tiny model of all its kinds of blocks, with weights large enough that a mistake shows."""
    row = architecture_of_type(architecture)
    default = row.config_class()
    sizes = {name: value for value, names in SMALL.items() for name in names.split()}
    knobs = {row._field(name) for name in SIZES.values()}
    fields = {field.name for field in row._fields} - knobs
    extra: dict[str, Any] = {
        name: value
        for name, value in sizes.items()
        if name in fields and isinstance(getattr(default, name, None), int)
    }
    layers = 2
    for name in ("layer_types", "mlp_layer_types"):
        if name in fields and (values := getattr(default, name, None)):
            kinds = list(dict.fromkeys(values))
            layers = max(layers, len(kinds))
            extra[name] = (kinds * layers)[:layers]
    sizes = {"n_layer": layers, "n_head": 4, "n_embd": 32, "n_positions": 32}
    extra |= OTHERS.get(architecture, {})
    for knob in [name for name in extra if hasattr(ModelSection(), name)]:
        sizes[knob] = extra.pop(knob)
    section = ModelSection(architecture=architecture, extra=extra, **sizes)
    model = build_model(build_config(section, VOCAB), 0).train()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    return model


@pytest.mark.parametrize(("family", "architecture"), ROWS, ids=[name for _, name in ROWS])
def test_type_of_the_table(family, architecture):
    model = tiny(architecture)
    if family == "experts" or family.startswith("attention"):
        assert bool(experts_of(model)) == (family == "experts")
    check_causal(model, packs=False)
    if family.startswith("convolutions") or architecture in LEAK:
        with pytest.raises(UserError, match="packed"):
            check_causal(model, packs=True)
    else:
        check_causal(model, packs=True)
    standard = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).train()
    standard.load_state_dict(model.state_dict())
    if experts_of(standard):
        standard.set_experts_implementation("eager")
    ids = torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, -3:] = -100
    batch = {"input_ids": ids, "shift_labels": labels, "num_items_in_batch": 7}
    theirs = standard(**batch, labels=ids, use_cache=False).loss
    ours = model(**batch, skip_logits=True).loss
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    theirs.backward()
    ours.backward()
    torch.testing.assert_close(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in standard.named_parameters()},
        atol=1e-5,
        rtol=1e-5,
    )


def test_no_other_type_is_accepted():
    known = {kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    accepted = {name for _, name in ROWS} | {"gpt2", "nanogpt_hf"}
    assert len(accepted) == len(ROWS) + 2
    for name in sorted(known - accepted):
        with pytest.raises((ValueError, UserError)):
            check_causal(tiny(name), packs=False)
