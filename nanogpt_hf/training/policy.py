"""A step of reinforcement learning, and the evaluation of a policy on held-out questions."""

import numpy as np
import torch
from transformers import PreTrainedModel

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.evaluation.answers import Answers
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import load_model
from nanogpt_hf.rl.rollouts import Rollouts, answer_log_probs
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.step import StepResult, train_step

_EXAMPLES = 4  # held-out questions whose first answer is logged


def rollouts_of(run: Run) -> Rollouts:
    """The rollouts of a run of reinforcement learning."""
    assert isinstance(run.data.train, Rollouts)
    return run.data.train


def policy_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Sample the completions of `step` from the model, and take `rl.updates` optimizer updates on them."""
    rl, rollouts = run.config.rl, rollouts_of(run)
    with run.batches.waiting():
        rollouts.draw(run.accelerator, run.mesh, run.model, step)
        if rl.kl:
            rollouts.score("reference_log_probs", start_model_of(run), run.batches, step, run.accelerator)
        if rl.updates > 1:
            rollouts.score("old_log_probs", run.model, run.batches, step, run.accelerator)
    result = train_step(run, step, learning_rate)
    for _ in range(rl.updates - 1):
        result = train_step(run, step, learning_rate)
    return result


def start_model_of(run: Run) -> PreTrainedModel:
    """The model that the run started from, whole on every process; loaded at the first call."""
    if run.start_model is None:
        finetune = run.config.finetune
        assert finetune.model is not None  # `rl` requires it
        model = load_model(finetune.model, finetune.revision)
        architecture_of(model).crop_positions(model, run.config.model.n_positions)
        run.start_model = model.to(run.accelerator.device).requires_grad_(False)
    return run.start_model


def evaluate_policy(run: Run) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Metrics of answers to the first held-out questions, and examples. All processes call it.

    The random numbers are the same at every evaluation, so that evaluations differ by the model only.
    """
    rl, rollouts, seed = run.config.rl, rollouts_of(run), run.config.train.seed
    questions = rollouts.task.held_out[: rl.eval_questions]
    seeds = [derive_seed(seed, "answers", n, k) for n in range(len(questions)) for k in range(rl.eval_samples)]
    answers = rollouts.sampler.sample(run.accelerator, run.mesh, run.model, questions, seeds)
    rows = [number * rl.eval_samples for number in range(min(_EXAMPLES, len(questions)))]
    examples = [
        {"prompt": question.prompt, "text": text, "reward": f"{answers.rewards[row]:g}"}
        for question, text, row in zip(questions, rollouts.sampler.texts(answers, rows), rows, strict=False)
    ]
    metrics = {**answers.metrics(), **answers.pass_rates(), "kl": _kl_to_start(run, answers)}
    return {f"val/{name}": value for name, value in metrics.items()}, examples


def _kl_to_start(run: Run, answers: Answers) -> float:
    """The KL divergence per token from the model that the run started from: the mean log-ratio of the answers' tokens.

    Unlike `kl_estimate` it has no exponential, which a few tokens would dominate when the models are far apart.
    """
    size, rows = rollouts_of(run).sampler.batch_size, len(answers.rewards)
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, rows, size * run.mesh.dp_size):
        # Every process takes as many forward passes; rows past the end count nothing.
        numbers = np.arange(first + run.mesh.dp_rank * size, first + (run.mesh.dp_rank + 1) * size)
        real = torch.from_numpy(numbers < rows)
        numbers = numbers.clip(max=rows - 1)
        policy, start = (
            answer_log_probs(model, answers, numbers, run.accelerator, run.config.rl.temperature)
            for model in (run.model, start_model_of(run))
        )
        total += ((policy - start).sum(1) * real).sum()
    if run.mesh.world_size > 1:
        total = sum_over_ranks(run.accelerator, run.mesh, total.float().to(run.accelerator.device)).cpu()
    return total.item() / int(answers.completions.lengths.sum())
