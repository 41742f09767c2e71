"""On-policy distillation: the student answers questions, and learns the distribution of a teacher
over the tokens of its own answers.

The teacher corrects the student in states that the student's own mistakes lead to, which no given
text has (Agarwal et al. 2024, arXiv:2306.13649).
"""

import dataclasses
import logging
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import learns_teacher_alone
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.chat_examples import finder_of
from nanogpt_hf.data.messages import Conversation, Message
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.evaluation.answers import Answers, tools_of
from nanogpt_hf.evaluation.loss import eval_mode, rank_batches
from nanogpt_hf.formatting import format_number
from nanogpt_hf.generate import Completions
from nanogpt_hf.methods.distillation import (
    TaughtData,
    divergence,
    divergence_weight,
    load_with_teacher,
    place_teacher,
    teacher_of,
)
from nanogpt_hf.methods.pairs import encode_answer
from nanogpt_hf.methods.policy import POLICY, REWARD, answer_held_out, evaluated_answers
from nanogpt_hf.methods.policy_loss import (
    TokenLoss,
    advantages,
    completion_loss,
    policy_loss,
)
from nanogpt_hf.methods.rollouts import FullRollouts, Rollouts, load_questions, sequence_batch
from nanogpt_hf.methods.run import Evaluated, Run
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.model.loss_gpt import IGNORED
from nanogpt_hf.runs.metrics import Score
from nanogpt_hf.tasks.task import Question, is_generated

logger = logging.getLogger(__name__)


def is_on_policy(number: int, share: float) -> bool:
    """Whether the student answers question `number` of a run: of the first n questions it answers
    the share n · `share`, rounded down.
    """
    # As it is written: the float 0.29 is less than 29/100.
    exact = Fraction(str(share))
    return int((number + 1) * exact) > int(number * exact)


class TaughtRollouts(Rollouts):
    """Rollouts of which a share is sampled from the student; the others are reference answers, each
    `rl.samples` times.

    `sampled` is 1 in a batch for the rows that the student has answered. Advantages of the others
    are 0.
    """

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._sampled = torch.ones(len(self))
        self._blank = self._answers
        self._finder = finder_of(self.sampler.tokenizer)
        # The answers of the student alone; None before the first draw, and if there are none.
        self._own: Answers | None = None

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return super().batch(indices) | {"sampled": self._sampled[indices]}

    def draw(self, accelerator: Accelerator, model: nn.Module, step: int) -> None:
        """Sample the completions of the student's share of the questions of a step, with their
        advantages, and read the reference answers of the others.
        """
        config = self.config
        samples = config.rl.samples
        questions = self.questions_at(step)
        first = step * len(questions)
        share = config.distill.on_policy
        own = [n for n in range(len(questions)) if is_on_policy(first + n, share)]
        # The seed of a completion is the one that it has in reinforcement learning.
        seeds = [
            derive_seed(config.train.seed, "rollouts", step, number, sample)
            for number in own
            for sample in range(samples)
        ]
        rewards = torch.zeros(len(questions), samples)
        gains = torch.zeros(len(questions), samples)
        self._own = None
        if own:
            asked = [questions[number] for number in own]
            self._own = self.sampler.sample(accelerator, model, asked, seeds)
            rewards[own] = self._own.grouped_rewards
            gains[own] = advantages(config.rl, self._own.grouped_rewards)
        self._answers = self._merged(questions, own, rewards.reshape(-1))
        self._advantages = gains.reshape(-1)
        self._sampled = torch.zeros(len(questions), samples)
        self._sampled[own] = 1.0
        self._sampled = self._sampled.reshape(-1)
        self._log_probs = {}

    def _merged(self, questions: list[Question], own: list[int], rewards: Tensor) -> Answers:
        """Join the student's answers and the reference answers, in the order of the questions."""
        if self._own is not None and len(own) == len(questions):
            return self._own
        samples = self.config.rl.samples
        answers = self._own or self._blank
        # The row of the student's answers that each row is; a given answer overwrites a copy.
        source = torch.zeros(len(questions), samples, dtype=torch.int64)
        source[own] = torch.arange(len(own) * samples).view(-1, samples)
        source = source.reshape(-1)
        prompts = [answers.prompts[row] for row in source.tolist()]
        width = max(answers.completions.ids.shape[1], self.config.rl.max_new_tokens)
        columns = [column[source] for column in answers.completions]
        padded = [F.pad(c, (0, width - c.shape[1])) if c.dim() == 2 else c for c in columns]
        completions = Completions(*padded)
        # Results of tools are in sampled answers only.
        written = F.pad(answers.learned[source], (0, width - answers.learned.shape[1]))
        for number in set(range(len(questions))).difference(own):
            rows = slice(number * samples, (number + 1) * samples)
            prompt, answer = self.given(questions[number])
            prompts[rows] = [prompt] * samples
            completions.ids[rows, : len(answer)] = torch.tensor(answer)
            completions.lengths[rows] = len(answer)
            completions.ended[rows] = True
            written[rows] = torch.arange(width) < len(answer)
        errors = [] if self._own is None else self._own.errors
        return Answers(prompts, completions, rewards, errors, samples, written=written)

    def given(self, question: Question) -> tuple[list[int], list[int]]:
        """Encode a question and its reference answer, which is cut where a sampled one would be.

        Raises DataError if the chat template does not show where the answer begins.
        """
        answer: Message = {"role": "assistant", "content": question.answer}
        tools = tools_of(question, self.sampler.tools)
        conversation = Conversation([*question.messages, answer], tools)
        ids, start = encode_answer(conversation, self.sampler.tokenizer, self._finder)
        end = min(len(ids), start + self.config.rl.max_new_tokens, self.block_size)
        if end <= start:
            raise DataError(
                f"the question {question.prompt!r:.60} has {start} tokens, which leave no room for "
                f"its answer in data.block_size {self.block_size}; raise it"
            )
        return ids[:start], ids[start:end]

    def metrics(self) -> dict[str, float]:
        """Figures of the completions that the student has sampled; none if there are none.

        A teacher teaches by answers with equal rewards, too: without rewards in the loss there is
        no share of questions that teach nothing.
        """
        if self._own is None:
            return {}
        if learns_teacher_alone(self.config):
            return self._own.metrics()
        equal = self._own.grouped_rewards
        no_signal = (equal.amax(1) == equal.amin(1)).float().mean().item()
        return self._own.metrics() | {"no_signal": no_signal}


