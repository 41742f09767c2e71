"""Objective of reinforcement learning: group-relative policy optimization (GRPO) on sampled
completions.
"""

import torch
from torch import Tensor

from nanogpt_hf.config.schema import RlSection
from nanogpt_hf.model.architecture import Metrics, Objective

# Added to the standard deviation of a group, which is 0 if all its rewards are equal; TRL's value.
_EPSILON = 1e-4


def advantages(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Subtract from the rewards of each prompt, (prompts, samples), their mean.

    With `scaled`, divided by their standard deviation, as in the GRPO paper (Shao et al. 2024,
    arXiv:2402.03300); without, harder and easier questions keep their weight (Liu et al. 2025,
    arXiv:2503.20783).
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + _EPSILON) if scaled else centered


def policy_objective(rl: RlSection) -> Objective:
    """Build the objective: the summed loss of the completion tokens of a batch, which `train_step`
    divides by their number in the step.

    For token t of completion i, with advantage A_i and ratio r = π(token) / π_old(token):

        loss = -min(r · A_i, clip(r, 1 - ε, 1 + ε) · A_i) + β · r · (q - log q - 1),   q =
        π_ref(token) / π(token)

    Sources: the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347), with the
    group's mean as baseline and the estimator of the KL divergence as in GRPO
    (arXiv:2402.03300), whose factor r makes its gradient unbiased (DeepSeek-V3.2,
    arXiv:2512.02556), and a mean over all tokens of the step as in DAPO (Yu et al. 2025,
    arXiv:2503.14476). TRL's GRPOTrainer has the same loss. Without `old_log_probs` in the batch
    π_old is π itself: r is 1, and the gradient is REINFORCE's. ε is `rl.clip` (none: no
    clipping), β is `rl.kl`.
    """

    def objective(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        return policy_loss(rl, completion_logits(model, batch), batch)

    return objective


def policy_loss(rl: RlSection, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Compute the loss of `policy_objective` and its metrics, both summed over the tokens of a
    batch, from the logits (B, K, V) of `completion_logits`.

    Rows whose `sampled` is 0, if the batch has it, have answers that the policy has not sampled:
    only their entropy counts.
    """
    # All are (B, K): the last K positions hold the completions of the batch.
    log_probs, entropy = chosen_log_probs(logits, batch["shift_labels"], rl.temperature)
    counts = (batch["shift_labels"] != -100).float()
    sampled = counts * batch["sampled"][:, None] if "sampled" in batch else counts
    # In the first update the model is the one that has sampled: the ratio is 1, but it has the
    # gradient of log π.
    ratio = torch.exp(log_probs - batch.get("old_log_probs", log_probs.detach()))
    gain = ratio * batch["advantages"][:, None]
    metrics = {"entropy": (entropy * counts).sum()}
    if rl.clip is not None:
        # The smaller gain, so that clipping never rewards a step away from the old policy.
        clipped = ratio.clamp(1 - rl.clip, 1 + rl.clip) * batch["advantages"][:, None]
        metrics["clipped"] = ((clipped < gain) * sampled).sum()
        gain = torch.minimum(gain, clipped)
    loss = -gain
    if "reference_log_probs" in batch:
        kl = kl_estimate(log_probs, batch["reference_log_probs"])
        metrics["kl"] = (kl * sampled).sum()
        loss = loss + rl.kl * ratio * kl
    return (loss * sampled).sum(), metrics


def kl_estimate(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL divergence of a policy from `reference` at tokens that it has sampled:
    unbiased and never negative.

    q - log q - 1 with q = reference / policy (J. Schulman, "Approximating KL divergence", 2020).
    """
    log_ratio = reference - log_probs
    return log_ratio.exp() - log_ratio - 1


def completion_log_probs(
    model: torch.nn.Module, batch: dict[str, Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of the targets at the sampling temperature, and entropies:
    (B, K) as `shift_labels`. Where these are -100 the values mean nothing.
    """
    return chosen_log_probs(completion_logits(model, batch), batch["shift_labels"], temperature)


def completion_logits(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the logits (B, K, V) of the last K positions of `input_ids`, whose targets are
    `shift_labels`. Sequences are padded at their end, which needs no mask.
    """
    # Logits of the last K positions only: prompts have none.
    positions = batch["shift_labels"].shape[1]
    return model(
        input_ids=batch["input_ids"], use_cache=False, logits_to_keep=positions
    ).logits.float()


def chosen_log_probs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute from logits (B, K, V) the log-probabilities (B, K) of the labels at a temperature,
    and the entropies (B, K).
    """
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    # Position 0 of the vocabulary stands in for ignored targets, which gather would refuse.
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy
