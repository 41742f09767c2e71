"""Objective of reinforcement learning: group-relative policy optimization (GRPO) on sampled
completions.

Logits are in memory for a chunk of the completions' tokens at a time, as in pretraining.

Shapes: B rows, K positions with completions, R of the B · K tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanogpt_hf.config.schema import RlSection
from nanogpt_hf.methods.slices import sum_of_slices
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.model.loss_gpt import IGNORED

# From the logits (R, V) in float32 of some tokens, and the values (R,) that a batch has for these,
# by name: the summed loss, and metrics. The slice says which of the B · K tokens they are.
TokenLoss = Callable[[slice, Tensor, dict[str, Tensor]], tuple[Tensor, Metrics]]

# Added to the standard deviation of a group, which is 0 if all its rewards are equal; TRL's value.
_EPSILON = 1e-4


# From the ratios r, the advantages and the log-probabilities of tokens, and the limits of a ratio,
# 1 - ε and 1 + ε: the gains, whose gradient is followed, and which of them are limited.
Limit = Callable[[Tensor, Tensor, Tensor, tuple[float, float]], tuple[Tensor, Tensor]]


class PolicyLoss(NamedTuple):
    """What a loss does with importance ratios: a row of LOSSES."""

    limit: Limit
    # The ratio is one of a whole answer, the geometric mean of the ratios of its tokens, and each
    # answer counts the same. Else each token has its ratio, and counts the same.
    of_answers: bool = False


def _grpo(
    ratio: Tensor, advantage: Tensor, _: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    # The smaller gain, so that clipping never rewards a step away from the old policy.
    gain = ratio * advantage
    clipped = ratio.clamp(*limits) * advantage
    return torch.minimum(gain, clipped), clipped < gain


def _cispo(
    ratio: Tensor, advantage: Tensor, log_probs: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    # A weight of REINFORCE's gradient: every token keeps a gradient.
    _, highest = limits
    return ratio.detach().clamp(max=highest) * advantage * log_probs, ratio > highest


# By rl.loss: the ratios, and what rl.clip does to a ratio that is far from 1.
LOSSES: dict[str, PolicyLoss] = {
    # min(r · A, clip(r, 1 - ε, 1 + ε) · A)
    "grpo": PolicyLoss(_grpo),
    # min(r, 1 + ε) · A · log π, without a gradient of the first factor (MiniMax-M1,
    # arXiv:2506.13585)
    "cispo": PolicyLoss(_cispo),
    # min(s · A, clip(s, 1 - ε, 1 + ε) · A) with the ratio s of an answer (Zheng et al. 2025,
    # arXiv:2507.18071)
    "gspo": PolicyLoss(_grpo, of_answers=True),
}


def advantages(rl: RlSection, rewards: Tensor) -> Tensor:
    """Subtract from the rewards of each prompt, (prompts, samples), their mean.

    With `rl.scale_advantages`, divided by their standard deviation, as in the GRPO paper (Shao et
    al. 2024, arXiv:2402.03300); without, harder and easier questions keep their weight (Liu et al.
    2025, arXiv:2503.20783).
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    if not rl.scale_advantages:
        return centered
    return centered / (rewards.std(1, keepdim=True) + _EPSILON)


