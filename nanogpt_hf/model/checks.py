"""Check a model before it trains: tokens see no later ones, all values are finite, and there are
experts for a balance loss.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import DivergedError, UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.trial_step import output_shapes

_NOT_FINITE = "is not finite: its training diverged, or its weights are damaged"


def check_causal(model: PreTrainedModel, *, packs: bool) -> None:
    """Raises UserError if a token attends to later tokens, or, if the run `packs`, to the
    conversation before its own. Raises DivergedError if a weight or a hidden state is not finite.

    In evaluation mode, the last hidden states of some tokens must be the same with others after
    them and without, and, packed, with others before them and without.
    """
    length = max(1, min(8, model.config.max_position_embeddings // 2))
    tokens = torch.arange(2 * length, device=model.device)[None] * 7 % model.config.vocab_size
    positions = torch.arange(length, device=model.device)[None]
    base = model.base_model
    was_training = model.training
    name = f"model.architecture {architecture_of(model).name}"

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        # Rounding differs with the length of a text; a token more or less changes far more.
        return not (one - other).abs().max() <= 1e-3 * other.abs().max()

    def hidden(tokens: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        out = base(tokens, use_cache=False, **positions)
        # A model without a base gives logits, which serve as well.
        states = getattr(out, "last_hidden_state", out[0])
        if not states.isfinite().all():
            raise DivergedError(
                f"{model.name_or_path or name}: its last hidden state {_NOT_FINITE}"
            )
        return states

    for weight, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise DivergedError(f"{model.name_or_path or name}: its {weight} {_NOT_FINITE}")
    with torch.no_grad():
        base.eval()
        # The first tokens of a text, with the others after them and without.
        sees_later = differ(hidden(tokens)[:, :length], hidden(tokens[:, :length]))
        # The second of two packed documents, whose positions begin again, and the same one alone.
        leaks = packs and differ(
            hidden(tokens, position_ids=torch.cat([positions, positions], 1))[:, length:],
            hidden(tokens[:, length:], position_ids=positions),
        )
        model.train(was_training)
    if sees_later:
        raise UserError(f"{name}: tokens see later ones, so that it cannot learn to predict them")
    if leaks:
        raise UserError(
            f"{name}: tokens of packed conversations or documents attend to those of others; "
            "set --data.packing padded, or leave --data.mask out"
        )


def check_balance(config: Config, model_config: PreTrainedConfig) -> None:
    """Raises UserError if there is a balance loss, but no experts, or no logits of routers."""
    if not config.optim.balance_loss:
        return
    architecture = architecture_of(model_config)
    model = architecture.on_meta(model_config)
    if not experts_of(model) or getattr(output_shapes(model), "routing", None) is None:
        raise UserError(
            f"optim.balance_loss: {architecture.name} has no experts whose routers show their "
            "logits; leave it out"
        )
