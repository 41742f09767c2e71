"""A trial step on the meta device: find in a second whether a model can train and generate, and
which parameters the loss does not reach.

The meta device computes shapes only, so a model of any size takes the step. A wrong size ends in
one line before data is prepared, not in a traceback after it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanogpt_hf.errors import one_line
from nanogpt_hf.model.config_fields import SIZES, has_cache, padding_rows, size_of
from nanogpt_hf.model.experts import experts_of, shapes_only
from nanogpt_hf.model.head_gpt import CACHE
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk

_TOKENS = 256  # a shorter text may not reach all parameters
# A deeper model fails as a shallow one does, and would take minutes: it does not generate, and
# only some of its blocks take the step.
_DEEP = 100
_EXPERT_MULTIPLE = 8  # torch's grouped products need rows of 16 bytes, in bf16 too


def idle_in_a_step(name: str, model: Any, blocks: Any) -> list[str]:
    """Parameters that the loss gives no gradient; none if the meta device cannot tell.

    `name` is the architecture's, in messages. Raises ValueError if the model fails in the step, or
    in generating two tokens.
    """
    config = model.config
    _check_shapes(name, model, blocks)
    try:
        idle = _idle_in_a_shallow_step(model, blocks)
        if idle is None:
            output_shapes(model).loss.backward()
            idle = _without_gradient(model)
        # Generation has a way of its own through the model, with a cache and one token at a time.
        if config.num_hidden_layers <= _DEEP:
            _generate_shapes(model)
        return idle
    except Exception as error:
        # It reads values or asks for autocast: the meta device has neither.
        if "meta tensor" in str(error) or "autocast" in str(error):
            return []
        others = ("head_dim", "num_local_experts", "num_experts_per_tok")
        sizes = SIZES | {field: field for field in others}
        values = {knob: size_of(config, field) for knob, field in sizes.items()}
        given = ", ".join(f"{knob} {value}" for knob, value in values.items() if value)
        raise ValueError(
            f"model.architecture {name} cannot take a step, or generate, with {given}: "
            f"{one_line(error)}"
        ) from error


def _check_shapes(name: str, model: Any, blocks: Any) -> None:
    """Raises ValueError for sizes with which the meta device computes, and no other."""
    for parameter_name, p in model.named_parameters():
        if not p.numel() and p.dim() < 3:
            raise ValueError(f"{name}'s {parameter_name} has no values: it is {_by(p.shape)}")
    for experts in experts_of(model):
        for p in experts.parameters():
            sizes = p.shape[1:]
            if p.dim() > 2 and any(size % _EXPERT_MULTIPLE or not size for size in sizes):
                raise ValueError(
                    f"{name}'s experts are matrices of {_by(sizes)}; their "
                    f"sizes must be multiples of {_EXPERT_MULTIPLE}"
                )
    if len(blocks) != model.config.num_hidden_layers:
        raise ValueError(f"{name} has not one block per layer, and is not supported")


def _without_gradient(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is None]


def _idle_in_a_shallow_step(model: Any, blocks: Any) -> list[str] | None:
    """Parameters without gradient in a step of the lowest blocks of a deep model, twice as many
    as it takes to have each kind of block. All blocks of a kind do the same, so that a step of the
    whole model finds the same.

    None if the whole model has to take the step: it is not deep, its kinds go on to the top,
    the few blocks fail, or a parameter inside of them has no gradient.
    """
    if len(blocks) <= _DEEP:
        return None
    types = getattr(model.config, "layer_types", None) or [None] * len(blocks)
    kinds = [(_kind_of(block), kind) for block, kind in zip(blocks, types, strict=True)]
    # The number of the block with the last new kind, from 1, twice.
    count = 2 * (1 + max(kinds.index(kind) for kind in set(kinds)))
    above = list(blocks)[count:]
    if not above:
        return None
    # Without the upper blocks for the step, and with them again afterwards.
    del blocks[count:]
    try:
        output_shapes(model).loss.backward()
        idle = _without_gradient(model)
        is_idle_inside = any(p.grad is None for p in blocks.parameters())
        return None if is_idle_inside else idle
    except Exception:  # the step of the whole model gives the reason
        return None
    finally:
        model.zero_grad()
        blocks.extend(above)


@torch.no_grad()
def _generate_shapes(model: Any) -> None:
    """Generate two tokens, as generate.py does: the second from a cache, if there is one."""
    model = model.eval()
    use_cache = has_cache(model.config)
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    cache = None
    with shapes_only():
        for unread in (ids, ids[:, :1]):
            out = model(unread, **{CACHE: cache}, use_cache=use_cache, logits_to_keep=1)
            cache = getattr(out, CACHE, None)


def output_shapes(model: Any) -> Any:
    """Output for a text of a model on the meta device, in training."""
    config = model.config
    # One chunk of the loss: the checkpoints of several cannot be on the meta device.
    length = rows_of_a_chunk(_TOKENS, config.vocab_size + padding_rows(config))
    length = min(length, config.max_position_embeddings)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    with shapes_only():
        return model.train()(input_ids=ids, shift_labels=ids, use_cache=False, num_items_in_batch=1)


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)
_NO_SETTINGS = {*vars(nn.Module()), "layer_idx"}  # torch's own, and the index


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """The kind of a block: types, sizes and settings of its modules, without its index and its
    values. A setting that is not a plain value distinguishes any two objects.
    """
    settings = []
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if key not in _NO_SETTINGS:
                fixed = value if isinstance(value, _PLAIN) else id(value)
                settings.append((name, type(module), key, fixed))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return *settings, *((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


def _by(shape: Iterable[int]) -> str:
    return " × ".join(map(str, shape))
