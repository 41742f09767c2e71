"""Per-layer norms (`tracking.layers`): gradient, weights and update. Changes no number.

Layers are the blocks by index, `embedding` (tokens and learned positions; a tied head is the
same matrix) and `head` (the last norm, and an untied head). Norms cover trainable parameters; a
frozen layer has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.full_state import named_tensors
from nanogpt_hf.distributed.gradient_tree import norm_by_rows
from nanogpt_hf.distributed.pipeline import merged_over_stages, pipeline_of
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.state import total_norm


class LayerStats:
    """Norms of logged steps. All processes call it and get the same numbers."""

    def __init__(self, accelerator: Accelerator, config: Config):
        self.accelerator, self.on = accelerator, config.tracking.layers
        self.every, self.max_grad_norm = config.tracking.every, config.optim.max_grad_norm
        self.norm_of = norm_by_rows if config.train.gradient_groups else total_norm
        self._norms: dict[str, dict[str, torch.Tensor]] = {}

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
                    gradients[name] = self.norm_of(grads)

        handle = optimizer.optimizer.register_step_pre_hook(measure_gradients)
        try:
            yield
        finally:
            handle.remove()
        with torch.no_grad():
            weights = {name: self.norm_of(old) for name, old in before.items()}
            updates = {
                name: self.norm_of(
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
            kind: dict(zip(of, torch.stack(list(of.values())).tolist(), strict=True))
            for kind, of in self._norms.items()
            if of
        }
        values = {
            f"layers/{name}/grad_norm": norm / scale for name, norm in norms.get("grad", {}).items()
        }
        for name, norm in norms.get("weight", {}).items():
            values[f"layers/{name}/weight_norm"] = norm
            if norm:
                values[f"layers/{name}/update_ratio"] = norms["update"][name] / norm
        return merged_over_stages(pipeline_of(self.accelerator), values)

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
