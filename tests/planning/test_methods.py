"""The estimated peaks of preference training and reinforcement learning against a rehearsed step:
full fine-tuning and LoRA, with and without a model to compare with, DDP and FSDP2.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanogpt_hf.bench.rehearsal import rehearse
from nanogpt_hf.config.methods import POLICY, PREFERENCES
from nanogpt_hf.config.schema import Config, DataSection, RlSection, TrainSection
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.answers import AnswerSampler
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.methods.policy import rollouts_of
from nanogpt_hf.methods.rollouts import Rollouts
from nanogpt_hf.model import GPTConfig, loss_gpt
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.planning import estimate as planned
from nanogpt_hf.planning.estimate import estimate, planned_model
from nanogpt_hf.planning.footprint import SAMPLING, TOP
from nanogpt_hf.tasks.task import Task
from nanogpt_hf.training.auto_size import _reserved

ONE = Launch()
BF16 = Launch(precision="bf16")
DDP = Launch(2, 2)
FSDP2 = Launch(2, 2, sharding="fsdp", reshards=True)
FSDP2_BF16 = replace(FSDP2, precision="bf16")
LORA: dict[str, Any] = {"lora.rank": "4"}
CHUNKS = 2**19  # logits: of 8 pairs 8 chunks, of one pair one

# loss, launch, knobs, micro-batch
CASES = [
    ("dpo", ONE, {}, 8),
    ("simpo", DDP, {}, 8),
    ("dpo", FSDP2_BF16, {}, 8),
    ("kto", FSDP2_BF16, LORA, 8),
    *(
        pytest.param(loss, launch, knobs, size, marks=pytest.mark.slow)
        for loss, launch, knobs, size in (
            *(("dpo", launch, {}, 1) for launch in (ONE, BF16, DDP, FSDP2, FSDP2_BF16)),
            *(("dpo", launch, LORA, 1) for launch in (ONE, BF16, DDP, FSDP2, FSDP2_BF16)),
            *(("dpo", launch, LORA, 8) for launch in (ONE, BF16, DDP, FSDP2, FSDP2_BF16)),
            ("simpo", FSDP2, LORA, 8),
            *(("kto", launch, {}, 8) for launch in (ONE, BF16, DDP, FSDP2)),
            ("orpo", BF16, {"finetune.freeze_layers": "1"}, 8),
        )
    ),
]


@pytest.fixture
def base(tmp_path) -> Path:
    """A model folder without weights, which an estimate does not read."""
    sizes: Any = {"vocab_size": 4000, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}
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


def test_log_probabilities_are_passes_without_a_gradient(base):
    """Under the start model for rl.kl, and under the model that has sampled for a second update."""
    variants = {
        "plain": {},
        "kl": {"rl.kl": "0.1"},
        "twice": {"rl.updates": "2"},
        "both": {"rl.kl": "0.1", "rl.updates": "2"},
    }
    flops = {}
    for name, knobs in variants.items():
        config, model = resolved_rewards(base, 1, **knobs)
        flops[name] = estimate(config, ONE, model).flops_per_token
    factors = {name: flops[name] / flops["plain"] for name in variants}
    expected = {"plain": 1, "kl": 1 + 1 / 3, "twice": 2 + 1 / 3, "both": 2 + 2 / 3}
    assert factors == pytest.approx(expected)


# launch, knobs, micro-batch
REWARDS = [
    (BF16, {}, 8),
    (FSDP2_BF16, {"rl.batch_size": "16", "rl.kl": "0.1", **LORA}, 2),
    *(
        pytest.param(launch, knobs, size, marks=pytest.mark.slow)
        for launch, knobs, size in (
            (ONE, {"rl.kl": "0.1"}, 8),
            (ONE, {"rl.updates": "2", "rl.clip": "0.2"}, 1),
            (DDP, LORA, 8),
            (DDP, {"rl.kl": "0.1"}, 1),
            (FSDP2, {}, 8),
            (FSDP2_BF16, {"rl.batch_size": "16"}, 1),
        )
    ),
]


def resolved_rewards(base: Path, size: int, processes: int = 1, **knobs: str):
    values = {
        "finetune.model": str(base),
        "rl.task": "arithmetic",
        "rl.samples": "4",
        "rl.max_new_tokens": "32",
        "data.block_size": "64",
        "train.micro_batch_size": str(size),
        "train.tokens_per_step": str(8 * size * 64 * processes),
    }
    return finetune_config(None, [*(values | knobs).items()], POLICY)


@pytest.mark.long
@pytest.mark.parametrize(("launch", "knobs", "size"), REWARDS)
def test_updates_and_sampling_equal_a_rehearsal(base, monkeypatch, launch, knobs, size):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", CHUNKS // loss_gpt.CHUNKS_OF_A_GPU)
    config, model = resolved_rewards(base, size, launch.world_size, **knobs)
    found = rehearse(config, launch, model)
    phases = dict(estimate(config, launch, model).memory.phases)
    sampling = sum(phases.pop(SAMPLING).values())
    update = max(sum(parts.values()) for parts in phases.values())
    assert update == pytest.approx(found.peak, rel=0.05 if size > 2 else 0.1)
    assert sampling == pytest.approx(found.sampling, rel=0.1)
    # A reference is a whole model more, on every process.
    kept = {parts["other models"] for parts in phases.values()}
    assert kept == {4 * count_parameters(model) if "rl.kl" in knobs else 0}


def test_auto_samples_as_many_answers_at_once_as_it_has_found():
    """The questions are loaded before `auto` finds the size of a micro-batch."""
    sampler = AnswerSampler(
        cast(Any, None), cast(Any, None), max_new_tokens=4, temperature=1, batch_size=1, positions=8
    )
    train = TrainSection(micro_batch_size=6, tokens_per_step=48)
    config = Config(data=DataSection(block_size=8), train=train)
    rollouts = Rollouts(config, Task("", (), (), lambda *_: 0.0, ""), sampler)
    found = SimpleNamespace(micro_batch_size=6)
    run: Any = SimpleNamespace(config=config, batches=found, data=SimpleNamespace(train=rollouts))
    assert rollouts_of(run).sampler.batch_size == 6
    run.config = replace(config, rl=RlSection(batch_size=3))
    assert rollouts_of(run).sampler.batch_size == 3


def test_memory_of_the_start_model_stays_free_in_auto(base):
    kl: dict[str, Any] = {"rl.kl": "0.1"}
    for knobs, models in (({}, 0), (kl, 1), (kl | LORA, 1)):
        config, of_base = resolved_rewards(base, 8, **knobs)
        model = planned_model(config, of_base)
        run: Any = SimpleNamespace(config=config, model=model)
        device = SimpleNamespace(type="cuda")
        run.accelerator = SimpleNamespace(device=device, unwrap_model=lambda model: model)
        assert _reserved(run) == models * 4 * count_parameters(of_base)


def test_states_and_convolutions_are_no_estimated_cache(base, monkeypatch):
    monkeypatch.setattr(planned, "starts_mergeable", lambda config: False)
    config, model = resolved_rewards(base, 1)
    with pytest.raises(UserError, match=r"^model\.architecture gpt2: .*only key-value caches"):
        estimate(config, ONE, model)


def test_what_needs_values_is_not_rehearsed(base):
    quantized: dict[str, Any] = LORA | {"lora.quantize": "8bit"}
    config, model = resolved(base, "dpo", 1, **quantized)
    with pytest.raises(UserError, match=r"^--rehearse: lora\.quantize 8bit: .*no values"):
        rehearse(config, ONE, model)
