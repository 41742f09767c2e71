"""Prepare a model for its layout, before and around `accelerator.prepare`.

The order matters. A model is built whole and equal on all processes; then

1. `multiply_in_fp8` replaces linear layers, while they are whole;
2. `split_model` cuts matrices, experts and positions; or a Pipeline cuts the stage (pipeline.py),
   and does the rest itself;
3. `prepared_blocks` wraps blocks for activation checkpointing and compiles them, and inside it
   `accelerator.prepare` moves the model to its device, and wraps it by DDP, FSDP2 or DeepSpeed;
4. `compress_gradients` tells DDP the precision of what it sends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from nanogpt_hf.compiler import MODES, compiler_parts
from nanogpt_hf.distributed import accelerate_config
from nanogpt_hf.distributed.context_parallel import needs_ring, share_positions
from nanogpt_hf.distributed.expert_parallel import split_experts
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.tensor_parallel import split_matrices, split_vocabulary
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.head_gpt import batch_loss, compile_loss
from nanogpt_hf.model.recompute import recompute_blocks


def split_model(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Split a model for tensor, context and expert parallelism, in place, before it is
    prepared.
    """
    mesh = mesh_of(accelerator)
    device_mesh: Any = accelerator.torch_device_mesh
    if mesh.tp_size > 1:
        split_vocabulary(model, device_mesh["tp"])
        split_matrices(model, device_mesh["tp"])
    if mesh.ep_size > 1:
        split_experts(model, accelerator)
    if mesh.cp_size > 1:
        ring = needs_ring(model.config, mesh.tp_size * mesh.cp_size)
        share_positions(model, device_mesh["cp"], ring=ring, rotation=mesh.cp_rotation)


def multiply_in_fp8(model: PreTrainedModel, mesh: Mesh) -> None:
    """Let torchao multiply in 8 bits in the linear layers of the blocks of a whole model, in place.
    Raises UserError if none has sizes that 16 divides, on each of the processes that split it.

    Scales follow from the tensors of a micro-batch, so there is no state. Weights stay what they
    are: checkpoints know no class of weights that FSDP2 gathers in 8 bits.
    """
    # The import takes a second.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # fp8 matrix products of GPUs take tiles of 16 values. Tensor parallelism cuts a layer later.
    unit = 16 * mesh.tp_size
    found: list[str] = []

    def takes(layer: Any, name: str) -> bool:
        fits = layer.in_features % unit == layer.out_features % unit == 0
        found.extend([name] * fits)
        return fits

    # In the gradient of a weight the inner size of the product is the number of tokens, which need
    # not be a multiple of 16: it is padded.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=accelerate_config.EMULATES_FP8)
    blocks = architecture_of(model).blocks(model)
    convert_to_float8_training(blocks, module_filter_fn=takes, config=config)
    if not found:
        raise UserError(
            "the accelerate config sets mixed_precision fp8, and no block of the model has a "
            f"linear layer with inputs and outputs that {unit} divides; set bf16, or other sizes"
        )


def _is_one_graph(model: PreTrainedModel, accelerator: Accelerator) -> bool:
    """Whether the base model can be compiled as one graph, whose kernels a host starts faster than
    many small graphs: in small steps a GPU waits for the host.

    FSDP2, ZeRO and parallel layouts run code between the blocks. Recomputed activations and masks
    of packed documents are known to work block by block. In a graph, the models of transformers
    build a mask for every batch, with which attention takes twice its time on a GPU: they look for
    packed documents in the positions, and a graph has no values to look at.
    """
    attention = model.config._attn_implementation
    mesh = mesh_of(accelerator)
    is_plain = attention in ("sdpa", "eager") and not mesh.checkpointing
    is_plain = is_plain and getattr(model, "builds_no_mask_in_graphs", False)
    return is_plain and not mesh.is_sharded and mesh.cp_size == 1


@contextmanager
def prepared_blocks(
    model: PreTrainedModel, accelerator: Accelerator, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Compile the model, loss and the optimizer's update, and checkpoint activations, if the mesh
    has it. Name the blocks for FSDP2.

    A context for `accelerator.prepare`, inside which accelerate's own versions are off. Compiled
    in place, parameters keep their names. The model with its loss is one graph where that is
    possible, and the base model alone in evaluations and with another loss. Else each block is
    compiled, and one graph serves all blocks. Accelerate's checkpointing draws new
    dropout masks in the backward pass, which makes the gradient wrong.
    """
    mesh = mesh_of(accelerator)
    if mesh.tp_size > 1:
        # Accelerate compares it with its config.
        cast(Any, model)._tp_size = mesh.tp_size
    if mesh.checkpointing:
        recompute_blocks(model, mesh.checkpointing)
    blocks = architecture_of(model).blocks(model)
    # What FSDP2 gathers and frees as one group. transformers also names parts of other models.
    cast(Any, model)._no_split_modules = sorted({type(block).__name__ for block in blocks})
    # Accelerate would compile the whole prepared model, in a wrapper that renames its parameters.
    plugin: Any = accelerator.state.dynamo_plugin
    accelerates_own = plugin.backend
    plugin.backend = DynamoBackend.NO
    if mesh.compiles:
        backend, mode, is_regional = compiler_parts(mesh.compiler)
        options: Any = {"backend": backend, "mode": None if mode == MODES[0] else mode}
        is_whole = _is_one_graph(model, accelerator) and not is_regional
        if is_whole:
            architecture_of(model).build_saved_class(model.config)
        for part in [model.base_model] if is_whole else blocks:
            part.compile(**options)
        compile_loss(model.get_output_embeddings(), **options)
        if is_whole:
            cast(Any, model).compiled_batch_loss = torch.compile(batch_loss, **options)
        if compile_update := getattr(optimizer, "compile", None):
            compile_update(**options)
    try:
        yield
    finally:
        # For the next model of this run, after unfreezing or a loss spike.
        plugin.backend = accelerates_own


def compress_gradients(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Let DDP send the gradients of a prepared model in the precision that the accelerate config
    sets.
    """
    kind = mesh_of(accelerator).compression
    if isinstance(model, DistributedDataParallel) and kind != "no":
        hook = getattr(default_hooks, f"{kind}_compress_hook")
        # Not the hook itself: torch refuses bf16 on gloo by the hook's name, although gloo sums it.
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
