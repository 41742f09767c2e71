"""Reinforcement learning on verifiable answers: sample completions, and reward the right ones."""

import dataclasses
from collections.abc import Callable, Sequence

from nanogpt_hf.config import methods as recipes
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.evaluation.answers import Answers
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.policy_loss import policy_objective
from nanogpt_hf.methods.rollouts import FullRollouts, Rollouts, load_questions
from nanogpt_hf.methods.run import Evaluated, Run, start_model_of
from nanogpt_hf.runs.metrics import Score
from nanogpt_hf.tasks.task import Question

# Held-out questions whose first answer is logged.
_EXAMPLES = 4
REWARD = Score("val/reward", "reward", "mean reward on held-out questions")


def rollouts_of(run: Run) -> Rollouts:
    """Get the rollouts of a run of reinforcement learning."""
    rollouts = run.data.train
    assert isinstance(rollouts, Rollouts)
    # `train.micro_batch_size: auto` finds the size after the questions are loaded.
    size = run.config.rl.batch_size or run.batches.micro_batch_size
    if rollouts.sampler and rollouts.sampler.batch_size != size:
        rollouts.sampler = dataclasses.replace(rollouts.sampler, batch_size=size)
    return rollouts


def draw_rollouts(run: Run, step: int) -> dict[str, float]:
    """Sample the completions of `step` from the model, with the log-probabilities that the
    objective compares with; return figures of the completions.
    """
    rl = run.config.rl
    rollouts = rollouts_of(run)
    rollouts.draw(run.accelerator, run.model, step)
    if rl.kl:
        start = start_model_of(run)
        rollouts.score("reference_log_probs", start, run.batches, step, run.accelerator)
    if rl.updates > 1:
        # After the first update the model is not the one that has sampled.
        rollouts.score("old_log_probs", run.model, run.batches, step, run.accelerator)
    return rollouts.metrics()


def evaluate_policy(run: Run, stopping: Callable[[], bool]) -> Evaluated:
    """Metrics of answers to the first held-out questions, and examples; it is not stopped."""
    return evaluated_answers(run, *answer_held_out(run))


def answer_held_out(run: Run) -> tuple[Sequence[Question], Answers]:
    """Sample answers to the first held-out questions; return the questions, too.

    The random numbers are the same at every evaluation, so that evaluations differ by the model
    only.
    """
    rl = run.config.rl
    rollouts = rollouts_of(run)
    questions = rollouts.task.held_out[: rl.eval_questions]
    seeds = [
        derive_seed(run.config.train.seed, "answers", number, sample)
        for number in range(len(questions))
        for sample in range(rl.eval_samples)
    ]
    return questions, rollouts.sampler.sample(run.accelerator, run.model, questions, seeds)


def evaluated_answers(run: Run, questions: Sequence[Question], answers: Answers) -> Evaluated:
    """Compute metrics of the answers to held-out questions, with the first ones as examples."""
    samples = run.config.rl.eval_samples
    # Row n · k of the answers is the first answer to question n.
    rows = [number * samples for number in range(min(_EXAMPLES, len(questions)))]
    texts = rollouts_of(run).sampler.texts(answers, rows)
    examples = [
        {
            "prompt": questions[number].prompt,
            "text": text,
            "reward": f"{answers.rewards[row]:g}",
        }
        for number, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    metrics = {**answers.metrics(), **answers.pass_rates()}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    return Evaluated(
        score=-metrics["reward"],
        evaluation=None,
        metrics={f"val/{name}": value for name, value in metrics.items()},
        lines=[f"held-out questions: {shown}"],
        samples=examples,
    )


POLICY = Method(
    "reinforcement learning",
    recipe=recipes.POLICY,
    load=load_questions,
    objective=lambda config, _: policy_objective(config.rl),
    evaluate=evaluate_policy,
    describe_best=lambda score: f"best mean reward {-score:.4f}",
    score=REWARD,
    begin_step=draw_rollouts,
    full_blocks=lambda config, _: FullRollouts(config),
    noun="completions",
    # Log-probabilities under the start model, and under the model that has sampled.
    forward_only=lambda config: bool(config.rl.kl) + (config.rl.updates > 1),
    row_loss="sum",
    updates=lambda config: config.rl.updates,
)