def answer_weights(rl: RlSection, lengths: Tensor) -> dict[str, Tensor]:
    """Compute the weights of a token's loss by which each answer of a step counts the same, from
    the learned tokens of all its answers; nothing if each token counts the same.

    `train_step` divides by the tokens of the step. So the mean length, divided by the length of
    the answer, makes it a mean over answers of the mean over tokens.
    """
    if not LOSSES[rl.loss].of_answers:
        return {}
    lengths = lengths.float()
    return {"weights": lengths.mean() / lengths.clamp(min=1)}


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
    clipping), above 1 `rl.clip_high` if it is given, as in DAPO; β is `rl.kl`. Another `rl.loss`
    has another first term, or one r for all tokens of an answer (LOSSES).
    """

    def objective(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        return completion_loss(
            model,
            batch,
            lambda _, logits, tokens: policy_loss(rl, logits, tokens),
            rl,
        )

    return objective


def policy_loss(rl: RlSection, logits: Tensor, tokens: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Compute the loss of `policy_objective` and its metrics, both summed over some tokens, from
    their logits (R, V) and the values (R,) that the batch has for them.

    Tokens whose `sampled` is 0, if the batch has it, are of answers that the policy has not
    sampled: only their entropy counts.
    """
    log_probs, entropy = chosen_log_probs(logits, tokens["shift_labels"], rl.temperature)
    counts = (tokens["shift_labels"] != IGNORED).float()
    sampled = counts * tokens["sampled"] if "sampled" in tokens else counts
    if "slopes" in tokens:
        # Of whole answers, from `answer_values`. The second summand is 0 and has the gradient.
        found = {name: tokens[name] for name in ("losses", "clipped", "kl") if name in tokens}
        found["losses"] = tokens["losses"] + tokens["slopes"] * (log_probs - log_probs.detach())
    else:
        # In the first update the model is the one that has sampled: the ratio is 1, but it has the
        # gradient of log π.
        log_ratios = log_probs - tokens.get("old_log_probs", log_probs.detach())
        found = _ratio_losses(rl, log_probs, log_ratios, tokens)
    metrics = {name: (value * sampled).sum() for name, value in found.items()}
    return metrics.pop("losses"), metrics | {"entropy": (entropy * counts).sum()}


