"""AdamW with 8-bit state: torchao's optimizer, and conversion between its state and float32.

Each 256 values are a block with a scale, about its largest magnitude, and a code for each value:
which of 256 shares of the scale is nearest (Dettmers et al. 2022, arXiv:2110.02861). Tensors of
fewer than 4096 values, or that blocks do not divide, stay float32; of a shard its own size
decides.
"""

import logging
import math
import os
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.state import local_part

logger = logging.getLogger(__name__)
_BLOCK, _LEAST = 256, 4096  # values


def check_8bit() -> None:
    """Raises UserError if this machine cannot hold the optimizer state in 8 bits."""
    if find_spec("torchao") is None:
        raise UserError("optim.state 8bit: torchao is not installed; run `pip install torchao`")
    # as torch's inductor looks for it; on a GPU it is for the step's number, which torchao keeps on
    # the CPU
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"optim.state 8bit: torchao compiles its step, and {compiler} is not installed"
        )
    if " " in torch.__file__:  # torch 2.13 does not quote its folder for the linker
        raise UserError(
            f"optim.state 8bit: torch is installed in {Path(torch.__file__).parent}, and its "
            "compiler cannot link from a path with a space; move the environment"
        )


def bytes_in_8_bits(values: int) -> int:
    """Bytes of AdamW's 8-bit state of a tensor or of a shard: codes, scales, and two lists of
    256 shares.
    """
    if values < _LEAST or values % _BLOCK:
        return 2 * 4 * values
    return 2 * (values + 4 * (values // _BLOCK) + 4 * 256)


def state_bytes(model: PreTrainedModel, shards: int) -> float:
    """Bytes of the state of the trainable parameters on the first of `shards` processes.

    They are sharded by rows, so it has the largest share. The step also needs the state of one
    tensor in float32; the embedding's gradients, freed by then, are more.
    """
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(
        bytes_in_8_bits(math.ceil(len(p) / shards) * math.prod(p.shape[1:])) for p in trained
    )


def build_adamw_8bit(
    groups: list[dict], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """torchao's AdamW.

    It compiles its step when it is first taken, a kernel for each shape in each group.
    """
    from torchao.optim import AdamW8bit

    kernels = {(group["weight_decay"], p.shape) for group in groups for p in group["params"]}
    logger.info(
        f"8-bit optimizer state: the first step compiles {len(kernels)} kernels, which "
        "may take a while"
    )
    # torch warns about a cache between processes, which only saves compiling
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash_for_caching")
    return AdamW8bit(groups, lr=lr, betas=betas, block_size=_BLOCK)


def as_float32(moment: torch.Tensor) -> torch.Tensor:
    """A state tensor of either kind in float32, with the same sharding."""
    local: Any = local_part(moment)
    if not hasattr(local, "codes"):
        return moment
    if not isinstance(moment, DTensor):
        return local.dequantize()
    shape = {"shape": moment.shape, "stride": moment.stride()}  # shards may differ in size
    return DTensor.from_local(
        local.dequantize(), moment.device_mesh, moment.placements, run_check=False, **shape
    )


def restore(moment: Any, values: torch.Tensor) -> None:
    """Copy float32 values into a state tensor of either kind, without sharding."""
    if hasattr(moment, "codes"):
        _quantize(moment, values)
    else:
        moment.copy_(values)


@torch.no_grad()
def _quantize(moment: Any, values: torch.Tensor) -> None:
    """Copy float32 values into an 8-bit state tensor; values that were decoded from one are
    restored bit for bit.

    torchao's scale is the largest magnitude of a block. If that value is negative it decodes to
    the lowest share, -0.993 of the scale, so the block would shrink with every resume. For such
    blocks the scale is computed from the lowest share, and of it and its two neighbors the one
    is chosen that restores most values. (If all but one to three values of a block are zero, a
    neighbor may restore all of them too.)
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    moment.copy_(values)
    blocks = values.reshape(-1, moment.block_size)
    negative = (blocks.amin(1) < 0) & (blocks.amin(1) == -blocks.abs().amax(1))
    if not moment.signed or not negative.any():
        return
    blocks = blocks[negative]
    scale = (blocks.amin(1) / moment.qmap[0]).clip(1e-12)  # the least that torchao takes
    codes = quantize_8bit_with_qmap(blocks / scale[:, None], moment.qmap)
    shares = moment.qmap[codes.int()]
    below, above = (scale.nextafter(torch.full_like(scale, limit)) for limit in (0.0, torch.inf))
    near = torch.stack((scale, below, above))
    kept = torch.stack([(shares * one[:, None] == blocks).sum(1) for one in near])
    moment.codes.view(-1, moment.block_size)[negative] = codes.to(torch.uint8)
    moment.scale[negative] = near.gather(0, kept.argmax(0)[None])[0]
