"""Propose how to lay a training run out over GPUs, with reasons."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.schema import Config
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.planning.layout import Cluster, Layout, layouts, problem_with

NEARLY = 1.03  # a simpler layout is proposed if its step is at most this many times as long


@dataclass(frozen=True)
class Proposal:
    """The proposed layout, None if none fits, and the best of each family: the fastest that fits, or the smallest."""

    cluster: Cluster
    layout: Layout | None
    best: list[Layout]
    reasons: list[str]


def propose(config: Config, model: PreTrainedModel, cluster: Cluster, mfu: float) -> Proposal:
    """The fastest layout that fits for a run of `config`, or the simplest of those that are nearly as fast."""
    return Candidates(config, model, cluster, layouts(config, model, cluster, mfu)).proposal()


@dataclass(frozen=True)
class Candidates:
    """The layouts of a recipe on a cluster, to choose from."""

    config: Config
    model: PreTrainedModel
    cluster: Cluster
    costed: list[Layout]

    def proposal(self) -> Proposal:
        best = {family: self._best(family) for family in {layout.family: None for layout in self.costed}}
        chosen, fitting = None, [layout for layout in self.costed if not self.cluster.lacks(layout)]
        if fitting:
            limit = NEARLY * min(layout.step_seconds for layout in fitting)
            nearly = [layout for layout in fitting if layout.step_seconds <= limit]
            chosen = min(nearly, key=lambda layout: (layout.rank, layout.step_seconds))
            best[chosen.family] = chosen
        listed = sorted((layout for layout in best.values() if layout), key=lambda layout: layout.rank)
        return Proposal(self.cluster, chosen, listed, list(self._reasons(chosen) if chosen else self._misfit()))

    def _best(self, *families: str) -> Layout | None:
        """The fastest layout of these families that fits, or the smallest; None if there is none."""
        own = [layout for layout in self.costed if layout.family in families]
        return min(own, key=lambda layout: (self.cluster.lacks(layout), layout.step_seconds), default=None)

    def _misfit(self) -> Iterator[str]:
        if not self.costed:
            tokens, size = self.config.train.tokens_per_step, self.config.data.block_size
            yield (
                f"train.tokens_per_step: {tokens // size:,} sequences per step cannot be shared by "
                f"{self.cluster.gpus:,} GPUs; make it a multiple of {self.cluster.gpus:,} × data.block_size {size:,} = "
                f"{self.cluster.gpus * size:,}, or use fewer GPUs"
            )
            return
        smallest = min(self.costed, key=lambda layout: layout.memory.peak)
        checkpointed = ", checkpointed activations" if smallest.place.checkpointing else ""
        yield (
            f"no layout over {self.cluster.gpus} × {self.cluster.name} fits: the smallest, {smallest.name} with "
            f"micro-batches of 1{checkpointed}, needs {format_bytes(smallest.memory.peak)} of each GPU, and "
            f"{format_bytes(self.cluster.usable_memory)} are usable; take more GPUs, a shorter data.block_size or a "
            "smaller model"
        )

    def _reasons(self, chosen: Layout) -> Iterator[str]:
        """Why `chosen`, in plain sentences: from the simplest kind of parallelism up."""
        yield from self._whole_models(chosen)
        place, cluster = chosen.place, self.cluster
        if place.shards > 1:
            parameters, trainable = self.model.num_parameters(), self.model.num_parameters(only_trainable=True)
            whole = 4 * parameters + 4 * trainable + kind_of(self.config.optim).state_bytes(self.model, 1)
            each = format_bytes(whole / (place.shards * place.tp * place.pp))
            yield f"FSDP2 over {place.shards} GPUs leaves each {each} of weights, gradients and optimizer state"
        if cluster.gpus > cluster.per_machine and place.kind == "FSDP2" and place.pp == 1:
            yield from self._other_sharding(chosen)
        if place.checkpointing:
            yield from self._without_checkpointing(chosen)
        yield from self._model_parallelism(chosen)

    def _whole_models(self, chosen: Layout) -> Iterator[str]:
        """About one process and DDP, which hold the whole model on each GPU."""
        usable, simplest = format_bytes(self.cluster.usable_memory), self._best("DDP", "one process")
        if chosen.family in ("DDP", "one process"):
            yield f"each GPU holds the whole model: {format_bytes(chosen.memory.peak)} of {usable} usable"
            if chosen.place.kind == "DDP":
                yield "gradients are summed once per step: no other layout sends less"
        elif simplest and self.cluster.lacks(simplest):
            yield (
                f"{simplest.name} does not fit: the whole model's weights, gradients and optimizer state, and one "
                f"sequence's activations, need {format_bytes(simplest.memory.peak)} of each GPU; {usable} are usable"
            )
        elif simplest:
            yield f"{simplest.name} fits, but {_slower(simplest, chosen)}"
        else:
            sequences = self.config.train.tokens_per_step // self.config.data.block_size
            yield f"no DDP: {self.cluster.gpus} GPUs do not divide the {sequences:,} sequences of a step"

    def _other_sharding(self, chosen: Layout) -> Iterator[str]:
        """Why HSDP and not FSDP2, or the other way round."""
        pair = ("HSDP", "FSDP2") if chosen.place.copies > 1 else ("FSDP2", "HSDP")
        other = self._best(chosen.family.replace(*pair))
        if other and self.cluster.lacks(other):
            yield f"{other.name} does not fit: a copy per {other.place.shards} GPUs needs {_memory(other)} of each"
        elif other:
            yield f"{other.name} fits, but {_slower(other, chosen)}"

    def _without_checkpointing(self, chosen: Layout) -> Iterator[str]:
        own = [other for other in self.costed if other.family == chosen.family and not other.place.checkpointing]
        other = min(own, key=lambda layout: (self.cluster.lacks(layout), layout.step_seconds), default=None)
        if other and self.cluster.lacks(other):
            yield (
                "without activation checkpointing, which costs a third more arithmetic, even one sequence needs "
                f"{_memory(other)} in {other.name}"
            )
        elif other:
            yield f"without activation checkpointing {other.name} fits, but {_slower(other, chosen)}"

    def _model_parallelism(self, chosen: Layout) -> Iterator[str]:
        place = chosen.place
        if place.tp > 1:
            yield (
                f"tensor parallelism inside a machine divides what FSDP2 sends between machines by {place.tp}, and "
                f"lets {place.tp} GPUs share a sequence"
            )
        if place.pp > 1:
            share, zero = ((place.pp - 1) / (slots * chosen.accumulation + place.pp - 1) for slots in (1, 3))
            yield (
                f"a pipeline sends only activations between its {place.pp} stages; with {chosen.accumulation} "
                f"micro-batches its bubble is {share:.1%} of a step, (p - 1) / (m + p - 1); with pp_schedule "
                f"zero_bubble {zero:.1%}, (p - 1) / (3 m + p - 1), for more memory; the table adds the time that the "
                "other stages wait for the slowest one"
            )
        for kind, name in (("TP", "tensor"), ("CP", "context"), ("PP", "pipeline")):
            if self.cluster.gpus > 1 and kind not in chosen.family.split(" × "):
                yield from self._without(kind, name, chosen)

    def _without(self, kind: str, name: str, chosen: Layout) -> Iterator[str]:
        """Why not tensor, context or pipeline parallelism."""
        best = self._best(*(layout.family for layout in self.costed if kind in layout.family.split(" × ")))
        if best and self.cluster.lacks(best):
            yield f"no {name} parallelism: {best.name} would need {_memory(best)}"
        elif best and best.step_seconds < chosen.step_seconds:
            gain = chosen.step_seconds / best.step_seconds - 1
            yield f"no {name} parallelism: {best.name} would be {gain:.1%} faster only, and is less simple"
        elif best:
            yield f"no {name} parallelism: with {best.name} {_slower(best, chosen)}"
        else:
            sizes = [size for size in divisors(self.cluster.gpus) if size > 1 and self.cluster.per_machine % size == 0]
            problems = (problem_with(self.config, self.cluster, **{kind.lower(): size}) for size in sizes)
            yield from (f"no {problem}" for problem in list(problems)[:1] if problem)


def _memory(layout: Layout) -> str:
    return format_bytes(layout.memory.peak)


def _slower(other: Layout, chosen: Layout) -> str:
    text = f"a step would take {seconds(other.step_seconds)} instead of {seconds(chosen.step_seconds)}"
    waits = f"{seconds(other.waiting_seconds)} of it waiting for communication"
    return f"{text}, {waits}" + (f" and {seconds(other.bubble_seconds)} for other stages" if other.place.pp > 1 else "")


def seconds(value: float) -> str:
    """Such as `0.12 s`, `9.56 s` or `437 s`."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s" if value >= 1 else f"{value:.2g} s"