def load_taught_questions(config: Config) -> TaughtData:
    """Load the questions of a task and the teacher.

    Raises UserError if they do not fit together, or a reference answer that is needed cannot be
    encoded.
    """
    data = load_with_teacher(config, lambda config: load_questions(config, TaughtRollouts))
    rollouts = data.train
    assert isinstance(rollouts, TaughtRollouts)
    if config.distill.on_policy < 1:
        # Found out now instead of at the step that reads it; generated answers are all alike.
        questions = rollouts.task.train
        for question in questions[:1] if is_generated(rollouts.task.name) else questions:
            try:
                rollouts.given(question)
            except DataError as error:
                raise UserError(
                    f"distill.on_policy: {config.distill.on_policy:g} takes reference answers, and "
                    f"one cannot be used: {error}; or set distill.on_policy 1"
                ) from None
    return data


def taught_policy_objective(config: Config, data: PreparedData) -> Objective:
    """Build the objective: the summed loss of the answers of a batch, from one forward pass of the
    student and one of the teacher.

    For each token of an answer, with w = `distill.weight` and T = `distill.temperature`:

        (1 - w) · policy loss + w · T² · D(teacher, student)   if the student has sampled the answer
        (1 - w) · cross-entropy + w · T² · D(teacher, student) if the answer was given

    D is the divergence of `distill.beta`, over the whole vocabulary, at temperature T. With w = 1
    it is the loss of TRL's DistillationTrainer and GKDTrainer, but for T².
    """
    weight = config.distill.weight

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        divergence_of = token_divergence(config, data, model, batch)

        def token_loss(
            chunk: slice, logits: Tensor, tokens: dict[str, Tensor]
        ) -> tuple[Tensor, Metrics]:
            # Rewards that have no weight need no gradient.
            with torch.set_grad_enabled(torch.is_grad_enabled() and weight < 1):
                loss, metrics = policy_loss(config.rl, logits, tokens)
            value, measured = divergence_of(chunk, logits, tokens)
            metrics |= measured
            taught = divergence_weight(config) * value
            if weight == 1:
                return taught, metrics
            # Targets of given answers only.
            given = tokens["shift_labels"].masked_fill(tokens["sampled"] == 1, IGNORED)
            cross_entropy = F.cross_entropy(logits, given, reduction="sum", ignore_index=IGNORED)
            return (1 - weight) * (loss + cross_entropy) + taught, metrics

        return completion_loss(model, batch, token_loss, config.rl)

    return objective


