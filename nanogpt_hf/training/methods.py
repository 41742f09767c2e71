"""Methods: what a kind of training consists of, a row each; steps and evaluations of methods."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import PreparedData, load_prepared, repetition_warnings, summary_lines
from nanogpt_hf.evaluation.loss import evaluate_blocks, evaluate_data
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import Objective, next_token_loss
from nanogpt_hf.rl.objective import policy_objective
from nanogpt_hf.rl.rollouts import Rollouts, load_questions
from nanogpt_hf.training.distillation import distillation_objective, load_with_teacher
from nanogpt_hf.training.pairs import load_answers, load_pairs
from nanogpt_hf.training.preferences import (
    evaluate_preferences,
    kto_objective,
    kto_step,
    preference_objective,
    preference_step,
)
from nanogpt_hf.training.run import Evaluated, Run, StepResult, start_model_of
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """A kind of training: all that the package asks of it."""

    name: str
    is_chosen: Callable[[Config], bool]  # by the recipe
    # What it trains and evaluates on; every process calls it. Raises UserError.
    load: Callable[[Config], PreparedData]
    objective: Callable[[Config, PreparedData], Objective]
    # The evaluation of a step, the same on all processes; None if `stopping()` has ended it.
    evaluate: Callable[[Run, Callable[[], bool]], Evaluated | None]
    describe_best: Callable[[float], str]  # the score of the best model in words
    step: Callable[[Run, int, float], StepResult] = train_step


def load_text(config: Config) -> PreparedData:
    """Prepare text or conversations if they are not, and open them."""
    prepared_now = prepare(config)[1]
    logger.info(f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}")
    data = load_prepared(config)
    for line in summary_lines(config, data):
        logger.info(line)
    for line in repetition_warnings(config, data):
        logger.warning(line)
    return data


def evaluate_validation(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """The loss on the same validation data at every call; of a mixture also that of each source.

    `stopping` is called after every batch; if it returns true, the evaluation ends and is None.
    """
    evaluate = partial(
        evaluate_blocks,
        run.accelerator,
        run.model,
        run.objective,
        micro_batch_size=run.batches.micro_batch_size,
        stopping=stopping,
    )
    evaluated = evaluate_data(evaluate, run.data, run.config.eval.tokens)
    if evaluated is None:
        return None
    result, by_source = evaluated
    metrics = {
        "val/loss": result.loss,
        "val/perplexity": result.perplexity,
        "val/bits_per_byte": result.bits_per_byte,
    }
    metrics |= {f"val/loss/{name}": part.loss for name, part in by_source.items()}
    metrics |= {f"val/bits_per_byte/{name}": part.bits_per_byte for name, part in by_source.items()}
    lines = [
        f"validation loss {format_number(result.loss, 4)} "
        f"(perplexity {format_number(result.perplexity, 2)}, "
        f"{format_number(result.bits_per_byte, 3)} bits per byte)"
    ]
    if by_source:
        losses = (f"{name} {format_number(part.loss, 4)}" for name, part in by_source.items())
        lines.append(f"  {', '.join(losses)}")
    return Evaluated(result.loss, result, metrics, lines, [])


_EXAMPLES = 4  # held-out questions whose first answer is logged


def rollouts_of(run: Run) -> Rollouts:
    """The rollouts of a run of reinforcement learning."""
    assert isinstance(run.data.train, Rollouts)
    return run.data.train


def policy_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Sample the completions of `step` from the model, and take `rl.updates` optimizer updates
    on them.
    """
    rl, rollouts = run.config.rl, rollouts_of(run)
    rollouts.draw(run.accelerator, run.model, step)
    if rl.kl:
        rollouts.score(
            "reference_log_probs", start_model_of(run), run.batches, step, run.accelerator
        )
    if rl.updates > 1:
        rollouts.score("old_log_probs", run.model, run.batches, step, run.accelerator)
    result = train_step(run, step, learning_rate)
    for _ in range(rl.updates - 1):
        result = train_step(run, step, learning_rate)
    return result._replace(figures=rollouts.metrics())


def evaluate_policy(run: Run, stopping: Callable[[], bool]) -> Evaluated:
    """Metrics of answers to the first held-out questions, and examples; it is not stopped.

    The random numbers are the same at every evaluation, so that evaluations differ by the model
    only.
    """
    rl, rollouts, seed = run.config.rl, rollouts_of(run), run.config.train.seed
    questions = rollouts.task.held_out[: rl.eval_questions]
    seeds = [
        derive_seed(seed, "answers", n, k)
        for n in range(len(questions))
        for k in range(rl.eval_samples)
    ]
    answers = rollouts.sampler.sample(run.accelerator, run.model, questions, seeds)
    rows = [number * rl.eval_samples for number in range(min(_EXAMPLES, len(questions)))]
    examples = [
        {"prompt": question.prompt, "text": text, "reward": f"{answers.rewards[row]:g}"}
        for question, text, row in zip(
            questions, rollouts.sampler.texts(answers, rows), rows, strict=False
        )
    ]
    metrics = {**answers.metrics(), **answers.pass_rates()}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    return Evaluated(
        -metrics["reward"],
        None,
        {f"val/{name}": value for name, value in metrics.items()},
        [f"held-out questions: {shown}"],
        examples,
    )


TEXT = Method(
    "the next token",  # pretraining and fine-tuning, of text and conversations
    is_chosen=lambda config: True,  # if no other is
    load=load_text,
    objective=lambda config, _: partial(next_token_loss, balance=config.optim.balance_loss),
    evaluate=evaluate_validation,
    describe_best=lambda score: f"best validation loss {format_number(score, 4)}",
)
POLICY = Method(
    "reinforcement learning",
    is_chosen=lambda config: bool(config.rl.task),
    load=load_questions,
    objective=lambda config, _: policy_objective(config.rl),
    evaluate=evaluate_policy,
    describe_best=lambda score: f"best mean reward {-score:.4f}",
    step=policy_step,
)
PREFERENCES = Method(
    "preference training",
    is_chosen=lambda config: bool(config.align.loss),
    load=load_pairs,
    objective=lambda config, _: preference_objective(config.align),
    evaluate=evaluate_preferences,
    describe_best=lambda score: f"best loss on held-out pairs {format_number(score, 4)}",
    step=preference_step,
)
KTO = replace(
    PREFERENCES,
    name="preference training on single answers",
    is_chosen=lambda config: config.align.loss == "kto",
    load=load_answers,
    objective=lambda config, _: kto_objective(config.align),
    describe_best=lambda score: f"best loss on held-out answers {format_number(score, 4)}",
    step=kto_step,
)
DISTILLATION = replace(
    TEXT,
    name="distillation",
    is_chosen=lambda config: config.distill.teacher is not None,
    load=lambda config: load_with_teacher(config, load_text),
    objective=distillation_objective,
)
ON_TEXT = (TEXT, DISTILLATION)
# the first that a recipe chooses is its method
METHODS = [POLICY, KTO, PREFERENCES, DISTILLATION, TEXT]


def method_of(config: Config) -> Method:
    return next(method for method in METHODS if method.is_chosen(config))
