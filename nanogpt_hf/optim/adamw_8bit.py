"""AdamW with 8-bit state: torchao's optimizer, and conversion between its state and float32.

Each 256 values are a block with a scale, about its largest magnitude, and a code for each value:
the number of the nearest of 256 shares of the scale (Dettmers et al. 2022, arXiv:2110.02861).
Tensors of fewer than 4096 values, or of a number that blocks do not divide, stay float32. The size
of a shard decides for it.
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
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.state import local_part

logger = logging.getLogger(__name__)
_BLOCK = 256  # values with one scale
_LEAST = 4096  # values of the smallest tensor in 8 bits


def check_8bit() -> None:
    """Raises UserError if this machine cannot hold the optimizer state in 8 bits."""
    if find_spec("torchao") is None:
        raise UserError("optim.state 8bit: torchao is not installed; run `pip install torchao`")
    # torch's inductor looks for a compiler in this way. A GPU needs one too: torchao keeps the
    # step's number on the CPU.
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
    # AdamW keeps two moments of each value: 4 bytes each in float32, about 1 in 8 bits.
    if values < _LEAST or values % _BLOCK:
        return 2 * 4 * values
    return 2 * (values + 4 * (values // _BLOCK) + 4 * 256)


def state_bytes(model: PreTrainedModel, shards: int) -> float:
    """Bytes of the state of the trainable parameters on the first of `shards` processes.

    They are sharded by rows, so it has the largest share. The step also needs the state of one
    tensor in float32; the embedding's gradients, freed by then, are more.
    """
    total = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = math.ceil(len(parameter) / shards)
            total += bytes_in_8_bits(rows * math.prod(parameter.shape[1:]))
    return total


def build_adamw_8bit(
    model: PreTrainedModel,
    groups: list[dict[str, Any]],
    optim: OptimSection,
    accelerator: Accelerator | None,
) -> torch.optim.Optimizer:
    """torchao's AdamW.

    It compiles its step when it is first taken, a kernel for each shape in each group.
    """
    from torchao.optim import AdamW8bit

    kernels = {
        (group["weight_decay"], group.get("betas"), p.shape)
        for group in groups
        for p in group["params"]
    }
    logger.info(
        f"8-bit optimizer state: the first step compiles {len(kernels)} kernels, which "
        "may take a while"
    )
    # torch warns that the cache between processes is not used, which would only save compiling.
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash_for_caching")
    betas = (optim.beta1, optim.beta2)
    return AdamW8bit(groups, lr=optim.learning_rate, betas=betas, block_size=_BLOCK)


def as_float32(moment: torch.Tensor) -> torch.Tensor:
    """A state tensor of either kind in float32, with the same sharding."""
    # torchao's state tensors have codes, scales and the map of codes to shares.
    local: Any = local_part(moment)
    if not hasattr(local, "codes"):
        return moment
    if not isinstance(moment, DTensor):
        return local.dequantize()
    return DTensor.from_local(
        local.dequantize(),
        moment.device_mesh,
        moment.placements,
        run_check=False,
        # Stated, since shards may differ in size.
        shape=moment.shape,
        stride=moment.stride(),
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
    blocks the scale is computed from the lowest share. Among this number and its two neighbors in
    float32, the one that restores most values is chosen. (If all but one to three values of a block
    are zero, a neighbor may restore all of them too.)
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    moment.copy_(values)
    blocks = values.reshape(-1, moment.block_size)  # (blocks, 256)
    negative = (blocks.amin(1) < 0) & (blocks.amin(1) == -blocks.abs().amax(1))
    if not moment.signed or not negative.any():
        return
    blocks = blocks[negative]
    scale = (blocks.amin(1) / moment.qmap[0]).clip(1e-12)  # the least that torchao takes
    codes = quantize_8bit_with_qmap(blocks / scale[:, None], moment.qmap)
    shares = moment.qmap[codes.int()]  # (blocks, 256)
    below = scale.nextafter(torch.zeros_like(scale))
    above = scale.nextafter(torch.full_like(scale, torch.inf))
    near = torch.stack((scale, below, above))  # (3, blocks)
    # For each of the three scales the number of values that it restores bit for bit.
    kept = torch.stack([(shares * one[:, None] == blocks).sum(1) for one in near])
    moment.codes.view(-1, moment.block_size)[negative] = codes.to(torch.uint8)
    moment.scale[negative] = near.gather(0, kept.argmax(0)[None])[0]
