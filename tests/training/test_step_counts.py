"""The cost of a step in counted operations, which do not depend on how busy the machine is."""

import gc
import platform
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2LMHeadModel, GPT2Model
from transformers.utils import output_capturing

from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.evaluation.loss import evaluate_blocks
from nanogpt_hf.methods.run import Run
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.training import step
from nanogpt_hf.training.build import build_run, keep_freed_memory
from nanogpt_hf.training.step import seed_dropout, train_step

LAYERS = 2
ACCUMULATION = 3
STREAM = TokenStream([(np.arange(1000) % 64).astype(np.uint16)])


@pytest.fixture
def build(forget_accelerate, monkeypatch, write_recipe):
    """Build a run of a tiny model with three micro-batches per step, and take its first step."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    sizes = {"n_layer": LAYERS, "n_head": 2, "n_embd": 16, "n_positions": 8}
    knobs = {f"model__{name}": size for name, size in sizes.items()} | {"data__block_size": 8}

    def build(architecture: str = "gpt2", accumulation: int = ACCUMULATION) -> Run:
        batch = {"train__micro_batch_size": 2, "train__tokens_per_step": accumulation * 2 * 8}
        more = {"dropout": 0.1, "bias": False} if architecture == "gpt2" else {}
        more = {f"model__{name}": value for name, value in more.items()}
        config = load_config(
            write_recipe(**knobs, **batch, **more, model__architecture=architecture)
        )
        plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
        data = SimpleNamespace(train=TokenBlocks(STREAM, 8), vocab_size=64)
        data.end_of_text_id = data.end_of_turn_id = None
        run = build_run(config, Accelerator(gradient_accumulation_plugin=plugin), data)
        train_step(run, 0, 1e-3)
        return run

    yield build
    forget_accelerate()


BUCKETS = []  # gradient buckets that DDP has passed to the hook


def _hooked(init):
    def hook(_, bucket):
        BUCKETS.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def build(self, *arguments, **options):
        init(self, *arguments, **options)
        self.register_comm_hook(None, hook)

    return build


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "llama", "nanochat", "olmo2"])
def test_step_has_no_device_synchronization(architecture, build, counted):
    run = build(architecture)
    count = counted(lambda: train_step(run, 1, 1e-3))
    assert count["_local_scalar_dense"] == count["equal"] == count["nonzero"] == 0
    # the counter detects it
    assert counted(lambda: torch.ones(1).item())["_local_scalar_dense"] == 1


def test_step_dispatches_bounded_operations(build, counted):
    run = build()
    count = counted(lambda: train_step(run, 1, 1e-3))
    assert count == counted(lambda: train_step(run, 7, 1e-3))  # the same at every step
    assert count["_fused_adamw_"] == len(run.optimizer.param_groups) == 2
    assert count["_foreach_norm"] == count["_foreach_mul_"] == 1
    # forward, and two of backward, for each matrix
    assert count["mm"] == ACCUMULATION * 3 * (6 * LAYERS + 1)
    assert sum(count.values()) <= 1240  # 1,237 with torch 2.13, dropout included


def test_steps_keep_no_tensors(build):
    run = build()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    train_step(run, 1, 1e-3)
    before = tensors()
    for number in range(2, 5):
        train_step(run, number, 1e-3)
    assert tensors() <= before  # garbage of other tests may go meanwhile
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture",
    ["gpt2", *(pytest.param(other, marks=pytest.mark.slow) for other in ("qwen3", "nanochat"))],
)
def test_compiled_graphs_are_shared_by_blocks_chunks_and_steps(architecture, build, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 8 * 64)  # two chunks per micro-batch
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    run = build(architecture)

    def evaluate() -> None:
        evaluate_blocks(
            *(run.accelerator, run.model, run.objective),
            TokenBlocks(STREAM, 8, partial=True),
            micro_batch_size=2,
            tokens="all",
            bytes_per_token=1.0,
        )

    evaluate()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 3  # a block in training, a block in evaluation, the loss
    for number, learning_rate in enumerate((1e-3, 2e-3, 3e-3), start=1):
        train_step(run, number, learning_rate)
        evaluate()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_evaluations_checkpoints_and_saved_models_compile_nothing(train, tmp_path, monkeypatch):
    """A GPU would wait for the compiler in the middle of a run."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []

    def counted_step(*arguments):
        result = train_step(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    monkeypatch.setattr(step, "train_step", counted_step)
    registry = output_capturing._CAN_RECORD_REGISTRY
    with mock.patch.dict(registry):
        # The test begins as in a process of its own: others have built a GPT-2 of transformers.
        for kind in (GPT2Model, GPT2LMHeadModel):
            registry.pop(str(kind), None)
        # best/ is saved at steps 2 and 4, final/ at step 6.
        run = train(tmp_path / "run", eval__every=2, eval__samples=["the"])
        assert (run.best / "config.json").is_file()
        assert str(GPT2LMHeadModel) in registry
    torch.compiler.reset()
    # The first step is between the evaluation at step 0 and the others.
    assert graphs == graphs[:1] * 6
    assert counters["stats"]["unique_graphs"] == graphs[0] > 1


def _is_in_graph(event) -> bool:
    """Whether a profiled event is in a compiled graph, or an operation in another one."""
    above = event.cpu_parent
    while above is not None:
        if above.name.startswith(("Torch-Compiled", "CompiledFunction", "aten::")):
            return True
        above = above.cpu_parent
    return False


def test_compiled_step_leaves_few_operations_to_the_host(build, monkeypatch):
    """The host of a GPU starts each of them as a kernel, and small steps wait for it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    torch.compiler.reset()
    run = build(accumulation=1)
    train_step(run, 1, 1e-3)
    # Without acc_events torch 2.11 warns.
    with torch.profiler.profile(acc_events=True) as profile:
        train_step(run, 2, 1e-3)
    torch.compiler.reset()
    count = Counter(event.name for event in profile.events() if not _is_in_graph(event))
    # From the tokens to the loss.
    assert sum(n for name, n in count.items() if name.startswith("Torch-Compiled")) == 1
    assert count["CompiledFunctionBackward"] == 1
    operations = {name[6:]: n for name, n in count.items() if name.startswith("aten::")}
    # These start no kernel.
    for name in ("to", "detach", "reshape", "lift_fresh"):
        operations.pop(name, None)
    # The loss divided by targets and accumulation, and back; clipping; the update of two groups.
    assert sum(operations.values()) <= 22, operations


def test_gradients_are_reduced_once_per_step(build, monkeypatch, counted):
    # one process of a fake group of two: collectives are counted, not sent
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(
        DistributedDataParallel, "__init__", _hooked(DistributedDataParallel.__init__)
    )
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        run = build()
        assert run.accelerator.num_processes == 2
        train_step(run, 1, 1e-3)  # DDP broadcasts the order of its buckets in its second step
        BUCKETS.clear()
        count = counted(lambda: train_step(run, 2, 1e-3))
    finally:
        dist.destroy_process_group()
    assert len(BUCKETS) == 1  # one bucket with all gradients
    assert not [name for name in count if name.startswith("c10d")]  # no other collective


def test_seed_dropout_equals_manual_seed():
    seed_dropout(torch.device("cpu"), 7)
    ours = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(ours, torch.rand(3))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_reused_by_the_next_step():
    import resource

    def new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for tensor in [torch.ones(2**20) for _ in range(16)]:  # 4 MiB each: 16,384 pages in all
            del tensor
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    # Of a heap that other tests left fragmented a part may grow; without the function all pages are
    # new.
    assert min(new_pages() for _ in range(5)) < 8192