def token_divergence(
    config: Config, data: PreparedData, model: nn.Module, batch: dict[str, Tensor]
) -> TokenLoss:
    """Build the divergence of teacher and student, summed over the targets of a batch; it is its
    own metric, `divergence`.

    Only the hidden states of the teacher are kept. Its logits are computed for the tokens that the
    student's loss asks for.
    """
    teacher = teacher_of(data)
    # A student whose vocabulary is padded may sample what is no token of the teacher.
    ids = batch["input_ids"]
    readable = ids.where(ids < teacher.config.vocab_size, 0)
    positions = batch["shift_labels"].shape[1]
    with torch.no_grad():
        place_teacher(teacher, model, ids.device)
        logits_of = teacher.logits_of_rows(input_ids=readable, logits_to_keep=positions)

    def token_loss(
        chunk: slice, logits: Tensor, tokens: dict[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        targets = tokens["shift_labels"] != IGNORED
        with torch.no_grad():
            taught = logits_of(chunk)
        # Prompts and padding have no divergence. Choosing their rows would make the host wait.
        value = divergence(config, logits, taught).where(targets, 0.0).sum()
        return value, {"divergence": value}

    return token_loss


class _HeldOut(Blocks):
    """Answers as blocks, in the order in which they were sampled."""

    def __init__(self, answers: Answers, block_size: int):
        self.answers = answers
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.answers.prompts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return sequence_batch(self.answers, indices)

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.answers.learned[indices].sum())


@torch.no_grad()
def held_out_divergence(run: Run, answers: Answers) -> float:
    """Measure the mean divergence over the tokens of answers; the same on all processes."""
    blocks = _HeldOut(answers, run.config.data.block_size)
    rows = np.arange(len(blocks))
    total = torch.zeros((), device=run.accelerator.device)
    with eval_mode(run.model):
        size = run.batches.micro_batch_size
        for _, batch in rank_batches(run.accelerator, blocks, rows, size, pad=True):
            divergence_of = token_divergence(run.config, run.data, run.model, batch)
            total += completion_loss(run.model, batch, divergence_of)[0]
    return sum_over_ranks(run.accelerator, total).item() / blocks.num_targets(rows)


def evaluate_taught_policy(run: Run, stopping: Callable[[], bool]) -> Evaluated:
    """Do the same as `evaluate_policy`, and measure the divergence on the sampled answers; it is
    the score if rewards have no weight.
    """
    questions, answers = answer_held_out(run)
    found = evaluated_answers(run, questions, answers)
    value = held_out_divergence(run, answers)
    score = value if learns_teacher_alone(run.config) else found.score
    return found._replace(
        score=score,
        metrics=found.metrics | {"val/divergence": value},
        lines=[f"{line}, divergence {format_number(value, 4)}" for line in found.lines],
    )


class FullTaughtRollouts(FullRollouts):
    """`FullRollouts` whose answers the student has sampled."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return super().batch(indices) | {"sampled": torch.ones(len(indices))}


# Rewards and a teacher. It is a run of reinforcement learning with more in its loss.
TAUGHT_POLICY = dataclasses.replace(
    POLICY,
    name="reinforcement learning with a teacher",
    is_meant=lambda config: config.distill.teacher is not None,
    load=load_taught_questions,
    objective=taught_policy_objective,
    evaluate=evaluate_taught_policy,
    full_blocks=lambda config, _: FullTaughtRollouts(config),
)
# The teacher alone: rewards are measured, and change nothing.
ON_POLICY = dataclasses.replace(
    TAUGHT_POLICY,
    name="on-policy distillation",
    is_meant=learns_teacher_alone,
    describe_best=lambda score: f"best divergence from the teacher {format_number(score, 4)}",
    score=Score(
        "val/divergence", "divergence", "divergence from the teacher on held-out questions"
    ),
    scored_by=("distill.teacher", "distill.temperature", "distill.beta", "data.tokenizer"),
    score_across=REWARD,
)
