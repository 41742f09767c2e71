"""Layouts of a run over GPUs: what each costs, by arithmetic, and which to propose, with reasons.

Data, tensor, context, pipeline and expert parallelism, and sharding.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.pipeline_stages import head_in_blocks, split_blocks
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.planning.footprint import footprint
from nanogpt_hf.planning.hardware import LINK_SHARE, USABLE_MEMORY, Gpu
from nanogpt_hf.planning.memory import Footprint
from nanogpt_hf.planning.steps import flops_per_token, footprint_arguments
from nanogpt_hf.planning.transfers import COMPUTATION, LAST_BACKWARD, Transfer, transfers

# A simpler layout is proposed if its step is at most this many times as long, or longer by
# milliseconds that are not estimated: transfers begin late, and small steps wait for the host.
NEARLY = 1.03
MILLISECONDS = 1.0


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal machines."""

    gpus: int
    name: str  # the GPU's
    gpu: Gpu
    per_machine: int
    network: float  # bytes per second and GPU, between machines, in one direction

    @property
    def usable_memory(self) -> float:
        return USABLE_MEMORY * self.gpu.memory

    def lacks(self, candidate: "Candidate") -> float:
        """Bytes of memory that a GPU lacks for it; 0 if it fits."""
        return max(0.0, candidate.memory.peak - self.usable_memory)


@dataclass(frozen=True)
class Candidate:
    """A launch with a micro-batch, and its estimated costs on one GPU."""

    launch: Launch
    micro_batch_size: int
    accumulation: int
    memory: Footprint
    transfers: list[Transfer]
    # Seconds of a step: of computation, of communication that nothing overlaps, and of waiting for
    # other stages of a pipeline.
    compute_seconds: float
    waiting_seconds: float
    bubble_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.waiting_seconds + self.bubble_seconds

    def bytes_sent(self, between_machines: bool) -> float:
        """Per step, by one GPU, inside its machine or between machines."""
        parts = self.transfers
        # Of a group that spans machines, one of `neighbors` parts crosses the network.
        crossing = sum(part.size / part.neighbors for part in parts if part.neighbors)
        return crossing if between_machines else sum(part.size for part in parts) - crossing


def candidates(
    config: Config, model: PreTrainedModel, cluster: Cluster, mfu: float
) -> list[Candidate]:
    """Every layout that the recipe can be trained in, costed.

    `mfu`: the share of the peak FLOPs while computing.
    """
    per_token = flops_per_token(config, model)
    seconds = (
        config.train.tokens_per_step * per_token / (cluster.gpus * cluster.gpu.bf16_flops * mfu)
    )
    found = []
    for launch in _launches(config, model, cluster):
        # A backward pass costs two forward passes, and checkpointing repeats the forward pass:
        # 4 parts instead of 3.
        compute = seconds * (4 / 3 if launch.checkpointing else 1)
        found += _costed(config, model, cluster, launch, compute)
    return found


