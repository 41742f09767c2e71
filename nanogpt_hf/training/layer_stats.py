"""Per-layer statistics (`tracking.layers`): norms, update ratios, attention logits, activations.
Changes no number.

Layers are the blocks by index, `embedding` (tokens and learned positions; a tied head is the
same matrix) and `head` (the last norm, and an untied head). Norms cover trainable parameters; a
frozen layer has none.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.blocks import Blocks, TokenBlocks
from nanogpt_hf.distributed.accelerator import mesh_of
from nanogpt_hf.distributed.full_state import named_tensors
from nanogpt_hf.distributed.pipeline import merged_over_stages, pipeline_of
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.stages import own_blocks

LOGITS_AT_ONCE = 2**24  # attention logits in memory: 64 MiB in float32


class LayerStats:
    """Statistics of logged steps and of each evaluation.

    All processes call it and get the same numbers.
    """

    def __init__(
        self, accelerator: Accelerator, config: Config, validation: Blocks, micro_batch_size: int
    ):
        self.accelerator, self.on = accelerator, config.tracking.layers
        self.every, self.max_grad_norm = config.tracking.every, config.optim.max_grad_norm
        self._norms: dict[str, dict[str, torch.Tensor]] = {}
        if self.on:  # the same micro-batch at every evaluation, spread over the split
            # leave out the last, shorter block if there is another
            if isinstance(validation, TokenBlocks):
                validation = TokenBlocks(validation.stream, validation.block_size)
            indices = evaluation_indices(validation, micro_batch_size * validation.block_size)
            batch = validation.batch(indices if len(indices) else np.array([0]))
            self._batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}

    @contextmanager
    def measured_step(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, step: int
    ) -> Iterator[None]:
        """Context that measures the norms of a step that will be logged.

        Copies the weights meanwhile.
        """
        if not self.on or step % self.every:
            yield
            return
        layers = self._trainable(model)
        before = {
            name: [p.detach().clone() for p in parameters] for name, parameters in layers.items()
        }
        gradients: dict[str, torch.Tensor] = {}

        def measure_gradients(*_) -> None:
            for name, parameters in layers.items():
                grads = [p.grad for p in parameters if p.grad is not None]
                if len(grads) == len(parameters):
                    gradients[name] = _norm(grads)

        handle = optimizer.optimizer.register_step_pre_hook(measure_gradients)
        try:
            yield
        finally:
            handle.remove()
        with torch.no_grad():
            weights = {name: _norm(old) for name, old in before.items()}
            updates = {
                name: _norm(
                    [p.detach() - old for p, old in zip(parameters, before[name], strict=True)]
                )
                for name, parameters in layers.items()
            }
        self._norms = {"grad": gradients, "weight": weights, "update": updates}

    def step_report(self, grad_norm: float) -> dict[str, float]:
        """The norms of the last `measured_step`.

        `grad_norm` is the whole gradient's before clipping.
        """
        if not self.on:
            return {}
        # undo the scaling of nn.utils.clip_grad_norm_
        scale = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm else 1.0
        norms = {
            kind: dict(zip(of, _numbers(of.values()), strict=True))
            for kind, of in self._norms.items()
        }
        values = {f"layers/{name}/grad_norm": norm / scale for name, norm in norms["grad"].items()}
        for name, norm in norms["weight"].items():
            values[f"layers/{name}/weight_norm"] = norm
            if norm:
                values[f"layers/{name}/update_ratio"] = norms["update"][name] / norm
        return merged_over_stages(pipeline_of(self.accelerator), values)

    @torch.no_grad()
    def evaluation_report(self, model: nn.Module) -> dict[str, float]:
        """Attention logits and activations by layer, on one fixed validation micro-batch."""
        if not self.on:
            return {}
        values: dict[str, torch.Tensor] = {}
        # a compiled block runs no new hooks
        with eval_mode(model), torch.compiler.set_stance("force_eager"), self._hooks(model, values):
            model(**self._batch, num_items_in_batch=1, skip_logits=True, use_cache=False)
        # each process has seen its own heads; the batch is the same on all
        if mesh_of(self.accelerator).tp_size > 1:
            for name in (name for name in values if name.endswith("attention_logit_max")):
                dist.all_reduce(values[name], dist.ReduceOp.MAX)
        return merged_over_stages(
            pipeline_of(self.accelerator), dict(zip(values, _numbers(values.values()), strict=True))
        )

    @contextmanager
    def _hooks(self, model: nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
        whole = cast(PreTrainedModel, self.accelerator.unwrap_model(model))
        architecture = architecture_of(whole)
        blocks, pipeline = own_blocks(architecture.blocks(whole)), pipeline_of(self.accelerator)
        names = {id(architecture.attention(block)): str(i) for i, block in blocks.items()}
        implementation = str(whole.config._attn_implementation)
        replaced = ALL_ATTENTION_FUNCTIONS.get(implementation)

        def output_std(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            values[f"layers/{name}/activation_std"] = output.float().std(correction=0)

        def embedding_std(first_block: nn.Module, inputs: Any) -> None:
            output_std("embedding", first_block, None, inputs[0])

        def attend(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: Any,
            mask: Any,
            **options: Any,
        ) -> Any:
            name = f"layers/{names[id(module)]}/attention_logit_max"
            values[name] = attention_logit_max(query, key, mask, options.get("scaling"))
            # eager attention is in no table: each model's module has its own
            compute: Any = (
                replaced or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
            )
            return compute(module, query, key, value, mask, **options)

        with ExitStack() as handles:
            if 0 in blocks:
                handles.callback(blocks[0].register_forward_pre_hook(embedding_std).remove)
            # the function that all models call for attention, after rotation and normalization of
            # queries and keys
            ALL_ATTENTION_FUNCTIONS[implementation] = attend
            handles.callback(ALL_ATTENTION_FUNCTIONS.pop, implementation)
            for name, block in blocks.items():
                handles.callback(block.register_forward_hook(partial(output_std, str(name))).remove)
            if pipeline is None or pipeline.stage.is_last:
                last = architecture.final_norm(whole).register_forward_hook(
                    partial(output_std, "head")
                )
                handles.callback(last.remove)
            yield

    def _trainable(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by layer."""
        pipeline = pipeline_of(self.accelerator)
        parameters = named_tensors(self.accelerator, model)
        if pipeline and pipeline.stage.is_last:  # a tied head is the embedding, on the first stage
            parameters.pop(pipeline.stage.tied_name, None)
        trained = [p for p in parameters.values() if p.requires_grad]
        whole = cast(PreTrainedModel, self.accelerator.unwrap_model(model))
        architecture = architecture_of(whole)
        modules = {"embedding": architecture.embeddings(whole)}
        modules |= {str(i): [block] for i, block in enumerate(architecture.blocks(whole))}
        layers = {
            name: [p for m in of for p in m.parameters() if p.requires_grad]
            for name, of in modules.items()
        }
        inside = {id(parameter) for parameters in layers.values() for parameter in parameters}
        layers["head"] = [p for p in trained if id(p) not in inside]
        return {name: parameters for name, parameters in layers.items() if parameters}


