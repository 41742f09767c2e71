"""The estimated footprint of a step against what torch's allocator used."""

import dataclasses
import gc
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from transformers import PreTrainedModel

from allocations import peak_allocation
from nanogpt_hf.bench.workload import synthetic_tokens
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.config.schema import (
    AlignSection,
    Config,
    DataSection,
    DistillSection,
    LoraSection,
    ModelSection,
    OptimSection,
)
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.updates import updater_of
from nanogpt_hf.methods.distillation import freeze_teacher
from nanogpt_hf.methods.pairs import full_answers
from nanogpt_hf.methods.preference_losses import preference_objective
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.terms import next_token_loss, text_objective
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.head_gpt import Head
from nanogpt_hf.model.lora import add_adapters
from nanogpt_hf.model.recompute import recompute_blocks
from nanogpt_hf.model.written_out_attention import write_out_attention
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.planning.footprint import footprint
from nanogpt_hf.planning.kept_bytes import block_bytes
from nanogpt_hf.planning.memory import BOTTOM, CHECKPOINT, EMBEDDING, LOSS, TOP, UPDATE
from nanogpt_hf.planning.steps import footprint_arguments
from nanogpt_hf.planning.teacher import Teacher
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.step import train_step

SIZE = {
    "vocab_size": 99,
    "n_positions": 64,
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "bias": False,
    "dropout": 0.0,
}
FOUR: Any = {"world_size": 4, "local_world_size": 4}
NAMES = {"activation_function": "gelu", "bos_token_id": None, "eos_token_id": None}


def build(lora=None, frozen=-1, checkpointing="", architecture="gpt2", **size) -> PreTrainedModel:
    if architecture == "gpt2":
        model = GPTForCausalLM(GPTConfig(**SIZE | NAMES | size))
    else:
        sizes = {
            name: size.pop(name, SIZE[name])
            for name in ("n_positions", "n_embd", "n_layer", "n_head")
        }
        vocabulary = size.pop("vocab_size", SIZE["vocab_size"])
        config = build_config(ModelSection(architecture=architecture, **sizes, **size), vocabulary)
        model = architecture_of(config).model_class(config)
    architecture_of(model).freeze(model, frozen)
    if lora:
        add_adapters(model, LoraSection(**lora), seed=0)
    if checkpointing and model.device.type != "meta":
        recompute_blocks(model, checkpointing)
    return model


def take_two_steps(case: "Case", folder: Path) -> None:
    """A step, a checkpoint, and a step with optimizer state and the copy that the checkpoint was
    written from.
    """
    plugin = GradientAccumulationPlugin(num_steps=case.accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(
        cpu=True, mixed_precision=case.precision, gradient_accumulation_plugin=plugin
    )
    model = build(**case.model)
    if case.precision == "bf16":
        write_out_attention(model)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, case.optim))
    model.train()
    sizes = accelerator.unwrap_model(model).config
    align = AlignSection(loss=case.loss)
    blocks = TokenBlocks(
        synthetic_tokens(sizes.vocab_size, 4096), sizes.max_position_embeddings, stride=1
    )
    if case.loss:
        data = DataSection(block_size=sizes.max_position_embeddings)
        blocks = full_answers(Config(data=data), case.micro_batch_size)
    batches = Batches(
        blocks,
        order="random",
        seed=0,
        micro_batch_size=case.micro_batch_size,
        accumulation=case.accumulation,
    )
    objective = preference_objective(align) if case.loss else next_token_loss
    if case.teacher:
        config = Config(distill=DistillSection(teacher="stated", beta=case.beta))
        teacher = build(**case.teacher)
        freeze_teacher(teacher, config, case.precision)
        objective = text_objective(config, cast(PreparedData, SimpleNamespace(teacher=teacher)))
    run = Run(
        config=Config(),
        accelerator=accelerator,
        model=model,
        model_config=sizes,
        optimizer=optimizer,
        updater=updater_of(accelerator, model, optimizer),
        data=None,
        batches=batches,
        objective=objective,
        state=TrainState(),
    )
    train_step(run, 0, learning_rate=1e-4)
    run_folder = RunFolder(folder)
    run_folder.checkpoints.mkdir(parents=True)
    checkpoints = CheckpointWriter(accelerator, run_folder, keep=1)
    checkpoints.save(model, optimizer, TrainState(step=1))
    checkpoints.wait()
    train_step(run, 1, learning_rate=1e-4)