def _launches(config: Config, model: PreTrainedModel, cluster: Cluster) -> Iterator[Launch]:
    """Every launch that the recipe can be trained on: docs/machines.md has what combines.

    Tensor and context parallelism communicate most, and stay inside a machine.
    """
    gpus = cluster.gpus
    per_machine = cluster.per_machine
    # A layout is possible if one sequence per micro-batch is.
    smallest = replace_knobs(config, {"train.micro_batch_size": 1})
    # Experts are shared by numbers of processes that divide both.
    shares = divisors(math.gcd(gpus, *(experts.num_experts for experts in experts_of(model))))
    local = min(gpus, per_machine)
    one = Launch(gpus, local, precision="bf16")

    def fits(launch: Launch) -> bool:
        try:
            check_layout(smallest, launch, model)
        except UserError:
            return False
        return True

    for tp, cp, pp in itertools.product(divisors(gpus), repeat=3):
        if gpus % (tp * cp * pp) or per_machine % (tp * cp):
            continue
        inside = per_machine // tp
        plain = tp == cp == pp == 1
        # The other layouts compile with limits.
        compiler = "inductor" if plain else "no"
        whole = replace(one, tp_size=tp, cp_size=cp, pp_size=pp, compiler=compiler)
        ranks = whole.dp_cp_size
        # One process, or DDP. What splits the model is sharded, too; HSDP shards inside a machine.
        kinds = [whole]
        if ranks > 1:
            sharded = replace(whole, sharding="fsdp", reshards=True)
            kinds = [sharded]
            if pp == 1 and ranks > inside > 1 and ranks % inside == 0 and inside % cp == 0:
                kinds.insert(0, replace(sharded, dp_replicate_size=ranks // inside))
            if tp == cp == 1:
                kinds.insert(0, whole)
        # The kinds of data parallelism here are refused for the same reasons.
        if not fits(kinds[-1]):
            continue
        for ep, level, kind in itertools.product(shares if plain else [1], ("", "true"), kinds):
            launch = replace(kind, ep_size=ep, checkpointing=level)
            if ep == 1 or fits(launch):
                yield launch


def _costed(
    config: Config, model: PreTrainedModel, cluster: Cluster, launch: Launch, compute: float
) -> Iterator[Candidate]:
    """Return the layouts of a launch: with the largest micro-batch that fits, or 1; in a pipeline
    with all that fit.
    """
    block_size = config.data.block_size
    sequences = config.train.tokens_per_step // block_size // launch.dp_size
    step = footprint_arguments(config)
    for size in reversed(divisors(sequences)):
        accumulation = sequences // size
        batch = {"micro_batch_size": size, "block_size": block_size}
        memory = footprint(model, launch, micro_batch_size=size, accumulation=accumulation, **step)
        # A pipeline needs a micro-batch per stage.
        if accumulation < launch.pp_size or (size > 1 and memory.peak > cluster.usable_memory):
            continue
        moved = transfers(model, launch, accumulation=accumulation, **batch)
        waiting, bubble = waiting_seconds(moved, compute, cluster, launch, accumulation)
        bubble += compute * (_slowest_stage(model, launch.pp_size) - 1)
        yield Candidate(launch, size, accumulation, memory, moved, compute, waiting, bubble)
        # The largest that fits is the fastest, but a pipeline with more micro-batches idles less.
        if launch.pp_size == 1:
            return


def _slowest_stage(model: PreTrainedModel, stages: int) -> float:
    """Measure how long the slowest stage of a pipeline computes, which sets the pace, as a multiple
    of the mean.
    """
    blocks = model.config.num_hidden_layers
    # The head takes as long as this number of blocks.
    head = head_in_blocks(model)
    *others, last = map(len, split_blocks(blocks, head, stages)) if stages > 1 else (blocks,)
    return max(*others, last + head, 0) * stages / (blocks + head)


def waiting_seconds(
    moved: list[Transfer], compute: float, cluster: Cluster, launch: Launch, accumulation: int
) -> tuple[float, float]:
    """Seconds per step that a GPU waits for communication, and for other stages of its pipeline.

    Gathers and reduce-scatters run beside the computation; the all-reduce of gradients beside
    the last backward pass, two thirds of a micro-batch; tensor- and context-parallel collectives
    and a pipeline's messages beside nothing. A pipeline of p stages with m micro-batches is idle
    for (p - 1) / m of the busy time: (p - 1) / (m + p - 1) of a step (GPipe, arXiv:1811.06965;
    1F1B's is the same, arXiv:2104.04473). Latency is not counted.
    """
    # Seconds of communication, by what it runs at the same time as.
    seconds = {"": 0.0, COMPUTATION: 0.0, LAST_BACKWARD: 0.0}
    for transfer in moved:
        rate = min(cluster.gpu.link, cluster.network * transfer.neighbors or cluster.gpu.link)
        seconds[transfer.overlaps] += transfer.size / (LINK_SHARE * rate)
    waiting = seconds[""] + max(0.0, seconds[COMPUTATION] - compute)
    bubble = (launch.pp_size - 1) / accumulation * (compute + waiting)
    last = seconds[LAST_BACKWARD] - 2 / 3 * compute / accumulation
    return waiting + max(0.0, last), bubble


@dataclass(frozen=True)
class Proposal:
    """Proposed layout, and the best of each family: the fastest that fits, or the smallest."""

    cluster: Cluster
    layout: Candidate
    best: list[Candidate]


def propose(config: Config, model: PreTrainedModel, cluster: Cluster, mfu: float) -> Proposal:
    """Return the fastest layout that fits for a run of `config`, or the simplest of the layouts
    that are nearly as fast. Raises UserError if none fits.
    """
    found = candidates(config, model, cluster, mfu)
    by_cost = sorted(found, key=lambda one: (cluster.lacks(one), one.step_seconds), reverse=True)
    best = {candidate.launch.family: candidate for candidate in by_cost}
    fitting = [candidate for candidate in by_cost if not cluster.lacks(candidate)]
    if not fitting:
        raise UserError(_misfit(config, cluster, found))
    fastest = fitting[-1].step_seconds
    limit = max(NEARLY * fastest, fastest + MILLISECONDS / 1000)
    # Of layouts that are about as fast, the simplest: estimates are not that exact.
    nearly = [candidate for candidate in fitting if candidate.step_seconds <= limit]
    chosen = min(nearly, key=lambda one: (_complexity(one.launch), one.step_seconds))
    best[chosen.launch.family] = chosen
    listed = sorted(best.values(), key=lambda one: _complexity(one.launch))
    return Proposal(cluster, chosen, listed)


def _complexity(launch: Launch) -> tuple[int, str]:
    """A key that sorts the simplest launch first."""
    kinds = ["one process", "DDP", "FSDP2"].index(launch.kind) + ("HSDP" in launch.sizes)
    several = launch.sizes.keys() & {"PP", "CP", "TP", "EP"}
    return 10 * len(several) + kinds, launch.checkpointing


def _misfit(config: Config, cluster: Cluster, found: list[Candidate]) -> str:
    if not found:
        size = config.data.block_size
        sequences = config.train.tokens_per_step // size
        return (
            f"train.tokens_per_step: {sequences:,} sequences per step cannot be shared by "
            f"{cluster.gpus:,} GPUs; make it a multiple of {cluster.gpus:,} × data.block_size "
            f"{size:,} = {cluster.gpus * size:,}, or use fewer GPUs"
        )
    # What lacks the least memory shows how far the cluster is from it.
    smallest = min(found, key=lambda candidate: candidate.memory.peak)
    return (
        f"no layout over {cluster.gpus} × {cluster.name} fits: the smallest, "
        f"{smallest.launch.name} with micro-batches of {smallest.micro_batch_size}, needs "
        f"{format_bytes(smallest.memory.peak)} of each GPU, and "
        f"{format_bytes(cluster.usable_memory)} are usable; take more GPUs, a shorter "
        "data.block_size or a smaller model"
    )
