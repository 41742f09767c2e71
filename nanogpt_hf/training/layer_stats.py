"""Per-layer statistics (`tracking.layers`): norms, update ratios, attention logits, activations. Changes no number.

Layers are the blocks by their index, `embedding` (tokens and learned positions; a tied head is the same matrix) and
`head` (the last norm, and an untied head). Norms are over trainable parameters; a frozen layer has none.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.blocks import Blocks, TokenBlocks
from nanogpt_hf.distributed.full_state import named_parameters
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices
from nanogpt_hf.model.architecture import architecture_of

_LOGITS_AT_ONCE = 2**24  # attention logits in memory: 64 MiB in float32


class LayerStats:
    """Looks at the reported steps and at each evaluation. All processes call it and get the same numbers."""

    def __init__(self, accelerator: Accelerator, config: Config, validation: Blocks):
        self.accelerator, self.on = accelerator, config.tracking.layers
        self.every, self.max_grad_norm = config.tracking.every, config.optim.max_grad_norm
        self._norms: dict[str, dict[str, torch.Tensor]] = {}
        if self.on:  # the same sequences at every evaluation, as many as a micro-batch, spread over the split
            if isinstance(validation, TokenBlocks):  # without the last, shorter block, if there is another
                validation = TokenBlocks(validation.stream, validation.block_size)
            indices = evaluation_indices(validation, config.train.micro_batch_size * validation.block_size)
            batch = validation.batch(indices if len(indices) else np.array([0]))
            self._batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}

    @contextmanager
    def watched(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Iterator[None]:
        """Keep the norms of the step taken in here, if it will be reported. Costs a copy of the weights meanwhile."""
        if not self.on or step % self.every:
            yield
            return
        layers = self._trained(model)
        before = {name: [p.detach().clone() for p in parameters] for name, parameters in layers.items()}
        gradients: dict[str, torch.Tensor] = {}

        def look(*_) -> None:
            for name, parameters in layers.items():
                if all(p.grad is not None for p in parameters):
                    gradients[name] = _norm([p.grad for p in parameters])

        handle = optimizer.optimizer.register_step_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()
        with torch.no_grad():
            weights = {name: _norm(old) for name, old in before.items()}
            updates = {
                name: _norm([p.detach() - old for p, old in zip(parameters, before[name], strict=True)])
                for name, parameters in layers.items()
            }
        self._norms = {"grad": gradients, "weight": weights, "update": updates}

    def report(self, grad_norm: float) -> dict[str, float]:
        """The norms that `watched` has kept. `grad_norm` is the whole gradient's before clipping."""
        if not self.on:
            return {}
        # as torch.nn.utils.clip_grad_norm_ has scaled them
        scale = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm else 1.0
        norms = {kind: dict(zip(of, _numbers(of.values()), strict=True)) for kind, of in self._norms.items()}
        values = {f"layers/{name}/grad_norm": norm / scale for name, norm in norms["grad"].items()}
        for name, norm in norms["weight"].items():
            values[f"layers/{name}/weight_norm"] = norm
            if norm:
                values[f"layers/{name}/update_ratio"] = norms["update"][name] / norm
        return values

    @torch.no_grad()
    def look(self, model: torch.nn.Module) -> dict[str, float]:
        """Attention logits and activations of one fixed validation micro-batch, by layer."""
        if not self.on:
            return {}
        found: dict[str, torch.Tensor] = {}
        # a compiled block runs no new hooks
        with eval_mode(model), torch.compiler.set_stance("force_eager"), self._hooks(model, found):
            model(**self._batch, num_items_in_batch=1, skip_logits=True, use_cache=False)
        return dict(zip(found, _numbers(found.values()), strict=True))

    @contextmanager
    def _hooks(self, model: torch.nn.Module, found: dict[str, torch.Tensor]) -> Iterator[None]:
        whole = self.accelerator.unwrap_model(model)
        architecture = architecture_of(whole)
        blocks = architecture.blocks(whole)
        positions = self._batch.get("position_ids")
        segments = None if positions is None else (positions == 0).cumsum(-1)  # packed conversations begin at 0

        def note_std(name: str, tensor: torch.Tensor) -> None:
            found[f"layers/{name}/activation_std"] = tensor.float().std(correction=0)

        def note_logits(name: str, attention: torch.nn.Module, x: torch.Tensor) -> None:
            found[f"layers/{name}/attention_logit_max"] = attention_logit_max(attention, x, segments)

        with ExitStack() as handles:
            handles.callback(blocks[0].register_forward_pre_hook(lambda m, xs: note_std("embedding", xs[0])).remove)
            for i, block in enumerate(blocks):
                look = architecture.attention(block).register_forward_pre_hook(
                    lambda m, xs, i=i: note_logits(str(i), m, xs[0])
                )
                handles.callback(look.remove)
                handles.callback(block.register_forward_hook(lambda m, xs, out, i=i: note_std(str(i), out)).remove)
            handles.callback(
                architecture.final_norm(whole).register_forward_hook(lambda m, xs, out: note_std("head", out)).remove
            )
            yield

    def _trained(self, model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
        """What trains, by layer."""
        trained = [p for p in named_parameters(self.accelerator, model).values() if p.requires_grad]
        whole = self.accelerator.unwrap_model(model)
        architecture = architecture_of(whole)
        modules = {"embedding": architecture.embeddings(whole)}
        modules |= {str(i): [block] for i, block in enumerate(architecture.blocks(whole))}
        layers = {name: [p for m in of for p in m.parameters() if p.requires_grad] for name, of in modules.items()}
        inside = {id(parameter) for parameters in layers.values() for parameter in parameters}
        layers["head"] = [p for p in trained if id(p) not in inside]
        return {name: parameters for name, parameters in layers.items() if parameters}


@torch.no_grad()
def attention_logit_max(
    attention: torch.nn.Module, x: torch.Tensor, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest q·k / sqrt(D) of a layer, over heads and all pairs of positions of which the first sees the second.

    x is what attention gets, (B, T, C). Positions see those before them; where `segments` (B, T) is given, only those
    of their own. Computed in float32, some rows at a time.
    """
    heads = (*x.shape[:-1], -1, attention.head_dim)
    query, key = (p(x).view(heads).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))  # (B, H, T, D)
    length, place = x.shape[1], torch.arange(x.shape[1], device=x.device)
    rows = max(1, _LOGITS_AT_ONCE // (query[..., 0].numel()))
    largest = torch.full((), -torch.inf, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        query, key = query.float(), key.float().transpose(-1, -2)
        for first in range(0, length, rows):
            some = slice(first, first + rows)
            seen = place[some, None] >= place
            if segments is not None:
                seen = seen & (segments[:, some, None] == segments[:, None])[:, None]
            logits = query[:, :, some] @ key * attention.scaling
            largest = torch.maximum(largest, logits.masked_fill(~seen, -torch.inf).max())
    return largest


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all of them as one vector, a scalar on the device; of shards that of the whole."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _numbers(scalars) -> list[float]:
    scalars = list(scalars)
    return torch.stack(scalars).tolist() if scalars else []
