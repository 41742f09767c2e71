"""Answers to the questions of a task: sampled on all processes, with rewards, pass@1 and pass@k."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from nanogpt_hf.data.answer_format import AnswerFormat, answer_format
from nanogpt_hf.data.chat_template import ChatFormat, chat_of
from nanogpt_hf.data.hf_tokenizer import prompt_ids
from nanogpt_hf.data.messages import fields_of
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.evaluation.turns import Conversed, converse, written_by_model
from nanogpt_hf.generate import (
    Completions,
    answer_end_ids,
    end_ids_of,
    generate_completions,
)
from nanogpt_hf.tasks.load import Generated
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import PASSED, Question
from nanogpt_hf.tasks.tools import Tools
from nanogpt_hf.tasks.turns import Turns

_LOOKED_AT = 100  # generated questions that are tried; there is no end of them


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
    # What the reward has read of each row: its last turn, without thought and calls of tools.
    texts: Sequence[str] = ()
    # (rows, tokens) bool: the tokens that the model has written. None: all of each completion.
    written: Tensor | None = None
    # (rows, 2) calls of tools, and calls that failed; None without tools.
    calls: Tensor | None = None

    @property
    def grouped_rewards(self) -> Tensor:
        """(prompts, samples)"""
        return self.rewards.view(-1, self.samples)

    @property
    def learned(self) -> Tensor:
        """(rows, tokens) bool: the tokens of the completions that the model has written, and not a
        tool.
        """
        if self.written is not None:
            return self.written
        return written_by_model(self.completions)

    def metrics(self) -> dict[str, float]:
        """Figures of the answers by name: reward, its spread within the samples of a prompt,
        lengths, errors.
        """
        lengths = self.learned.sum(1)
        ended = self.completions.ended
        figures = {"reward": self.rewards.mean().item()}
        if self.samples > 1:
            # Where it is 0, the answers to a prompt have equal rewards: nothing to learn from.
            figures["reward_std"] = self.grouped_rewards.std(1, correction=0).mean().item()
        figures["completion_tokens"] = lengths.float().mean().item()
        figures["truncated"] = 1 - ended.float().mean().item()
        figures |= self.tool_figures()
        if self.errors:
            figures["reward_errors"] = float(len(self.errors))
        return figures

    def tool_figures(self) -> dict[str, float]:
        """Calls of tools per answer, and the share of them whose result is an error."""
        if self.calls is None:
            return {}
        calls, failed = self.calls.sum(0).tolist()
        per_answer = calls / len(self.calls)
        return {"tool_calls": per_answer, "tool_errors": failed / calls if calls else 0.0}

    def pass_rates(self) -> dict[str, float]:
        """pass@1, the share of right answers, and pass@k, the share of questions with at least one
        right answer among k.
        """
        passed = self.grouped_rewards >= PASSED  # (prompts, samples)
        rates = {"pass@1": passed.float().mean().item()}
        if self.samples > 1:
            rates[f"pass@{self.samples}"] = passed.any(1).float().mean().item()
        return rates


def encode_question(
    question: Question,
    tokenizer: transformers.PreTrainedTokenizerBase,
    chat: ChatFormat | None,
    tools: Tools | None = None,
) -> list[int]:
    """The token ids of a question's prompt. Raises UserError for unknown characters, and if the
    chat template refuses it.
    """
    if chat:
        return chat.prompt_ids(question.messages, tools_of(question, tools))
    # Plain text has no place for tools or for fields such as reasoning_content.
    if question.tools or len(list(fields_of(question.messages))) > len(question.messages):
        raise UserError(
            f"the question {question.prompt!r:.60} has tools or other fields, and the model "
            "has no chat template that writes them"
        )
    return prompt_ids(tokenizer, question.prompt)


def tools_of(question: Question, tools: Tools | None) -> list[Any] | None:
    """The tools that a question's prompt lists: its own, or else those that can be called.

    Raises UserError if its own are others than those.
    """
    if tools is None or not question.tools:
        return question.tools if tools is None else tools.schemas
    names = {tool["function"]["name"] for tool in question.tools}
    if unknown := names - tools.functions.keys():
        raise UserError(
            f"the question {question.prompt!r:.60} has a tool {min(unknown)!r:.40} of its own, "
            f"which is none of {', '.join(tools.functions)}"
        )
    return question.tools


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
    positions: int  # limit for the tokens of a prompt with its answer
    turns: Turns | None = None  # the tools that an answer may call

    @cached_property
    def chat(self) -> ChatFormat | None:
        return chat_of(self.tokenizer)

    @cached_property
    def form(self) -> AnswerFormat:
        return answer_format(self.chat)

    def encode(self, question: Question) -> list[int]:
        """The prompt's token ids, by `encode_question`."""
        return encode_question(question, self.tokenizer, self.chat, self.tools)

    @property
    def tools(self) -> Tools | None:
        return self.turns.tools if self.turns else None

    def fits(self, question: Question) -> bool:
        """Whether the positions have room for a question and its answer."""
        return len(self.encode(question)) + max(1, self.max_new_tokens) <= self.positions

    def fitting(
        self, questions: Sequence[Question], more: str
    ) -> tuple[Sequence[Question], list[Question]]:
        """Separate the questions that leave room for an answer from the questions that do not.

        Generated questions without room are replaced by others; of them, only the ones among the
        first hundred are returned. Raises UserError if no question leaves room; `more` says how to
        get more positions.
        """
        generated = isinstance(questions, Generated)
        fitting = []
        too_long = []
        for question in questions[:_LOOKED_AT] if generated else questions:
            (fitting if self.fits(question) else too_long).append(question)
        if too_long and not fitting:
            shortest = min(too_long, key=lambda question: len(self.encode(question)))
            count = len(self.encode(shortest))
            room = self.positions - count
            remedies = [f"lower max_new_tokens to {room}"] if room > 0 else []
            raise UserError(
                f"no question leaves room for an answer: the shortest, {shortest.prompt!r:.60}, "
                f"has {count} tokens; with max_new_tokens {max(1, self.max_new_tokens)} that is "
                f"more than {self.positions}, the size of a block or of the model; "
                f"{', or '.join([*remedies, more])}"
            )
        # Its numbers go on without an end, so it skips questions without room when they are drawn.
        if generated:
            return dataclasses.replace(questions, fits=self.fits), too_long
        return fitting, too_long

    def sample(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        questions: Sequence[Question],
        seeds: Sequence[int],
        progress: Callable[[int], object] = lambda rows: None,
    ) -> Answers:
        """Sample an answer for each seed. Each question gets len(seeds) / len(questions) answers,
        one after another.

        All processes call it and get the same answers. They share the rows, whose answers do not
        depend on the number of processes but by rounding. `progress` is called with the number of
        answers since the last call. Raises UserError if the reward function fails and errors are
        not counted as zeros.
        """
        # 1. Encode the questions, and divide the rows among the processes, a batch at a time.
        mesh = mesh_of(accelerator)
        samples = len(seeds) // len(questions)
        rows = range(len(seeds))  # row r is an answer to question r // samples
        encoded = [self.encode(question) for question in questions]
        own = [row for row in rows if row // self.batch_size % mesh.dp_size == mesh.dp_rank]
        # 2. Generate and reward this process's rows.
        part = self._answer(
            accelerator,
            model,
            [encoded[row // samples] for row in own],
            [seeds[row] for row in own],
            lambda ended: progress(ended * mesh.dp_size),
        )
        asked = [questions[row // samples] for row in own]
        rewards = self.reward.rewards(part.texts, asked)
        # 3. Give all processes all rows.
        columns = [column.tolist() for column in (*part.completions, part.written, part.calls)]
        found = gather_object([*zip(own, part.texts, *columns, rewards.values, strict=True)])
        errors = gather_object(rewards.errors)
        self.reward.check(errors)
        # Sorted by row: the order of the seeds, whichever process generated an answer.
        _, texts, *columns = zip(*sorted(found), strict=True)
        *completions, written, calls, rewards = map(torch.tensor, columns)
        prompts = [encoded[row // samples] for row in rows]
        return Answers(
            prompts,
            Completions(*completions),
            rewards,
            errors,
            samples,
            texts,
            written if self.turns else None,
            calls if self.turns else None,
        )

    def _answer(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        prompts: list[list[int]],
        seeds: list[int],
        progress: Callable[[int], object],
    ) -> Conversed:
        """Generate the answers to some prompts, with all their turns."""
        unwrapped: Any = accelerator.unwrap_model(model)
        end_ids = answer_end_ids(unwrapped, self.chat) if self.chat else end_ids_of(unwrapped)

        def all_ended(ended: bool) -> bool:
            return _all_ended(accelerator, ended)

        generate = partial(
            generate_completions,
            unwrapped,
            temperature=self.temperature,
            end_ids=end_ids,
            batch_size=self.batch_size,
            all_ended=all_ended,
        )
        limits = [self.max_new_tokens] * len(prompts)
        # Compiled blocks would be compiled again for every length.
        with eval_mode(model), accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            if self.turns:
                return converse(
                    self.turns, generate, prompts, seeds, limits, end_ids, all_ended, progress
                )
            completions = generate(prompts, seeds=seeds, limits=limits, progress=progress)
        form = self.form if self.form.thinks else None
        texts = self._texts(completions, form)
        if form:
            texts = [form.read(text).content for text in texts]
        calls = torch.zeros(len(prompts), 2, dtype=torch.int64)
        return Conversed(completions, written_by_model(completions), texts, calls)

    def _texts(self, completions: Completions, form: AnswerFormat | None = None) -> list[str]:
        """The text of each completion without special tokens; with a form, its marks are kept."""
        ids = completions.ids.tolist()  # (rows, tokens), filled up behind a row's end
        lengths = completions.lengths.tolist()
        kept = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        # A process may have no rows, of which transformers would make one text.
        if not kept:
            return []
        if form:
            return self.tokenizer.batch_decode(list(map(form.visible, kept)))
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)

    def texts(self, answers: Answers, rows: Sequence[int]) -> list[str]:
        """The whole text of some of the answers, with thoughts, calls and results of tools."""
        chosen = [part[list(rows)] for part in answers.completions]
        return self._texts(Completions(*chosen))


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Estimate, for each question, the probability that one of k samples is right, without bias,
    from n >= k samples.

    `passed` is true for right samples, (questions, n). With c right ones: 1 - C(n - c, k) / C(n,
    k) (Chen et al. 2021, arXiv:2107.03374, equation 1), computed as the product of (n - c - i) /
    (n - i) for i < k.
    """
    samples = passed.shape[1]
    wrong = samples - passed.sum(1).double()  # (questions,)
    # The probability that k samples, drawn without replacement from the n, are all wrong.
    all_wrong = torch.ones_like(wrong)
    for i in range(k):
        all_wrong *= (wrong - i).clamp(min=0) / (samples - i)
    return 1 - all_wrong


def _all_ended(accelerator: Accelerator, ended: bool) -> bool:
    """Whether generation is over: a sharded model needs all processes in each forward pass, so it
    runs until the rows of all of them have ended.
    """
    if not mesh_of(accelerator).is_sharded:
        return ended
    running = torch.tensor(int(not ended), device=accelerator.device)
    return not sum_over_ranks(accelerator, running).item()
