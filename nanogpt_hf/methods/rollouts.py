"""Rollouts: the blocks of a step of reinforcement learning, sampled from the model at that step.

Reinforcement learning has no prepared data. Its data are the questions of a task, and the
tokenizer of the model.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.batches import Batches, epoch_order
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.chat_template import chat_of
from nanogpt_hf.data.prepared import PreparedData, in_memory
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.evaluation.answers import Answers, AnswerSampler, encode_question
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.generate import Completions
from nanogpt_hf.methods.policy_loss import advantages, answer_weights, completion_log_probs
from nanogpt_hf.tasks.load import load_task
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import Question, Task, is_generated
from nanogpt_hf.tasks.tools import load_tools
from nanogpt_hf.tasks.turns import build_turns

logger = logging.getLogger(__name__)


def load_questions(
    config: Config, blocks: "Callable[[Config, Task, AnswerSampler], Rollouts] | None" = None
) -> PreparedData:
    """Load the data of a run of reinforcement learning: `blocks` that are sampled at each step, by
    default `Rollouts`, and a manifest of the task.

    Raises UserError if the task, its questions, the reward or the tokenizer cannot be used.
    """
    rl = config.rl
    name = rl.task
    assert name is not None, "a recipe without rl.task has another method"
    tokenizer = build_tokenizer(config.data.tokenizer, ()).hf
    chat = chat_of(tokenizer)
    turns = None
    if rl.tools:
        tools = load_tools(rl.tools, rl.reward_seconds)
        turns = build_turns(chat, tools, rl.max_turns, "rl.tools")
    task = load_task(
        name,
        config.data,
        reward=rl.reward,
        options=rl.options,
        seed=config.train.seed,
        encode=partial(
            encode_question, tokenizer=tokenizer, chat=chat, tools=turns.tools if turns else None
        ),
    )
    sampler = AnswerSampler(
        tokenizer,
        RewardFunction(task.score, rl.reward_seconds, rl.reward_errors),
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        batch_size=rl.batch_size or config.train.min_micro_batch_size,
        positions=config.data.block_size,
        turns=turns,
    )
    # A question has to leave room for rl.max_new_tokens in a block.
    advice = "raise data.block_size"
    train, too_long = sampler.fitting(task.train, advice)
    held_out, too_long_held_out = sampler.fitting(task.held_out, advice)
    left_out = len(too_long) + len(too_long_held_out)
    task = dataclasses.replace(task, train=train, held_out=held_out)
    rollouts = (blocks or Rollouts)(config, task, sampler)
    prompt = tokenizer.decode(sampler.encode(train[0]))
    line = f"{task.name}: {len(train):,} questions, {len(held_out):,} held out"
    if left_out:
        line += f"; {left_out:,} leave no room for rl.max_new_tokens, left out"
        line += " of the first 200" if is_generated(task.name) else ""
    logger.info(f"{line}; the first: {prompt!r:.200}")
    # Both splits are the rollouts: evaluations ask held-out questions, and read no blocks.
    return in_memory(
        rollouts,
        rollouts,
        tokenizer,
        source=config.data.source,
        # Other tools are another task, which a resume must notice.
        revision=f"{task.revision}, {turns.tools.revision}" if turns else task.revision,
        documents=(len(task.train), len(task.held_out)),
    )


class Rollouts(Blocks):
    """`Blocks` of a step: completions with their advantages, from `draw` until the next one.

    Every process holds all of them, so which rank trains on which does not matter. Before the
    first `draw` they are sequences of full length with advantage 0, for the dry-run step.
    """

    def __init__(self, config: Config, task: Task, sampler: AnswerSampler):
        self.config = config
        self.task = task
        self.sampler = sampler
        self.block_size = config.data.block_size
        self._length = config.train.tokens_per_step // self.block_size
        # A dry-run step has to need as much memory as any later one.
        lengths = torch.full((self._length,), self.block_size)
        ids = torch.zeros(self._length, self.block_size, dtype=torch.int64)
        ended = torch.ones(self._length, dtype=torch.bool)
        empty = Completions(ids, lengths, ended)
        self._answers = Answers([[0]] * self._length, empty, torch.zeros(self._length), [], 1)
        self._advantages = torch.zeros(self._length)
        # Log-probabilities (n, K) of micro-batches, by their name in a batch and the sequences.
        self._log_probs: dict[str, dict[tuple[int, ...], Tensor]] = {}
        # The order of the questions in an epoch. Two are kept: a step may cross an epoch's end.
        order = partial(epoch_order, config.train.seed, length=len(task.train))
        self._order = lru_cache(2)(order)

    def __len__(self) -> int:
        return self._length

    def num_targets(self, indices: np.ndarray) -> int:
        """Count the tokens that the model has written in the sequences at `indices`."""
        return int(self._answers.learned[indices].sum())

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Make a batch of the sequences at `indices`, with advantages and, if they were computed,
        log-probabilities.
        """
        batch = sequence_batch(self._answers, indices)
        batch |= {name: found[tuple(indices)] for name, found in self._log_probs.items()}
        batch["advantages"] = self._advantages[indices]
        weights = answer_weights(self.config.rl, self._answers.learned.sum(1))
        return batch | {name: values[indices] for name, values in weights.items()}

    def questions_at(self, step: int) -> list[Question]:
        """Choose the questions of a step; every question comes once per epoch, in an order that
        the seed decides.
        """
        per_step = self._length // self.config.rl.samples
        questions = []
        for number in range(step * per_step, (step + 1) * per_step):
            epoch, place = divmod(number, len(self.task.train))
            questions.append(self.task.train[int(self._order(epoch)[place])])
        return questions

    def draw(self, accelerator: Accelerator, model: nn.Module, step: int) -> None:
        """Sample the completions of a step from the model as it is now, and compute rewards and
        advantages.
        """
        samples = self.config.rl.samples
        # Row r is sample r mod `samples` of question r // `samples`. Each has a seed of its own,
        # so that completions do not depend on the processes that share the work.
        seeds = [
            derive_seed(self.config.train.seed, "rollouts", step, *divmod(row, samples))
            for row in range(self._length)
        ]
        self._answers = self.sampler.sample(accelerator, model, self.questions_at(step), seeds)
        # (questions, samples): an answer is compared with the other answers to its question.
        grouped = advantages(self.config.rl, self._answers.grouped_rewards)
        self._advantages = grouped.reshape(-1)
        self._log_probs = {}

    @torch.no_grad()
    def score(
        self,
        name: str,
        model: nn.Module,
        batches: Batches,
        step: int,
        accelerator: Accelerator,
    ) -> None:
        """Compute the log-probabilities of this rank's sequences under `model`; they become part
        of its batches, 0 where there is no target.
        """
        rows = batches.indices(step).reshape(-1, batches.micro_batch_size)
        scored = {}
        for index in range(batches.accumulation):
            # By micro-batches as the step has them: their width K depends on their prompts.
            indices = rows[batches.micro_batch_number(index)]
            batch: Any = send_to_device(sequence_batch(self._answers, indices), accelerator.device)
            with eval_mode(model), accelerator.autocast():
                found = completion_log_probs(model, batch, self.config.rl.temperature)
            scored[tuple(indices)] = found.cpu()
        self._log_probs[name] = scored

    def metrics(self) -> dict[str, float]:
        """Figures of the drawn completions. `no_signal` is the share of prompts whose rewards are
        all equal: their advantages are 0, and they teach nothing.
        """
        rewards = self._answers.grouped_rewards
        equal = (rewards.amax(1) == rewards.amin(1)).float().mean().item()
        return self._answers.metrics() | {"no_signal": equal}


