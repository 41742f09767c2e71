"""Workload of a bench, a training run without a run folder, and the bytes that collectives send,
which do not depend on how busy a machine is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanogpt_hf.config.names import ANY_OFFSET
from nanogpt_hf.config.schema import Config, DataSection, ModelSection, TrainSection
from nanogpt_hf.data.blocks import Blocks, TokenBlocks, TokenStream
from nanogpt_hf.data.hf_tokenizer import known_vocab_size
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.data.prepared import PreparedData, fitting_manifest, load_prepared
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.optim.optimizer import learning_rate_at
from nanogpt_hf.planning.transfers import all_gather_bytes, all_reduce_bytes
from nanogpt_hf.training.build import build_run
from nanogpt_hf.training.step import train_step

Pair = tuple[float, float]  # seconds per step: ours, a baseline's


@dataclass
class Workload:
    """A run before its first step, and the number of steps taken since."""

    run: Run
    token_source: str  # the data folder, or that the tokens are synthetic and why
    next_step: int = 0

    def step(self) -> None:
        """Take the next step with the loop's `train_step`."""
        number = self.next_step
        config = self.run.config
        self.next_step += 1
        train_step(self.run, number, learning_rate_at(number, config.optim, config.train.max_steps))


def build_workload(accelerator: Accelerator, config: Config, *, use_prepared: bool) -> Workload:
    """`config` on this machine, with its prepared tokens or, if there are none, synthetic ones.

    Raises UserError if the prepared data does not fit the recipe, or the recipe the machine.
    """
    # Random tokens cost as much time as real ones, but experts are chosen by them.
    if use_prepared and find_manifest(config.data):
        data = load_prepared(config)
        token_source = config.data.dir
    else:
        # It has all that a run needs without evaluations.
        data = cast(PreparedData, synthetic_data(config))
        why = f"{config.data.dir} is not prepared" if use_prepared else "no recipe"
        token_source = f"synthetic tokens: {why}"
    return Workload(build_run(config, accelerator, data), token_source)


# Operations of c10d and of its functional form, by the beginning of their names.
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
        # Collectives are operations, too: c10d's, and those of its functional form.
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
                # Of an all-gather the output is the whole, of a reduce-scatter the input.
                whole = max(tensor.nbytes for tensor in tensors)
                # torch's permute_tensor is an all-to-all that sends all to one process.
                if kind == "all-to-all" and func.namespace == "_c10d_functional" and 0 in args[2]:
                    kind = "send"
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
    """Return the size of the process group among the arguments of a collective: an object, or the
    last string, its name.
    """
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()  # pyright: ignore[reportArgumentType]
    # The functional form has the name of its group.
    names: list[Any] = [argument for argument in arguments if isinstance(argument, str)]
    resolve = c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(names[-1]).size()


def communicated_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Bytes that this process sends in one call of `step`, by kind of collective, if each runs
    as a ring.
    """
    with _Counting() as counting:
        step()
    return dict(counting.sent)


@dataclass(frozen=True)
class SyntheticData:
    """Stands in for PreparedData when a run is measured."""

    train: Blocks
    validation: Blocks
    vocab_size: int
    tokenizer: None = None
    end_of_text_id: None = None
    end_of_turn_id: None = None
    teacher: Any = None


def small_config(name: str, world_size: int) -> Config:
    """Return a recipe if none is given: 0.8 M parameters, a micro-batch per process and step."""
    return Config(
        name=name,
        model=ModelSection(n_layer=4, n_head=4, n_embd=128, n_positions=128),
        data=DataSection(tokenizer="char", block_size=128, dir="data"),
        train=TrainSection(micro_batch_size=8, tokens_per_step=8 * 128 * world_size),
    )


def synthetic_data(config: Config, vocab_size: int | None = None) -> SyntheticData:
    """Enough random tokens for a few steps of `config`, or full blocks of its method for one step;
    of the prepared data's or its tokenizer's vocabulary if none is given.
    """
    # A run needs a vocabulary, prepared or not, since its size decides the cost of the head.
    vocab_size = vocab_size or known_vocab_size(config.data, fitting_manifest(config.data))[0]
    if full_blocks := method_of(config).full_blocks:
        blocks = full_blocks(config, config.train.tokens_per_step // config.data.block_size)
        return SyntheticData(blocks, blocks, vocab_size)
    # As many as four steps read, and the target of the last token.
    stream = synthetic_tokens(
        vocab_size, 4 * max(config.train.tokens_per_step, config.data.block_size) + 1
    )
    # As prepared data would be cut: at any token, or one block after the other.
    stride = 1 if config.data.order in ANY_OFFSET else None
    blocks = TokenBlocks(stream, config.data.block_size, stride=stride)
    return SyntheticData(blocks, blocks, vocab_size)


def synthetic_tokens(vocab_size: int, count: int) -> TokenStream:
    """Random tokens, the same on every process."""
    return TokenStream(
        [(np.random.Philox(key=0).random_raw(count) % np.uint64(vocab_size)).astype(np.uint32)]
    )
