"""Context parallelism: the parts of a sequence, ring attention on several processes, and what it
refuses.
"""

from types import SimpleNamespace

import pytest
import torch
from decoder_types import tiny_section
from transformers import LlamaConfig

from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.context_parallel import own_positions
from nanogpt_hf.distributed.layout import Machine, check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_size": 24,
}
LLAMA = LlamaConfig(vocab_size=50, intermediate_size=32, max_position_embeddings=16, **SIZES)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("ring", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("exchange_of_heads", [[0, 1, 2, 3], [4, 5, 6, 7]])],
)
def test_own_positions_of_ring_and_exchange(attention, expected):
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    tokens = torch.arange(16).view(2, 8) + 100
    parts = [
        own_positions({"input_ids": tokens}, model, Mesh(rank, 2, cp_size=2)) for rank in range(2)
    ]
    assert [part["position_ids"].tolist() for part in parts] == [
        [positions] for positions in expected
    ]
    for part in parts:
        assert part["input_ids"].tolist() == tokens[:, part["position_ids"][0]].tolist()


GPU = Machine("fsdp", "bf16", device="cuda")


def check(machine: Machine, **knobs) -> None:
    values = {"model.n_head": 3, "model.n_embd": 24, "model.n_positions": 16, "data.block_size": 16}
    values |= {
        "train.micro_batch_size": 1,
        "train.tokens_per_step": 16 * 14,
        "data.source": "python-docs",
        "data.tokenizer": "gpt2",
        "data.dir": "none",
    }
    config = load_config(
        None,
        values | {name.replace("__", "."): value for name, value in knobs.items()},
        name="tiny",
    )
    check_layout(config, Mesh(world_size=2, cp_size=2, stated_sizes={"cp_size": 2}), machine)


@pytest.mark.parametrize(
    ("machine", "knobs", "message"),
    [
        (
            Machine("fsdp", "bf16"),
            {},
            "model.n_head is 3, which 2 processes do not divide, and ring attention",
        ),
        (
            Machine("fsdp", "no", device="cuda"),
            {},
            r"CUDA GPUs \(Ampere or newer\) with mixed_precision bf16; set other sizes",
        ),
        (
            GPU,
            {"data__block_size": 14},
            "data.block_size is 14, which does not divide into the 2 × 2 equal parts",
        ),
        (GPU, {"model__dropout": 0.1}, r"dropout 0\.1 does not combine with ring attention"),
        (GPU, {"data__mask": "documents"}, "data.mask documents does not combine with ring att"),
    ],
)
def test_ring_attention_refuses(machine, knobs, message):
    with pytest.raises(UserError, match=message):
        check(machine, **knobs)


@pytest.mark.parametrize("name", ["doge", "deepseek_v32", "llama4_text"])
def test_masks_that_layers_change_are_refused(name):
    """Also windows that are chunks."""
    section = tiny_section(name)
    knobs = {f"model__{knob}": value for knob, value in vars(section).items()}
    with pytest.raises(UserError, match="only whole causal attention is shared"):
        check(Machine("fsdp", "no"), **knobs)


def test_ring_attention_needs_no_sizes_of_heads_on_a_gpu():
    check(GPU)
    # heads are exchanged
    check(Machine("fsdp", "bf16"), model__n_head=4, data__block_size=14, model__dropout=0.1)
