"""The estimated peak of preference training against a rehearsed step: full fine-tuning and LoRA,
with and without log-probabilities of the model before training, DDP and FSDP2.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from nanogpt_hf.bench.rehearsal import rehearse
from nanogpt_hf.config.methods import PREFERENCES
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.model import GPTConfig, loss_gpt
from nanogpt_hf.planning.estimate import estimate
from nanogpt_hf.planning.footprint import TOP

ONE = Launch()
BF16 = Launch(precision="bf16")
DDP = Launch(2, 2)
FSDP2 = Launch(2, 2, sharding="fsdp", reshards=True)
FSDP2_BF16 = replace(FSDP2, precision="bf16")
LORA = {"lora.rank": "4"}
CHUNKS = 2**19  # logits: of 8 pairs 8 chunks, of one pair one

# loss, launch, knobs, micro-batch
CASES = [
    ("dpo", ONE, {}, 8),
    ("dpo", BF16, LORA, 8),
    ("simpo", DDP, {}, 8),
    ("dpo", FSDP2_BF16, {}, 8),
    ("simpo", FSDP2, LORA, 8),
    ("kto", FSDP2_BF16, LORA, 8),
    *(
        pytest.param(loss, launch, knobs, size, marks=pytest.mark.slow)
        for loss, launch, knobs, size in (
            *(("dpo", launch, {}, 1) for launch in (ONE, BF16, DDP, FSDP2, FSDP2_BF16)),
            *(("dpo", launch, LORA, 1) for launch in (ONE, BF16, DDP, FSDP2, FSDP2_BF16)),
            *(("dpo", launch, LORA, 8) for launch in (ONE, DDP, FSDP2, FSDP2_BF16)),
            *(("kto", launch, {}, 8) for launch in (ONE, BF16, DDP, FSDP2)),
            ("orpo", BF16, {"finetune.freeze_layers": "1"}, 8),
        )
    ),
]


@pytest.fixture
def base(tmp_path) -> Path:
    """A model folder without weights, which an estimate does not read."""
    sizes = {"vocab_size": 4000, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}
    GPTConfig(**sizes).to_gpt2().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def resolved(base: Path, loss: str, size: int, processes: int = 1, **knobs: str):
    """A recipe of two micro-batches per step, and the config of its model."""
    values = {
        "finetune.model": str(base),
        "data.source": "pairs.jsonl",
        "data.block_size": "64",
        "train.micro_batch_size": str(size),
        "train.tokens_per_step": str(2 * size * 64 * processes),
        "align.loss": loss,
    }
    return finetune_config(None, [*(values | knobs).items()], PREFERENCES)


@pytest.mark.long
@pytest.mark.parametrize(("loss", "launch", "knobs", "size"), CASES)
def test_estimate_equals_a_rehearsed_step(base, monkeypatch, loss, launch, knobs, size):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", CHUNKS // loss_gpt.CHUNKS_OF_A_GPU)
    config, model = resolved(base, loss, size, launch.world_size, **knobs)
    found = rehearse(config, launch, model)
    # The gradient of an embedding is the peak of few tokens, and FSDP2 gathers less for it.
    bound = 0.05 if size > 1 else 0.1
    assert estimate(config, launch, model).memory.peak == pytest.approx(found.peak, rel=bound)
    # KTO reads its estimate of the divergence once in a step.
    waits = [line for line in found.waits if "methods/preferences.py" in line]
    assert len(found.waits) == len(waits) == (loss == "kto")


def test_a_pair_is_two_sequences_and_a_labeled_answer_one(base):
    found = {}
    for loss in ("dpo", "simpo", "kto"):
        config, model = resolved(base, loss, 2)
        found[loss] = estimate(config, ONE, model)
    pairs, answers = found["dpo"], found["kto"]
    assert pairs.memory == found["simpo"].memory
    assert pairs.tokens == 2 * answers.tokens == 2 * answers.blocks * 64
    # Its mismatched pairs are read without a gradient, which is a third of both passes.
    assert pairs.flops_per_token / answers.flops_per_token == pytest.approx(2 / (1 + 1 / 3))
    # As many sequences as fine-tuning on twice the micro-batch.
    two, one = (figures.memory.phases[TOP]["activations"] for figures in (pairs, answers))
    assert two == 2 * one


def test_what_needs_values_is_not_rehearsed(base):
    config, model = resolved(base, "dpo", 1, **LORA, **{"lora.quantize": "8bit"})
    with pytest.raises(UserError, match=r"^--rehearse: lora\.quantize 8bit: .*cannot be rehearsed"):
        rehearse(config, ONE, model)
