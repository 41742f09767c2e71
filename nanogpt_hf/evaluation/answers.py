"""Answers to the questions of a task: sampled on all processes, with rewards, pass@1 and pass@k."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from nanogpt_hf.data.chat_template import ChatFormat, chat_of
from nanogpt_hf.data.conversations import fields_of
from nanogpt_hf.data.tokenizer import prompt_ids
from nanogpt_hf.distributed.accelerator import is_sharded, sum_over_ranks
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.generate import (
    Completions,
    answer_end_ids,
    end_ids_of,
    generate_completions,
)
from nanogpt_hf.tasks.load import Generated
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import PASSED, Question

_LOOKED_AT = 100  # generated questions, of which there is no end


@dataclass(frozen=True)
class Answers:
    """`samples` completions of each prompt, one after another; the same on all processes, on the
    CPU.
    """

    prompts: list[list[int]]  # token ids of each row
    completions: Completions
    rewards: Tensor  # (rows,) float32
    errors: list[str]  # from the reward function; those rewards are 0
    samples: int

    @property
    def grouped_rewards(self) -> Tensor:
        """(prompts, samples)"""
        return self.rewards.view(-1, self.samples)

    def metrics(self) -> dict[str, float]:
        """Figures of the answers by name: reward, its spread within the samples of a prompt,
        lengths, errors.
        """
        lengths, ended = self.completions.lengths, self.completions.ended
        return {
            "reward": self.rewards.mean().item(),
            "reward_std": self.grouped_rewards.std(1, correction=0).mean().item(),
            "completion_tokens": lengths.float().mean().item(),
            "truncated": 1 - ended.float().mean().item(),
            **({"reward_errors": float(len(self.errors))} if self.errors else {}),
        }

    def pass_rates(self) -> dict[str, float]:
        """pass@1, the share of right answers, and pass@k, the share of questions with one among
        k samples.
        """
        passed = self.grouped_rewards >= PASSED
        rates = {"pass@1": passed.float().mean().item()}
        if self.samples > 1:
            rates[f"pass@{self.samples}"] = passed.any(1).float().mean().item()
        return rates


def encode_question(
    question: Question, tokenizer: transformers.PreTrainedTokenizerBase, chat: ChatFormat | None
) -> list[int]:
    """The token ids of a question's prompt. Raises UserError for unknown characters, and if the
    chat template refuses it.
    """
    if chat:
        return chat.prompt_ids(question.messages, question.tools)
    if question.tools or len(list(fields_of(question.messages))) > len(question.messages):
        raise UserError(
            f"the question {question.prompt!r:.60} has tools or other fields, and the model "
            "has no chat template that writes them"
        )
    return prompt_ids(tokenizer, question.prompt)


@dataclass(frozen=True)
class AnswerSampler:
    """Samples answers of a model and computes their rewards.

    A question is rendered by the tokenizer's chat template, and without one its last message is
    continued as text.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    reward: RewardFunction
    max_new_tokens: int
    temperature: float
    batch_size: int  # rows that a process generates at once
    positions: int  # a prompt with its answer

    @cached_property
    def chat(self) -> ChatFormat | None:
        return chat_of(self.tokenizer)

    def encode(self, question: Question) -> list[int]:
        """The prompt's token ids, by `encode_question`."""
        return encode_question(question, self.tokenizer, self.chat)

    def fits(self, question: Question) -> bool:
        """Whether the positions have room for a question and its answer."""
        return len(self.encode(question)) + max(1, self.max_new_tokens) <= self.positions

    def fitting(
        self, questions: Sequence[Question], more: str
    ) -> tuple[Sequence[Question], list[Question]]:
        """The questions that leave room for an answer, and those that do not.

        Generated questions are replaced by others; those of the first hundred are returned.
        Raises UserError if no question leaves room; `more` says how to get more positions.
        """
        generated = isinstance(questions, Generated)
        fits = {True: [], False: []}
        for question in questions[:_LOOKED_AT] if generated else questions:
            fits[self.fits(question)].append(question)
        if fits[False] and not fits[True]:
            shortest = min(fits[False], key=lambda question: len(self.encode(question)))
            count = len(self.encode(shortest))
            room = self.positions - count
            remedies = [f"lower max_new_tokens to {room}"] if room > 0 else []
            raise UserError(
                f"no question leaves room for an answer: the shortest, {shortest.prompt!r:.60}, "
                f"has {count} tokens; with max_new_tokens {max(1, self.max_new_tokens)} that is "
                f"more than {self.positions}, the size of a block or of the model; "
                f"{', or '.join([*remedies, more])}"
            )
        kept = dataclasses.replace(questions, fits=self.fits) if generated else fits[True]
        return kept, fits[False]

    def sample(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        questions: Sequence[Question],
        seeds: Sequence[int],
        progress: Callable[[int], object] = lambda rows: None,
    ) -> Answers:
        """An answer for each seed; each question gets len(seeds) / len(questions) of them, one
        after another.

        All processes call it and get the same answers. They share the batches, whose rows do not
        depend on the number of processes. Raises UserError if the reward function fails and
        errors are not counted as zeros.
        """
        mesh = mesh_of(accelerator)
        samples, rows = len(seeds) // len(questions), range(len(seeds))
        encoded = [self.encode(question) for question in questions]
        # Every process generates as many batches, which repeat the last row at their end.
        batches = -(-len(rows) // (self.batch_size * mesh.dp_size)) * mesh.dp_size
        found, errors = [], []
        unwrapped: Any = accelerator.unwrap_model(model)
        end_ids = answer_end_ids(unwrapped, self.chat) if self.chat else end_ids_of(unwrapped)
        for batch in range(mesh.dp_rank, batches, mesh.dp_size):
            own = rows[batch * self.batch_size :][: self.batch_size]
            padded = [*own, *[rows[-1]] * (self.batch_size - len(own))]
            # Compiled blocks would be recompiled for every length.
            with eval_mode(model), accelerator.autocast(), torch.compiler.set_stance("force_eager"):
                part = generate_completions(
                    unwrapped,
                    [encoded[row // samples] for row in padded],
                    seeds=[seeds[row] for row in padded],
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    end_ids=end_ids,
                    all_ended=lambda ended: _all_ended(accelerator, ended),
                )
            rewards = self.reward.rewards(
                self._texts(part)[: len(own)], [questions[row // samples] for row in own]
            )
            columns = *(column.tolist() for column in part), rewards.values
            found += zip(own, *columns, strict=False)
            errors += rewards.errors
            progress(len(own) * mesh.dp_size)
        found, errors = gather_object(found), gather_object(errors)
        self.reward.check(errors)
        _, *columns = zip(*sorted(found), strict=True)
        *completions, rewards = map(torch.tensor, columns)
        prompts = [encoded[row // samples] for row in rows]
        return Answers(prompts, Completions(*completions), rewards, errors, samples)

    def _texts(self, completions: Completions) -> list[str]:
        """The text of each completion, without special tokens."""
        ids, lengths = completions.ids.tolist(), completions.lengths.tolist()
        kept = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def texts(self, answers: Answers, rows: Sequence[int]) -> list[str]:
        """The text of some of the answers."""
        chosen = [part[list(rows)] for part in answers.completions]
        return self._texts(Completions(*chosen))


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """For each question the probability that one of k samples is right: an unbiased estimate from n
    >= k samples.

    `passed` is true for right samples, (questions, n). With c right ones: 1 - C(n - c, k) / C(n,
    k) (Chen et al. 2021, arXiv:2107.03374, equation 1), computed as the product of (n - c - i) /
    (n - i) for i < k.
    """
    samples = passed.shape[1]
    wrong = samples - passed.sum(1).double()
    all_wrong = torch.ones_like(wrong)
    for i in range(k):
        all_wrong *= (wrong - i).clamp(min=0) / (samples - i)
    return 1 - all_wrong


def _all_ended(accelerator: Accelerator, ended: bool) -> bool:
    """Whether generation is over; the forward pass of a sharded model needs all processes."""
    if not is_sharded(accelerator):
        return ended
    running = torch.tensor(int(not ended), device=accelerator.device)
    return not sum_over_ranks(accelerator, running).item()
