"""Write the table of types in recipes.md: a tiny model of each type of transformers is built and
probed. `make docs` runs it, in a minute or two.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.model.architecture import architecture_of_type
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.config_fields import SIZES
from nanogpt_hf.model.experts import experts_of

PAGE = Path(__file__).with_name("recipes.md")
BEGIN = "<!-- What follows is written by docs/decoder_types.py (`make docs`). -->\n"
END = "<!-- End of the types. -->\n"
OURS = ("gpt2", "nanogpt_hf")
VOCAB = 61
# Values of fields, by name, that make a model tiny.
SMALL = {
    2: "num_experts_per_tok moe_topk moe_k attn_layer_period expert_layer_period mamba_expand "
    "global_attn_every_n_layers linear_num_key_heads n_mamba_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window "
    "linear_num_value_heads linear_num_heads mamba_n_heads qk_rope_head_dim qk_nope_head_dim "
    "attention_chunk_size laurel_rank index_n_heads index_block_size swa_num_attention_heads "
    "swa_num_key_value_heads",
    1: "n_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups "
    "attn_layer_offset expert_layer_offset moe_layer_start_index",
    8: "v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state "
    "state_size ssm_state_size mamba_chunk_size chunk_size hidden_size_per_layer_input "
    "index_head_dim index_topk router_hidden_size o_lora_rank mamba_num_heads mamba_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "intermediate_size_mlp q_lora_rank kv_lora_rank mamba_d_head "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    0: "num_kv_shared_layers",
    32: "word_embed_proj_dim",
    64: "mamba_d_ssm",
    VOCAB: "vocab_size_per_layer_input",
}
_SLIDING = ["sliding_attention", "full_attention"]
# Knobs and fields where sizes follow from others, where defaults are no use, or routers draw noise.
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _SLIDING}
    | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _SLIDING}},
    "cwm": {"bos_token_id": 0},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_mamba": {"n_head": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jetmoe": {"n_kv_head": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"num_layers": 1},
    "mamba": {"n_head": 1},
    "mamba2": {"n_head": 1, "num_heads": 8, "head_dim": 8},
    "mimo_v2_flash": {"n_kv_head": 2},
    "modernbert-decoder": dict.fromkeys(
        ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 0
    ),
    "nemotron_h": {"n_layer": 3, "layers_block_type": ["mamba", "moe", "attention"]},
    "phimoe": {"router_jitter_noise": 0.0},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 16, "indexer_compress_ratio": 4, "ple_layer_ids": []},
    "recurrent_gemma": {"n_layer": 3},
    "rwkv": {"n_head": 1},
    "xlstm": {"n_head": 1, "n_embd": 64, "num_heads": 4, "qk_dim_factor": 1.0},
    "zamba": {"n_layer": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_section(architecture: str) -> ModelSection:
    """The recipe of a tiny model of all its kinds of blocks.

    Raises ValueError if its type is refused.
    """
    row = architecture_of_type(architecture)
    default: Any = row.config_class()
    default = next(iter(default.per_layer_config), default)  # blocks may have sizes of their own
    sizes = {name: value for value, names in SMALL.items() for name in names.split()}
    knobs = {row._field(name) for name in SIZES.values()}
    fields = {field.name for field in row._fields} - knobs
    extra: dict[str, Any] = {}
    for name, value in sizes.items():
        if name in fields and isinstance(getattr(default, name, None), int):
            extra[name] = value
    layers = 2
    for name in ("layer_types", "mlp_layer_types"):
        if name in fields and (values := getattr(default, name, None)):
            kinds = list(dict.fromkeys(values))
            layers = max(layers, len(kinds))
            extra[name] = (kinds * layers)[:layers]
    section: dict[str, Any] = {"n_layer": layers, "n_head": 4, "n_embd": 32, "n_positions": 32}
    extra |= OTHERS.get(architecture, {})
    for knob in [name for name in extra if hasattr(ModelSection(), name)]:
        section[knob] = extra.pop(knob)
    return ModelSection(architecture=architecture, extra=extra, **section)


def tiny(architecture: str) -> Any:
    """Its model, with weights large enough that a mistake shows.

    Raises ValueError or UserError if its type is refused.
    """
    model = build_model(build_config(tiny_section(architecture), VOCAB), 0).train()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    return model


def accepted_types() -> list[str]:
    """The types that the page lists as accepted."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split("Refused:")[0]
    return re.findall("`(.*?)`", table)


def family(model: Any) -> str:
    """The row of the table. Raises UserError if tokens see later ones."""
    check_causal(model, packs=False)
    try:
        check_causal(model, packs=True)
    except UserError:
        return "padded: convolutions, states, or positions by distance; some with experts"
    if experts_of(model):
        return "experts"
    kinds = set(getattr(model.config, "layer_types", None) or ["one"])
    return "attention" if len(kinds) == 1 else "attention of several kinds: windows, chunks"


def probed() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The accepted types by family, and the refused ones by reason."""
    accepted: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name in sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING} - {*OURS}):
        try:
            accepted.setdefault(family(tiny(name)), []).append(name)
        except (ValueError, UserError) as error:
            reason = re.sub(r" \(.*?\)|, and is not supported", "", one_line(error, 150))
            reason = re.sub(rf"\b{name}(?:'s config)?:? ", "", reason)
            refused.setdefault(reason.replace("|", "\\|"), []).append(name)
    return accepted, refused


def table() -> str:
    """Both, as tables."""
    accepted, refused = probed()
    count = sum(map(len, accepted.values()))
    lines = [f"\n{count} types are accepted:\n"]
    for head, groups in (("blocks", accepted), ("reason", refused)):
        lines += [f"| {head} | types |", "|---|---|"]
        for group, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
            lines.append(f"| {group} | {', '.join(f'`{name}`' for name in names)} |")
        lines.append("" if groups is refused else "\nRefused:\n")
    return "\n".join(lines) + "\n"


def updated() -> str:
    """The page with what is between its two marks replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(), encoding="utf-8")