@torch.no_grad()
def attention_logit_max(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """The largest attention logit of a layer, scaling * q·k, over heads and visible pairs of
    positions.

    query (B, H, T, D), key (B, K, T, D) for K heads that each serve H / K queries. Without a
    mask (B or 1, 1, T, T), boolean or added to the logits, attention is causal. Computed in
    float32, in chunks of rows.
    """
    heads, length, width = query.shape[1:]
    positions = torch.arange(length, device=query.device)
    rows = max(1, LOGITS_AT_ONCE // (query[..., 0].numel()))
    largest = torch.full((), -torch.inf, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        query, key = (
            query.float(),
            key.float().repeat_interleave(heads // key.shape[1], dim=1).transpose(-1, -2),
        )
        for first in range(0, length, rows):
            chunk = slice(first, first + rows)
            visible = positions[chunk, None] >= positions
            if mask is not None:
                visible = mask[:, :, chunk] if mask.dtype == torch.bool else mask[:, :, chunk] >= 0
            logits = query[:, :, chunk] @ key * (width**-0.5 if scaling is None else scaling)
            largest = torch.maximum(largest, logits.masked_fill(~visible, -torch.inf).max())
    return largest


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors as one vector, a scalar on the device; of shards, the norm of the
    whole tensors.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}  # tensor parallelism leaves some tensors whole
    for tensor in tensors:
        by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(
            tensor
        )
    norms = [nn.utils.get_total_norm(group) for group in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _numbers(scalars) -> list[float]:
    scalars = list(scalars)
    return torch.stack(scalars).tolist() if scalars else []
