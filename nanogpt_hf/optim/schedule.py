"""The learning rate as a pure function of the step."""

import math

from nanogpt_hf.config.schema import OptimSection


def learning_rate_at(step: int, optim: OptimSection, max_steps: int) -> float:
    """The learning rate of update number `step` (0 is the first of `max_steps`).

    Linear warm-up from almost 0, then the schedule's shape down to `min_learning_rate`. Warm-up
    and cosine are nanoGPT's `get_lr` (train.py) with lr_decay_iters = max_steps; wsd is Hu et
    al. 2024, arXiv:2404.06395, section 4, with a linear decay.
    """
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
    span = optim.learning_rate - optim.min_learning_rate
    progress = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
    match optim.schedule:
        case "cosine":
            return optim.min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * span
        case "linear":
            return optim.min_learning_rate + (1 - progress) * span
        case "wsd":
            decay_steps = max(1, round(optim.decay_fraction * max_steps))
            return optim.min_learning_rate + min(1.0, (max_steps - step) / decay_steps) * span
        case _:
            return optim.learning_rate