@dataclasses.dataclass
class Case:
    peak_phase: str  # the expected one
    model: dict = dataclasses.field(default_factory=dict)
    precision: str = "no"
    micro_batch_size: int = 8
    accumulation: int = 1
    logits_per_chunk: int = 2**26
    optim: OptimSection = dataclasses.field(default_factory=OptimSection)
    compiled: bool = False
    # The loss of preference training.
    loss: Any = None
    teacher: dict = dataclasses.field(default_factory=dict)
    # The weight of the divergence from the teacher.
    beta: float = 0.0


CASES = {
    "float32": Case(TOP),
    "bf16": Case(LOSS, {"vocab_size": 500, "bias": True}, "bf16"),
    "accumulating": Case(
        LOSS, {"vocab_size": 500, "activation_function": "gelu_new"}, accumulation=2
    ),
    "dropout in bf16": Case(LOSS, {"vocab_size": 500, "dropout": 0.1}, "bf16"),
    "checkpointed": Case(BOTTOM, {"n_layer": 6, "checkpointing": "true"}),
    "one block of two checkpointed": Case(TOP, {"n_layer": 6, "checkpointing": "2"}),
    "selective": Case(TOP, {"n_layer": 6, "checkpointing": "selective"}),
    "large vocabulary": Case(
        LOSS, {"vocab_size": 4000, "padded_vocab_size": 4032}, micro_batch_size=4
    ),
    "logits in chunks": Case(LOSS, {"vocab_size": 2000}, logits_per_chunk=2**18),
    "logits in chunks, a frozen head": Case(
        LOSS, {"vocab_size": 2000, "frozen": 1}, logits_per_chunk=2**19
    ),
    "few tokens": Case(EMBEDDING, {"vocab_size": 4000}, micro_batch_size=1, accumulation=2),
    "LoRA with dropout in bf16": Case(
        LOSS, {"lora": {"rank": 4, "dropout": 0.1}, "vocab_size": 500}, "bf16"
    ),
    # few shapes, since each is compiled; not compiled, the step would be the peak
    "8-bit state, compiled": Case(
        TOP,
        {"vocab_size": 128, "n_positions": 128},
        micro_batch_size=1,
        optim=OptimSection(state="8bit"),
        compiled=True,
    ),
    "Muon": Case(LOSS, {"vocab_size": 500}, optim=OptimSection(name="muon")),
    "qwen3, tied, in bf16": Case(
        LOSS,
        {"architecture": "qwen3", "n_kv_head": 2, "extra": {"tie_word_embeddings": True}},
        "bf16",
    ),
    "dpo": Case(LOSS, {"vocab_size": 500}, micro_batch_size=4, loss="dpo"),
    "dpo, logits in chunks": Case(
        LOSS, {"vocab_size": 2000}, micro_batch_size=4, logits_per_chunk=2**18, loss="dpo"
    ),
    "dpo of adapters in bf16, logits in chunks": Case(
        LOSS,
        {"lora": {"rank": 4}, "vocab_size": 2000},
        "bf16",
        micro_batch_size=4,
        logits_per_chunk=2**18,
        loss="dpo",
    ),
    "a teacher": Case(
        LOSS, {"vocab_size": 500}, teacher={"vocab_size": 500, "n_embd": 256, "n_layer": 4}
    ),
    "a teacher in bf16, a mixture, logits in chunks": Case(
        LOSS,
        {"vocab_size": 2000},
        "bf16",
        logits_per_chunk=2**18,
        teacher={"vocab_size": 2000, "n_embd": 64},
        beta=0.5,
    ),
    "Muon with few tokens": Case(
        UPDATE, {"n_positions": 16}, micro_batch_size=1, optim=OptimSection(name="muon")
    ),
}
# combinations of what other cases have
SLOW = (
    *("one block of two checkpointed", "selective", "LoRA with dropout in bf16"),
    *("dropout in bf16", "Muon with few tokens", "qwen3, tied, in bf16", "dpo"),
)


def estimated(case: Case):
    launch = Launch(
        precision=case.precision,
        device="cpu",
        checkpointing=case.model.get("checkpointing", ""),
    )
    with torch.device("meta"):
        model = build(**case.model)
    step = footprint_arguments(Config(align=AlignSection(loss=case.loss), optim=case.optim))
    if case.teacher:
        with torch.device("meta"):
            teacher = Teacher(build(**case.teacher), is_mixture=0 < case.beta < 1)
        step |= {"teacher": teacher, "row_loss": "sum"}
    return footprint(
        model,
        launch,
        micro_batch_size=case.micro_batch_size,
        accumulation=case.accumulation,
        **step | {"block_size": model.config.max_position_embeddings},
    )