class FullRollouts(Rollouts):
    """Rollouts of full length that are not sampled, for a run that is only measured."""

    def __init__(self, config: Config):
        super().__init__(config, Task("", (), (), lambda *_: 0.0, ""), cast(AnswerSampler, None))

    def draw(self, accelerator: Accelerator, model: nn.Module, step: int) -> None:
        """Forget the log-probabilities, as a draw does."""
        self._log_probs = {}

    def metrics(self) -> dict[str, float]:
        return {}


def sequence_batch(answers: Answers, indices: np.ndarray | Sequence[int]) -> dict[str, Tensor]:
    """Join prompts and completions, padded at the end: input_ids (n, T) and shift_labels (n, K).

    T is the longest of all answers, so that it does not depend on which process has which.
    shift_labels are the targets of the last K positions, -100 if they are not part of a
    completion, or a tool has written them; K reaches to the shortest prompt.
    """
    rows = [int(index) for index in indices]
    lengths = answers.completions.lengths.tolist()
    learned = answers.learned
    pairs = zip(answers.prompts, lengths, strict=True)
    # The target of position i is token i + 1, so a sequence of n tokens has n - 1 positions.
    width = max(len(prompt) + length for prompt, length in pairs) - 1
    # A process without rows needs one position, for a batch that is padded.
    start = min((len(answers.prompts[row]) for row in rows), default=width) - 1
    inputs = torch.zeros(len(rows), width + 1, dtype=torch.int64)
    labels = torch.full((len(rows), width - start), -100)
    for number, row in enumerate(rows):
        prompt = answers.prompts[row]
        length = lengths[row]
        end = len(prompt) + length
        inputs[number, : len(prompt)] = torch.tensor(prompt)
        inputs[number, len(prompt) : end] = answers.completions.ids[row, :length]
        # Column k of the labels is position start + k; its target is the token after it.
        written = inputs[number, len(prompt) : end].masked_fill(~learned[row, :length], -100)
        labels[number, len(prompt) - 1 - start : end - 1 - start] = written
    return {"input_ids": inputs[:, :-1].contiguous(), "shift_labels": labels}