def _ratio_losses(
    rl: RlSection, log_probs: Tensor, log_ratios: Tensor, tokens: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Compute the loss of each token from its log-probability and log-ratio, in any shape, and what
    the metrics are made of.
    """
    ratio = torch.exp(log_ratios)
    found = {}
    if rl.clip is None:
        gain = ratio * tokens["advantages"]
    else:
        limit = LOSSES[rl.loss].limit
        limits = (1 - rl.clip, 1 + (rl.clip if rl.clip_high is None else rl.clip_high))
        gain, found["clipped"] = limit(ratio, tokens["advantages"], log_probs, limits)
    found["losses"] = -gain
    if "reference_log_probs" in tokens:
        found["kl"] = kl_estimate(log_probs, tokens["reference_log_probs"])
        found["losses"] = found["losses"] + rl.kl * ratio * found["kl"]
    return found


def answer_values(rl: RlSection, log_probs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute what the loss of a token has to know of its whole answer, (B, K) by name, from the
    log-probabilities (B, K) of all tokens: the `losses` of tokens, and `slopes`, the gradient of
    their sum by the log-probability of each token.
    """
    counts = batch["shift_labels"] != IGNORED
    values = {name: value.view(len(counts), -1) for name, value in batch.items()}
    weights = values["weights"] * counts
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        log_ratios = log_probs - batch.get("old_log_probs", log_probs.detach())
        lengths = counts.sum(1, keepdim=True).clamp(min=1)
        mean = log_ratios.sum(1, keepdim=True) / lengths
        found = _ratio_losses(rl, log_probs, mean.expand_as(log_probs), values)
        found["losses"] = found["losses"] * weights
        (found["slopes"],) = torch.autograd.grad(found["losses"].sum(), log_probs)
    if "clipped" in found:
        # With the weights the metric is the share of answers.
        found["clipped"] = found["clipped"] * weights
    return {name: value.detach() for name, value in found.items()}


def kl_estimate(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL divergence of a policy from `reference` at tokens that it has sampled:
    unbiased and never negative.

    q - log q - 1 with q = reference / policy (J. Schulman, "Approximating KL divergence", 2020).
    """
    log_ratio = reference - log_probs
    return log_ratio.exp() - log_ratio - 1


@torch.no_grad()
def completion_log_probs(
    model: torch.nn.Module, batch: dict[str, Tensor], temperature: float
) -> Tensor:
    """Compute the log-probabilities (B, K) of the targets at the sampling temperature, without a
    gradient; 0 where `shift_labels` are -100.
    """
    found = []

    def keep(_: slice, logits: Tensor, tokens: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        found.append(chosen_log_probs(logits, tokens["shift_labels"], temperature)[0])
        return logits.new_zeros(()), {}

    completion_loss(model, batch, keep)
    return torch.cat(found).view_as(batch["shift_labels"])


def completion_loss(
    model: torch.nn.Module,
    batch: dict[str, Tensor],
    token_loss: TokenLoss,
    rl: RlSection | None = None,
) -> tuple[Tensor, Metrics]:
    """Sum a loss and its metrics over the tokens of completions, a chunk of these at a time.

    `shift_labels` (B, K) are the targets of the last K positions of `input_ids`: prompts have no
    logits. Sequences are padded at their end, which needs no mask. If `rl` has a loss of whole
    answers, the product with the head is computed once more, for their `answer_values`.
    """
    row_loss = _SummedTokens(batch, token_loss)
    if rl and LOSSES[rl.loss].of_answers:
        row_loss = _SummedAnswers(batch, token_loss, rl)
    loss = model(
        input_ids=batch["input_ids"],
        shift_labels=batch["shift_labels"],
        row_loss=row_loss,
        num_items_in_batch=1,
        skip_logits=True,
        use_cache=False,
    ).loss
    # A copy, since a head that replaces ours calls `row_loss` again in the backward pass.
    return loss, dict(row_loss.metrics)


class _SummedTokens:
    """A `TokenLoss` that a model calls for each chunk of its B · K rows, in place of its
    cross-entropy. `metrics` are the sums so far.
    """

    def __init__(self, batch: dict[str, Tensor], token_loss: TokenLoss):
        shape = batch["shift_labels"].shape
        # A value of a row of the batch, such as an advantage, is one of each of its tokens.
        self.tokens = {
            name: (values if values.dim() == 2 else values[:, None].expand(shape)).flatten()
            for name, values in batch.items()
            if name != "input_ids"
        }
        self.token_loss = token_loss
        self.metrics: Metrics = {}

    def __call__(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        return sum_of_slices(self._loss, chunk, logits, targets)

    def _loss(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        tokens = {name: values[chunk] for name, values in self.tokens.items()}
        # Sums of exponentials over a vocabulary need float32, whatever the model computes in.
        loss, metrics = self.token_loss(chunk, logits.float(), tokens)
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0) + value.detach()
        return loss


class _SummedAnswers(_SummedTokens):
    """`_SummedTokens` whose tokens have the `answer_values` of `rl`."""

    def __init__(self, batch: dict[str, Tensor], token_loss: TokenLoss, rl: RlSection):
        super().__init__(batch, token_loss)
        self.batch = batch
        self.rl = rl
        self.log_probs: list[Tensor] = []

    def first_pass(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        """Keep the log-probabilities of a chunk; the loss of all tokens follows from them."""
        return sum_of_slices(self._keep, chunk, logits, targets)

    def _keep(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        self.log_probs.append(chosen_log_probs(logits.float(), targets, self.rl.temperature)[0])
        labels = self.batch["shift_labels"]
        # After the last chunk, and not at the first call: that may be under the hooks of a
        # checkpoint, which repeats it.
        if sum(map(len, self.log_probs)) == labels.numel():
            log_probs = torch.cat(self.log_probs).view(labels.shape)
            values = answer_values(self.rl, log_probs, self.batch)
            self.tokens |= {name: value.flatten() for name, value in values.items()}
        return logits.new_zeros(())


def chosen_log_probs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute from logits (R, V) the log-probabilities (R,) of the labels at a temperature, 0 for
    ignored ones, and the entropies (R,).
    """
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    # Position 0 of the vocabulary stands in for ignored targets, which gather would refuse.
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    # Else an unlikely token 0 would have an infinite ratio or divergence, and infinity times 0 is
    # NaN.
    chosen = chosen.where(labels != IGNORED, 0.0)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy
