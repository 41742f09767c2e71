"""What two processes hold and send in a step, tensor by tensor, against the estimate."""

import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import state
from accelerate.utils import DistributedType
from accelerate.utils.other import get_free_port
from torch._subclasses.fake_tensor import is_fake

from allocations import peak_allocation
from cpu_ring import allow_cpu_ring
from nanogpt_hf.bench.workload import communicated_bytes, synthetic_data
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.accelerate_config import check_launch
from nanogpt_hf.distributed.accelerator import build_accelerator
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.methods.terms import next_token_loss
from nanogpt_hf.planning.estimate import planned_model
from nanogpt_hf.planning.footprint import footprint
from nanogpt_hf.planning.memory import LOSS
from nanogpt_hf.planning.transfers import transfers
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.build import build_run
from nanogpt_hf.training.step import train_step

ACCUMULATION = 3
VALUES = {
    "model.n_layer": 3,
    "model.n_head": 4,
    "model.n_embd": 64,
    "model.n_positions": 16,
    "model.dropout": 0.0,
    "data.source": "python-docs",
    "data.tokenizer": "gpt2",
    "data.block_size": 16,
    "data.dir": "none",
    "train.micro_batch_size": 2,
    "train.tokens_per_step": 16 * 2 * 2 * ACCUMULATION,
    "optim.warmup_steps": 0,
}


def on_cpus(processes: int, **sizes: int) -> Launch:
    return Launch(processes, processes, device="cpu", **sizes)


def sharded(processes: int, **sizes: int) -> Launch:
    return replace(on_cpus(processes, **sizes), sharding="fsdp", reshards=True)


LAYOUTS = {
    "DDP": on_cpus(2),
    "DDP in bf16": replace(on_cpus(2), compression="bf16"),
    "PP × TP": on_cpus(4, pp_size=2, tp_size=2),
    "FSDP2": sharded(2),
    "HSDP": sharded(4, dp_replicate_size=2),
    "TP": on_cpus(2, tp_size=2),
    "TP × FSDP2": sharded(4, tp_size=2),
    "TP of gemma2": on_cpus(2, tp_size=2),
    "TP in bf16": replace(on_cpus(2, tp_size=2), precision="bf16"),
    "CP": sharded(2, cp_size=2),
    "CP by ring": sharded(2, cp_size=2),
    "PP": on_cpus(2, pp_size=2),
    "PP × FSDP2": sharded(4, pp_size=2),
    "EP": on_cpus(2, ep_size=2),
    "EP × DDP": on_cpus(4, ep_size=2),
    "EP × FSDP2": sharded(4, ep_size=2),
}
REHEARSED = ("HSDP", "CP", "TP × FSDP2", "PP", "PP × FSDP2", "EP")
QUICK = ("DDP", "FSDP2")
# all experts are chosen for each token, so that all have equal work
EXPERTS = {
    "model.architecture": "qwen3_moe",
    "model.extra": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
}


def config_of(kind: str) -> Config:
    """Two processes do not divide one head, and take the ring."""
    heads = {"model.n_head": 1} if kind == "CP by ring" else EXPERTS if "EP" in kind else {}
    # It scales its embedding.
    if "gemma2" in kind:
        heads = {"model.architecture": "gemma2"}
    tokens = 16 * 2 * ACCUMULATION * max(2, LAYOUTS[kind].dp_size)
    return load_config(None, VALUES | heads | {"train.tokens_per_step": tokens}, name="tiny")


def local_bytes(tensors) -> int:
    return sum(
        getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors if tensor is not None
    )


