"""Defaults of fine-tuning, and which layers are frozen at a step."""

from functools import partial
from typing import Any

from nanogpt_hf.config.dial import LARGEST_RATE
from nanogpt_hf.config.methods import NEXT_TOKEN, POLICY, RecipeMethod, recipe_method_of
from nanogpt_hf.config.schema import KNOBS, Config, FinetuneSection, get_value

# They replace the schema's defaults, which are for pretraining from scratch. Recipe and command
# line override them.
_DEFAULTS = {
    # Texts to fine-tune on are short: a tenth of one is enough to measure a loss.
    "data.validation_fraction": 0.1,
    # A tenth of GPT-2's rate in pretraining, since the model is trained already. The model of a run
    # has a tenth of its own (`rates_after`).
    "optim.learning_rate": 6e-5,
    "optim.muon_learning_rate": 2e-3,
    "train.max_steps": 500,
    "train.micro_batch_size": 4,
    "eval.every": 25,
    # The run ends after 100 steps without improvement.
    "eval.patience": 4,
    # 100 blocks of GPT-2's 1,024 positions.
    "eval.tokens": 102_400,
    "checkpoint.every": 100,
}
# The best rate for LoRA is ten times higher: Biderman et al. 2024, arXiv:2405.09673.
_LORA_DEFAULTS = {"optim.learning_rate": 6e-4}


def rates_after(
    before: Config, optimizer: str, *, lora: bool, muon_scale: str = "original"
) -> dict[str, float]:
    """The default rates, as knobs, for a model that the run `before` trained: a tenth of those of
    its pretraining, or those of its fine-tuning, and ten times as much for LoRA.

    None after a run of another method, nor for Muon after a run without it or with another scale
    of updates, nor a rate of 0: those rates are no measure.
    """
    optim = before.optim
    is_text = recipe_method_of(partial(get_value, before)) is NEXT_TOKEN
    is_muon = optim.name == "muon"
    if not is_text or (optimizer == "muon" and not is_muon):
        return {}
    rates = {"optim.learning_rate": optim.learning_rate}
    if optimizer == "muon":
        if optim.muon_scale == muon_scale:
            rates["optim.muon_learning_rate"] = optim.peak_muon_rate
    elif is_muon:
        # Embeddings and vectors had this rate, and may have a higher one than AdamW gives matrices.
        rates["optim.learning_rate"] = min(optim.learning_rate, LARGEST_RATE)
    factor = 1 if before.finetune.model and before.lora.rank is None else 0.1
    return {key: float(f"{rate * factor * 10**lora:.3g}") for key, rate in rates.items() if rate}


def finetune_defaults(
    base: dict[str, Any],
    *,
    block_size: int,
    max_steps: int | None,
    epochs: float | None,
    lora: bool,
    method: RecipeMethod,
    dropout: float | None,
    muon_scale: str,
    rates: dict[str, float],
) -> dict[str, Any]:
    """The defaults of a fine-tuning run, or of one by another method.

    `base` are the sizes of the model to start from, as knobs, `dropout` is that of a GPT-2, and
    `rates` are those of `rates_after`.
    """
    sizes = {
        "data.block_size": block_size,
        "train.tokens_per_step": method.sequences_per_step * block_size,
        "optim.warmup_steps": min(20, (max_steps or _DEFAULTS["train.max_steps"]) // 10),
    }
    if method is POLICY:
        # The rest of a short block is for the question.
        longest = KNOBS["rl.max_new_tokens"].default
        sizes["rl.max_new_tokens"] = max(1, min(longest, block_size // 2))
    if epochs is not None:
        # The number of steps is not known yet, and may be small: the same share of it.
        sizes["optim.warmup_steps"] = 20 / _DEFAULTS["train.max_steps"]
    defaults = base | _DEFAULTS | sizes | (_LORA_DEFAULTS if lora else {})
    defaults |= rates | method.defaults
    # The numbers suit the scale `original`; any other one has the default of every recipe.
    if muon_scale != "original" and "optim.muon_learning_rate" not in rates:
        defaults["optim.muon_learning_rate"] = None
    if base.get("model.architecture", "gpt2") != "gpt2":
        defaults.pop("model.dropout", None)
    elif dropout is not None:
        defaults.setdefault("model.dropout", dropout)
    return defaults


def frozen_layers_at(step: int, finetune: FinetuneSection) -> int:
    """Number of frozen blocks, from the bottom, during step `step`: 0 is the embeddings only, -1
    nothing.

    The topmost frozen block is unfrozen every `unfreeze_every` steps, and the embeddings last.
    """
    if finetune.freeze_layers is None:
        return -1
    unfrozen = step // finetune.unfreeze_every if finetune.unfreeze_every else 0
    return max(-1, finetune.freeze_layers - unfrozen)


def next_unfreezing(step: int, finetune: FinetuneSection) -> int | None:
    """The first step after `step` at which fewer layers are frozen, or None."""
    if finetune.unfreeze_every is None or frozen_layers_at(step, finetune) < 0:
        return None
    return (step // finetune.unfreeze_every + 1) * finetune.unfreeze_every
