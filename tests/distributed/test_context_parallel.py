"""Context parallelism: what it refuses."""

from typing import Any

import pytest
from decoder_types import tiny_section

from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.errors import UserError

TWO: Any = {"world_size": 2, "cp_size": 2, "sharding": "fsdp"}
GPU = Launch(**TWO, precision="bf16")
CPU = Launch(**TWO, precision="bf16", device="cpu")


def check(launch: Launch, **knobs) -> None:
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
    check_layout(config, launch)


@pytest.mark.parametrize(
    ("launch", "knobs", "message"),
    [
        (
            CPU,
            {},
            "model.n_head is 3, which 2 processes do not divide, and ring attention",
        ),
        (
            Launch(**TWO),
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
def test_ring_attention_refuses(launch, knobs, message):
    with pytest.raises(UserError, match=message):
        check(launch, **knobs)


@pytest.mark.parametrize("name", ["doge", "deepseek_v32", "llama4_text"])
def test_masks_that_layers_change_are_refused(name):
    """Also windows that are chunks."""
    section = tiny_section(name)
    knobs = {f"model__{knob}": value for knob, value in vars(section).items()}
    with pytest.raises(UserError, match="only whole causal attention is shared"):
        check(Launch(**TWO, device="cpu"), **knobs)


def test_ring_attention_needs_no_sizes_of_heads_on_a_gpu():
    check(GPU)
    # heads are exchanged
    check(CPU, model__n_head=4, data__block_size=14, model__dropout=0.1)