def whole_gradient_bytes(model) -> int:
    """Bytes of gradients that FSDP2 holds next to those of the shards."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if hasattr(module, "unshard")
    ]
    parameters = [parameter for group in groups if group for parameter in group.fsdp_params]
    return local_bytes(parameter.unsharded_accumulated_grad for parameter in parameters)


def let_gloo_free_first() -> None:
    """Wait after each collective until gloo's thread has released its buffers.

    The profiler does not see what another thread frees.
    """
    wait = torch.distributed.Work.wait

    def patient(self, *options):
        done = wait(self, *options)
        time.sleep(0.005)
        return done

    torch.distributed.Work.wait = patient


def on_rank(rank: int, port: int, kind: str, file: Path) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each collection below would search what the parent has
    # accelerate slices its mesh in a way that torch will not support for ever
    warnings.simplefilter("ignore")
    os.environ.update(Mesh.of(LAYOUTS[kind], rank).environment(), MASTER_PORT=str(port))
    os.environ["ACCELERATE_USE_CPU"] = str(LAYOUTS[kind].kind != "FSDP2")
    # accelerate does not have this layout on CPUs.
    if LAYOUTS[kind].kind == "FSDP2":
        backend = "gloo", DistributedType.MULTI_GPU
        state.PartialState._prepare_backend = lambda self, *_, **__: backend
    if kind == "CP by ring":
        allow_cpu_ring()
    config = config_of(kind)
    accelerator = build_accelerator(
        check_launch(config, Mesh.from_environment()), RunFolder(file.parent / "run")
    )
    run = build_run(config, accelerator, synthetic_data(config, 50257))
    held: dict = {"gradients": [], "whole gradients": []}

    def objective(model, batch):
        held["gradients"].append(local_bytes(parameter.grad for parameter in model.parameters()))
        held["whole gradients"].append(whole_gradient_bytes(model))
        return next_token_loss(model, batch)

    run.objective = objective
    train_step(run, 0, 1e-3)
    held["sent"] = communicated_bytes(lambda: train_step(run, 1, 1e-3))
    held["weights"] = local_bytes(run.model.parameters())
    states = run.optimizer.state.values()
    held["optimizer"] = local_bytes(
        value for values in states for name, value in values.items() if name != "step"
    )
    run.objective = next_token_loss
    let_gloo_free_first()
    held["peak"] = min(peak_allocation(lambda: train_step(run, 2, 1e-3)) for _ in range(2))
    gc.collect()
    of_model = {id(parameter) for parameter in run.model.parameters()}
    others = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
    others = [each for each in others if id(each) not in of_model and not is_fake(each)]
    # FSDP2's whole parameters stay, with freed storages
    others = [getattr(each, "_local_tensor", each) for each in others if not each.is_meta]
    held["others"] = sum(each.untyped_storage().nbytes() for each in others)
    file.write_text(json.dumps(held))
    os._exit(0)  # gloo processes sometimes abort during teardown


def rehearsed(kind: str, file: Path) -> None:
    from nanogpt_hf.bench import rehearsal

    rehearsal.MICRO_BATCHES = 2 * ACCUMULATION  # all of a step
    found = rehearsal.rehearse(config_of(kind), LAYOUTS[kind])
    file.write_text(json.dumps(dataclasses.asdict(found)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in LAYOUTS],
)
def measured(request, tmp_path_factory):
    """(kind, what each of two processes held and sent)."""
    if sys.platform != "linux":
        pytest.skip("needs fork")
    folder = tmp_path_factory.mktemp("shards")
    kind = request.param
    port = get_free_port()
    files = [folder / f"{rank}.json" for rank in range(4)]
    tasks = [(on_rank, rank, port, kind, files[rank]) for rank in range(LAYOUTS[kind].world_size)]
    in_processes(*tasks)
    return kind, [json.loads(file.read_text()) for *_, file in tasks]


def in_processes(*tasks: tuple) -> None:
    """Call each function with its arguments in a process of its own."""
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    if importlib.util.find_spec("deepspeed"):
        # accelerate imports it to unwrap a model: once for all processes
        importlib.import_module("deepspeed")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=function, args=options) for function, *options in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()
        assert process.exitcode == 0


pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def test_processes_hold_the_estimated_bytes(measured):
    kind, ranks = measured
    launch = LAYOUTS[kind]
    step = {"micro_batch_size": 2, "block_size": 16, "accumulation": 2 * ACCUMULATION}
    phase = footprint(planned_model(config_of(kind)), launch, **step).phases[LOSS]
    of_peak = ranks[-1:] if launch.pp_size > 1 else ranks  # here the last stage, which has the loss
    for part in ("weights", "optimizer"):  # a row of odd matrices more on some processes
        assert max(held[part] for held in of_peak) == pytest.approx(phase[part], rel=1e-3), part
        assert min(held[part] for held in of_peak) == pytest.approx(phase[part], rel=2e-3)
    # before each micro-batch of two steps: none before the first, then those of the shards only,
    # which are as large as the weights
    for held in ranks:
        accumulated = [phase["weights"]] * (len(held["gradients"]) // 2 - 1)
        # micro-batches of stages overlap; HSDP keeps partial sums outside of the parameters
        if launch.pp_size == 1 and not (launch.kind == "FSDP2" and launch.copies > 1):
            assert held["gradients"] == pytest.approx([0, *accumulated] * 2, rel=2e-3)
        assert not any(held["whole gradients"])


def test_processes_send_the_estimated_bytes(measured):
    kind, ranks = measured
    launch = LAYOUTS[kind]
    model = planned_model(config_of(kind))
    accumulation = config_of(kind).train.tokens_per_step // (2 * 16 * launch.dp_size)
    moved = transfers(model, launch, micro_batch_size=2, block_size=16, accumulation=accumulation)
    assert sum(transfer.size for transfer in moved) == pytest.approx(
        sum(ranks[0]["sent"].values()), rel=0.01
    )


@pytest.mark.one_row_per
@pytest.mark.parametrize("measured", ["DDP", "FSDP2", "TP", *REHEARSED], indirect=True)
def test_a_rehearsal_needs_and_sends_what_processes_do(measured, tmp_path):
    kind, ranks = measured
    in_processes((rehearsed, kind, tmp_path / "rehearsal.json"))
    found = json.loads((tmp_path / "rehearsal.json").read_text())
    if LAYOUTS[kind].pp_size > 1:  # the stage that needs the most
        half = len(ranks) // 2
        ranks = ranks[half:] if "stage 2" in found["process"] else ranks[:half]
    # without the single numbers that processes agree on
    measured_bytes = {kind: size for kind, size in ranks[0]["sent"].items() if size > 100}
    found["sent"] = {kind: size for kind, size in found["sent"].items() if size > 100}
    assert found["sent"] == pytest.approx(measured_bytes, rel=0.01)
    in_step = found["peak"] - found["state"]
    peak = min(held["peak"] for held in ranks)
    assert in_step == pytest.approx(peak, abs=0.03 * found["peak"])
    waits = [line for line in found["waits"] if "_rows_by_process" not in line]
    assert (waits, bool(found["waits"])) == ([], "EP" in kind)


def test_processes_keep_no_parameters_of_before_the_split(measured):
    _, ranks = measured
    assert [held["others"] for held in ranks] == [0] * len(ranks)
