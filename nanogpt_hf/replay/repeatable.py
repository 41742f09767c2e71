"""Choose the steps of a run to repeat, and check that this machine can repeat them."""

import itertools
import logging
import random
from typing import Any

import torch

from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.accelerate_config import keep_compiler, settled
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
    starts = read_starts(folder)
    for segment in segments:
        # `run_at` prepares the run so.
        mesh_then = keep_compiler(mesh, start_at(starts, segment[0]))
        keeps = mesh_then != mesh
        _check_kernels(folder, starts, segment, settled(mesh_then, config), keeps_compiler=keeps)
        for _, start in _starts_in(starts, *segment):
            count = start.get("processes")
            # Gradient groups make the order of a sum of gradients independent of the processes.
            if count not in (None, mesh.world_size) and not config.train.gradient_groups:
                raise UserError(
                    f"{folder.path}: was trained on {plural(count, 'process')}, and "
                    f"{mesh.world_size} cannot repeat it bit for bit without "
                    f"train.gradient_groups; start {count} under the run's accelerate config, by "
                    "launch --config_file F"
                )


def _check_kernels(
    folder: RunFolder,
    starts: list[dict[str, Any]],
    segment: tuple[int, int],
    mesh: Mesh,
    *,
    keeps_compiler: bool,
) -> None:
    """Raises UserError if `mesh`, by which a segment is repeated, rounds differently from a start
    that took some of its steps. `keeps_compiler` states that it has the compiler of the first one.
    """
    here = {"precision": mesh.precision.replace("no", "fp32"), "dynamo": mesh.compiler}
    names = {"precision": "mixed_precision", "dynamo": "dynamo_backend"}
    for (begin, end), start in _starts_in(starts, *segment):
        for field, name in names.items():
            recorded = start.get(field, here[field])
            if recorded == here[field]:
                continue
            remedy = "repeat them"
            kept = [step for step in _starts_of_segments(folder) if begin <= step <= end]
            if (begin, end) != segment and len(kept) > 1:
                remedy += f" by --steps {kept[0]}:{kept[-1]}"
            if field == "precision" or not keeps_compiler:
                remedy += " under an accelerate config with it, by launch --config_file F"
            if len(kept) < 2:
                remedy = "no two checkpoints are left of them, so repeat others by --steps"
            raise UserError(
                f"{folder.path}: steps {begin} to {end} were computed with {name} {recorded}, and "
                f"would be repeated with {here[field]}, which rounds differently; {remedy}"
            )


def start_at(starts: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the start that took the step after `step`; {} if it is not known."""
    found = _starts_in(starts, step, step + 1)
    return found[0][1] if found else {}


def _starts_in(
    starts: list[dict[str, Any]], first: int, last: int
) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    """The starts that took steps of a segment, as the run has them now, each with the first and
    last step of its part: a resume takes the steps after its checkpoint again.
    """
    found = []
    # Backwards, since a start's steps count up to where a later one began.
    end = last
    for start in reversed(starts):
        begin = max(start.get("step", 0), first)
        if begin < end:
            found.append(((begin, end), start))
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


def _starts_of_segments(folder: RunFolder) -> list[int]:
    """The steps at which a segment may begin: the start of the run, and its checkpoints."""
    kept = [step_of(path) for path in folder.checkpoint_folders()]
    return kept if branched_at(folder)[1] else [0, *kept]


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
    starts = _starts_of_segments(folder)
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