@pytest.fixture(scope="module")
def few_objects():
    """Leave what there is to no garbage collection, which would take most of the time of a case."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (case.compiled or name in SLOW))
        for name, case in CASES.items()
    ],
)
def test_footprint_equals_the_cpu_allocators_peak(case, monkeypatch, tmp_path):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", case.logits_per_chunk)

    if case.optim.state == "8bit":
        pytest.importorskip("torchao", reason="torchao is not installed")
    if case.compiled and (shutil.which("g++") is None or " " in torch.__file__):
        pytest.skip("g++ is missing or torch's path has a space: no step is compiled for a CPU")
    estimate = estimated(case)
    copied = estimate.phases[case.peak_phase][CHECKPOINT]
    assert copied > 0
    with torch.compiler.set_stance("default" if case.compiled else "force_eager"):
        peak = peak_allocation(lambda: take_two_steps(case, tmp_path))
    assert estimate.peak == pytest.approx(peak, abs=0.1 * (peak - copied))
    assert estimate.peak_phase == case.peak_phase


@pytest.mark.parametrize(
    ("options", "dropout", "bytes_each"),
    [
        ({}, 0.0, 64),
        ({"precision": "bf16"}, 0.0, 40),
        ({"precision": "bf16", "sharding": "zero", "world_size": 2}, 0.0, 32),
        # the inputs and outputs of norms are not split
        ({"tp_size": 2, "world_size": 2}, 0.0, 16 + 48 / 2),
        ({}, 0.1, 64 + 2),  # bool masks
        # on a CPU factors of the masks, and three matrices for each of 4 heads
        ({"device": "cpu"}, 0.1, 64 + 2 * 4 + 3 * 4 * 4 * 64 / 128),
    ],
)
def test_bytes_of_a_block(options, dropout, bytes_each):
    with torch.device("meta"):
        model = build(dropout=dropout)
    found, _ = block_bytes(model, 64, Launch(**options))
    # and a few for statistics of norms and of attention
    assert found / SIZE["n_embd"] == pytest.approx(bytes_each, rel=0.01)


def test_blocks_are_measured_without_the_loss_of_all_positions(monkeypatch):
    """With a large vocabulary it would take longer than the blocks."""
    sizes = []
    forward = Head.forward

    def counting(head, hidden, *rest):
        sizes.append(len(hidden))
        return forward(head, hidden, *rest)

    monkeypatch.setattr(Head, "forward", counting)
    with torch.device("meta"):
        model = GPTForCausalLM(GPTConfig(n_layer=2, n_embd=32, n_head=4, n_positions=64))
    block_bytes(model, 64, Launch())
    assert sizes == [1, 2]  # two batches: of one text and of two


@pytest.mark.parametrize(
    ("launch", "state", "copied"),
    [
        (Launch(), (4, 4, 8), (0, 12)),
        # one process saves
        (Launch(16, 8), (4, 4, 8), (0, 12)),
        (Launch(**FOUR, sharding="fsdp", reshards=True), (1, 1, 2), (0, 12)),
        (Launch(**FOUR, sharding="fsdp", reshards=True, device="cpu"), (1, 1, 2), (3, 0)),
        # those of one machine
        (Launch(16, 8, sharding="fsdp", reshards=True), (0.25, 0.25, 0.5), (0, 6)),
        # ZeRO keeps float32 weights with the optimizer state
        (Launch(**FOUR, sharding="zero", precision="bf16"), (2, 1, 3), (0, 12)),
        (Launch(**FOUR, sharding="zero", zero_stage=3, precision="bf16"), (0.5, 1, 3), (0, 12)),
    ],
)
def test_bytes_per_parameter(launch, state, copied):
    with torch.device("meta"):
        model = build()
    estimate = footprint(model, launch, micro_batch_size=1, block_size=64, accumulation=2)
    copies = {phase[CHECKPOINT] for phase in estimate.phases.values()}
    parts = estimate.phases[LOSS]
    found = [parts[part] for part in ("weights", "gradients", "optimizer")]
    found += [*copies, estimate.host_copy]
    each = [size / model.num_parameters() for size in found]
    assert each == pytest.approx([*state, *copied])


def test_checkpoint_copy_has_float32_state_of_trainable_parameters():
    with torch.device("meta"):
        model = build(frozen=1)
    trainable = model.num_parameters(only_trainable=True)
    assert trainable < model.num_parameters()
    for state in ("float32", "8bit"):
        options = {"micro_batch_size": 1, "block_size": 64, "accumulation": 1}
        copied = footprint(model, Launch(), **options, optim=OptimSection(state=state)).host_copy
        assert copied == pytest.approx(4 * model.num_parameters() + 8 * trainable)
