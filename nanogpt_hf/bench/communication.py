"""Count the bytes that collectives send in a step.

Unlike times, the counts do not depend on how busy a machine is.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanogpt_hf.planning.transfers import all_gather_bytes, all_reduce_bytes

# operations of c10d and of its functional form, by the beginning of their names
_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "send": "send",
}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
            if kind:
                values = tree_leaves((args, kwargs))
                tensors = [
                    value
                    for value in (*values, *tree_leaves(output))
                    if isinstance(value, torch.Tensor)
                ]
                whole = max(tensor.nbytes for tensor in tensors)
                if kind == "all-to-all" and func.namespace == "_c10d_functional" and 0 in args[2]:
                    kind = "send"  # torch's permute_tensor: all of it to one process
                self.sent[kind] += round(_sent(kind, whole, _group_size(values)))
        return output


def _sent(kind: str, whole: int, size: int) -> float:
    """Bytes that one of `size` processes sends of the `whole`, the larger of a collective's
    input and output.
    """
    if kind == "all-reduce":
        return all_reduce_bytes(whole, size)
    return whole if kind in ("send", "broadcast") else all_gather_bytes(whole, size)


def _group_size(arguments: list[Any]) -> int:
    """The size of the process group among the arguments of a collective: an object, or the last
    string, its name.
    """
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()  # pyright: ignore[reportArgumentType]
    names: list[Any] = [argument for argument in arguments if isinstance(argument, str)]
    return c10d._resolve_process_group(names[-1]).size()  # pyright: ignore[reportPrivateImportUsage]


def communicated_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Bytes that this process sends in one call of `step`, by kind of collective, if each runs
    as a ring.
    """
    with _Counting() as counting:
        step()
    return dict(counting.sent)
