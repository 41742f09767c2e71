"""Compare a repeated step with what the run recorded: metrics, and the tensors of a checkpoint."""

import hashlib
import math
from typing import Any

from nanogpt_hf.distributed.full_state import FullState, own_weights
from nanogpt_hf.formatting import plural
from nanogpt_hf.methods.run import Run
from nanogpt_hf.optim.state import full_tensor


def tensor_differences(run: Run, saved: Any, bound: float) -> list[str]:
    """Compare with the tensors of a checkpoint; return differences as lines."""
    if bound:
        return _distant_weights(run, saved, bound)
    return _other_tensors(run, saved)


def value_differences(ours: dict[str, float], recorded: dict[str, Any], bound: float) -> list[str]:
    """Write a line for each metric whose distance from the recorded one is more than `bound` times
    its size.
    """

    def agrees(name: str, value: float) -> bool:
        other = recorded.get(name, "nothing")
        # JSON has no NaN: null was recorded for what is not finite.
        if not math.isfinite(value) or not isinstance(other, float | int):
            return other is None and not math.isfinite(value)
        return abs(value - other) <= bound * abs(other)

    return [
        f"{name}: recorded {recorded.get(name, 'nothing')}, repeated {value}"
        for name, value in ours.items()
        if not agrees(name, value)
    ]


def _distant_weights(run: Run, saved: Any, bound: float) -> list[str]:
    """Write a line if the distance of all weights together from the saved ones is more than `bound`
    times their norm.

    Optimizer state is not compared: where a gradient is rounding only, such as the gradient of key
    biases, the state has any value.
    """
    theirs = dict(saved.weights)
    # The squares of both norms are summed.
    distance = 0.0
    size = 0.0
    for name, weight in own_weights(run.accelerator, run.model):
        other = full_tensor(theirs[name]).double().cpu()
        distance += (full_tensor(weight).double().cpu() - other).square().sum().item()
        size += other.square().sum().item()
    share = math.sqrt(distance / max(size, 1e-300))
    if share <= bound:
        return []
    return [f"{saved.folder}: weights {share:.1e} of their norm away"]


def _other_tensors(run: Run, saved: Any) -> list[str]:
    """Write a line with the tensors of weights and optimizer state that are not the saved ones."""
    state = FullState(run.accelerator, run.model, run.optimizer)
    ours = dict(own_weights(run.accelerator, run.model)) | dict(state.own_optimizer_state())
    theirs = dict(saved.weights) | dict(saved.optimizer_state)
    # Sorted: a digest of a sharded tensor is a collective, so all processes need the same order.
    names = [
        name
        for name in sorted({*ours, *theirs})
        if _digest(ours.get(name)) != _digest(theirs.get(name))
    ]
    if not names:
        return []
    return [f"{saved.folder}: {plural(len(names), 'tensor')}: {', '.join(names)}"]


def _digest(tensor: Any) -> object:
    """The sha256 of a whole tensor; all processes call it with their parts."""
    tensor = full_tensor(tensor)
    return tensor is not None and hashlib.sha256(tensor.cpu().numpy()).hexdigest()
