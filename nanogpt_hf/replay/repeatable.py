"""Choose the steps of a run to repeat, and check that this machine can repeat them."""

import itertools
import logging
import math
import random
from typing import Any

import torch

from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.accelerate_config import (
    chooses_for_one_gpu,
    requested_precision,
    stated_compiler,
)
from nanogpt_hf.distributed.accelerator import is_deterministic, precision_of
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.methods.run import Run
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.provenance import branched_at, read_starts

logger = logging.getLogger(__name__)


def check_repeatable(
    folder: RunFolder, config: Config, mesh: Mesh, segments: list[tuple[int, int]]
) -> None:
    """Raises UserError if the processes of this accelerate config cannot repeat the run."""
    if mesh.pp_size > 1:
        raise UserError("verify does not repeat pipeline stages: leave pp_size out")
    if config.finetune.unfreeze_every:
        raise UserError(f"{folder.path}: verify does not repeat finetune.unfreeze_every")
    if not folder.machine.is_file() and mesh.is_main:
        logger.warning(
            f"{folder.machine}: is lost, so the number of processes, the precision, the compiler "
            "and the threads of the run are not known: a difference may be due to them"
        )
    now = requested_precision().replace("no", "fp32")
    compiler = compiler_at(folder, segments[0][0])
    for start in _starts_in(folder, segments):
        count = start.get("processes")
        precision = start.get("precision", now)
        if precision != now:
            raise UserError(
                f"{folder.path}: was trained in {precision}, and the accelerate config sets {now}; "
                "repeat it under a config with that mixed_precision, by launch --config_file F"
            )
        recorded = start.get("dynamo", compiler)
        if recorded != compiler:
            raise UserError(
                f"{folder.path}: was trained with dynamo_backend {recorded}, and the accelerate "
                f"config sets {compiler}: compiled kernels round otherwise; repeat it under a "
                "config with that dynamo_backend, by launch --config_file F"
            )
        # Gradient groups make the order of a sum of gradients independent of the processes.
        if count not in (None, mesh.world_size) and not config.train.gradient_groups:
            raise UserError(
                f"{folder.path}: was trained on {plural(count, 'process')}, and "
                f"{mesh.world_size} cannot repeat it bit for bit without train.gradient_groups; "
                f"start {count} under the run's accelerate config, by launch --config_file F"
            )


def compiler_at(folder: RunFolder, step: int) -> str:
    """The dynamo_backend by which steps after `step` are repeated: the accelerate config's, or,
    where a run chooses it by itself, the one that the run had there.
    """
    if chooses_for_one_gpu() and not stated_compiler():
        starts = _starts_in(folder, [(step, step + 1)])
        return starts[0].get("dynamo", "no") if starts else "no"
    return stated_compiler() or "no"


def _starts_in(folder: RunFolder, segments: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """The starts that took steps of these segments, as the run has them now: a resume takes the
    steps after its checkpoint again.
    """
    found = []
    # Backwards, since a start's steps count up to where a later one began.
    end = math.inf
    for start in reversed(read_starts(folder)):
        begin = start.get("step", 0)
        if any(max(begin, first) < min(end, last) for first, last in segments):
            found.append(start)
        end = min(end, begin)
    return found


def rounding_bound(folder: RunFolder, run: Run) -> float:
    """The limit for the distance of repeated numbers from recorded ones, as a share of them: 0 if
    the run repeats its bytes, else the rounding of its products.
    """
    recorded = all(start.get("deterministic", True) for start in read_starts(folder))
    if recorded and is_deterministic(run.config, run.accelerator.device):
        return 0.0
    precision = precision_of(run.accelerator)
    # GPUs multiply float32 as TF32, which has as many digits as float16.
    dtype = torch.float16 if precision in ("fp32", "fp16") else torch.bfloat16
    return torch.finfo(dtype).eps


def segments_to_verify(
    folder: RunFolder, stated: tuple[int, int] | None, sample: int | None
) -> list[tuple[int, int]]:
    """Choose segments, a first and a last step each, which have checkpoints: by default one from
    the oldest checkpoint to the newest, or `sample` of the segments between neighbouring
    checkpoints, the same at each call.

    A segment may begin at step 0, but in a branch at its first checkpoint. Raises UserError for
    `stated` steps without checkpoints.
    """
    kept = [step_of(path) for path in folder.checkpoint_folders()]
    starts = kept if branched_at(folder)[1] else [0, *kept]
    if len(starts) < 2:
        raise UserError(f"{folder.path}: has no two checkpoints to compare")
    # With a single checkpoint the only segment is from the start of the run to it.
    if len(kept) < 2:
        kept = starts
    if sample:
        segments = list(itertools.pairwise(kept))
        return sorted(random.Random(0).sample(segments, min(sample, len(segments))))
    first, last = stated or (kept[0], kept[-1])
    if first not in starts or last not in kept or first >= last:
        raise UserError(
            f"--steps {first}:{last}: expected two of the steps {', '.join(map(str, starts))}, the "
            "first below the second"
        )
    return [(first, last)]


def seconds_to_repeat(folder: RunFolder, segments: list[tuple[int, int]], mesh: Mesh) -> float:
    """Estimate how long segments take if each process computes as fast as each of the run."""
    starts = read_starts(folder)
    processes = starts[-1].get("processes", 1) if starts else 1

    def at(step: int) -> float:
        """Seconds of training until a step, as its checkpoint has them."""
        return read_checkpoint(folder.checkpoint(step)).state.seconds if step else 0.0

    seconds = sum(at(last) - at(first) for first, last in segments)
    return processes / mesh.world_size * seconds
