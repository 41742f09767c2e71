"""Propose how to lay a training run out over GPUs, with reasons."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.schema import Config
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.planning.candidates import Candidate, Cluster, candidates, problem_with

NEARLY = 1.03  # a simpler layout is proposed if its step is at most this many times as long


@dataclass(frozen=True)
class Proposal:
    """The proposed layout, None if none fits, and the best of each family: the fastest that
    fits, or the smallest.
    """

    cluster: Cluster
    layout: Candidate | None
    best: list[Candidate]
    reasons: list[str]


def propose(config: Config, model: PreTrainedModel, cluster: Cluster, mfu: float) -> Proposal:
    """The fastest layout that fits for a run of `config`, or the simplest of those that are
    nearly as fast.
    """
    found = candidates(config, model, cluster, mfu)
    by_cost = sorted(found, key=lambda one: (cluster.lacks(one), one.step_seconds), reverse=True)
    best = {candidate.place.family: candidate for candidate in by_cost}
    fitting = [candidate for candidate in by_cost if not cluster.lacks(candidate)]
    if not fitting:
        return Proposal(cluster, None, [*best.values()], [_misfit(config, cluster, found)])
    limit = NEARLY * fitting[-1].step_seconds
    nearly = [candidate for candidate in fitting if candidate.step_seconds <= limit]
    chosen = min(nearly, key=lambda one: (one.place.complexity, one.step_seconds))
    best[chosen.place.family] = chosen
    listed = sorted(best.values(), key=lambda one: one.place.complexity)
    usable = format_bytes(cluster.usable_memory)
    reasons = [f"{chosen.place.name} needs {_memory(chosen)} of {usable} usable on each GPU"]
    reasons += [_why_not(other, chosen, cluster) for other in listed if other is not chosen]
    return Proposal(cluster, chosen, listed, [*reasons, *_missing(config, cluster, listed)])


def _misfit(config: Config, cluster: Cluster, found: list[Candidate]) -> str:
    if not found:
        tokens, size = config.train.tokens_per_step, config.data.block_size
        return (
            f"train.tokens_per_step: {tokens // size:,} sequences per step cannot be shared by "
            f"{cluster.gpus:,} GPUs; make it a multiple of {cluster.gpus:,} × data.block_size "
            f"{size:,} = {cluster.gpus * size:,}, or use fewer GPUs"
        )
    smallest = min(found, key=lambda candidate: candidate.memory.peak)
    return (
        f"no layout over {cluster.gpus} × {cluster.name} fits: the smallest, "
        f"{smallest.place.name} with micro-batches of {smallest.micro_batch_size}, needs "
        f"{_memory(smallest)} of each GPU, and {format_bytes(cluster.usable_memory)} are usable; "
        "take more GPUs, a shorter data.block_size or a smaller model"
    )


def _why_not(other: Candidate, chosen: Candidate, cluster: Cluster) -> str:
    name = other.place.name
    if cluster.lacks(other):
        return f"{name} does not fit: it needs {_memory(other)} of each GPU"
    if other.step_seconds < chosen.step_seconds:
        gain = chosen.step_seconds / other.step_seconds - 1
        return f"{name} would be {gain:.1%} faster only, and is less simple"
    times = [seconds(time) for time in (other.step_seconds, chosen.step_seconds)]
    waiting = seconds(other.waiting_seconds + other.bubble_seconds)
    return (
        f"{name} fits, but a step takes {times[0]} instead of {times[1]}, {waiting} of it waiting"
    )


def _missing(config: Config, cluster: Cluster, listed: list[Candidate]) -> Iterator[str]:
    """Why there is no layout with tensor, context or pipeline parallelism at all."""
    families = {name for candidate in listed for name in candidate.place.family.split(" × ")}
    sizes = [size for size in divisors(cluster.gpus)[1:] if cluster.per_machine % size == 0]
    for kind, name in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        if kind.upper() in families or not sizes:
            continue
        if problem := problem_with(config, cluster, **{kind: sizes[0]}):
            yield f"no {name} parallelism: {problem}"


def _memory(candidate: Candidate) -> str:
    return format_bytes(candidate.memory.peak)


def seconds(value: float) -> str:
    """Such as `0.12 s`, `9.56 s` or `437 s`."""
    digits = ",.0f" if value >= 100 else ".3g" if value >= 1 else ".2g"
    return f"{value:{digits}} s"
