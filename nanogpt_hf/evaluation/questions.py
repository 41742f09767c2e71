"""Accuracy in tasks with verifiable answers: pass@1 and pass@k of sampled answers."""

import math
from argparse import Namespace
from collections.abc import Iterator
from functools import partial

from nanogpt_hf.evaluation.base import (
    COUNT,
    LIMIT,
    MAX_NEW_TOKENS,
    TASKS,
    TEMPERATURE,
    Evaluation,
    Loaded,
    Option,
    Request,
    Result,
    Subject,
    with_error,
)
from nanogpt_hf.evaluation.question_task import QuestionTask, answers_to, load_question_task
from nanogpt_hf.evaluation.tasks import QUESTIONS, task_names
from nanogpt_hf.formatting import plural
from nanogpt_hf.tasks.task import PASSED


class QuestionAnswers(Evaluation):
    options = (
        TASKS,
        Option(
            "--questions ROWS",
            "rl: rows with questions and answers: a file, URL or data set",
            names_source=True,
        ),
        Option("--samples K", "rl: answers to each question (default 1)", COUNT),
        Option(
            "--reward FILE:FUNCTION",
            "your own score of an answer to --questions, as for `rl`",
        ),
        Option(
            "--tools A,B",
            "rl: tools that an answer may call: calculator, or Python files, as for `rl`",
        ),
        TEMPERATURE,
        MAX_NEW_TOKENS,
        LIMIT,
    )

    @property
    def asked_by(self) -> str:
        """--tasks with a prefix: without it, the option asks for lm-eval's tasks."""
        return f"--tasks {QUESTIONS}NAME"

    def wanted(self, arguments: Namespace) -> bool:
        return bool(task_names(arguments, of_rl=True) or arguments.reward)

    def load(self, request: Request) -> Loaded:
        arguments = request.arguments
        # A reward alone scores the answers to the rows of --questions instead of `exact`.
        titles = task_names(arguments, of_rl=True) or [f"{QUESTIONS}exact"]
        tasks = [
            load_question_task(
                title.removeprefix(QUESTIONS),
                request,
                title=title,
                source=arguments.questions,
                option="--questions",
                reward=arguments.reward,
                tools=arguments.tools,
            )
            for title in titles
        ]
        revisions = {f"questions of {task.name}": task.revision for task in tasks}
        return Loaded(partial(_measure, tasks), revisions)


def _measure(tasks: list[QuestionTask], subject: Subject) -> Iterator[Result]:
    results = {}
    for task in tasks:
        values, errors = _sample_answers(subject, task)
        sampler = task.sampler
        asked = f"{plural(len(task.questions), 'question')}, {plural(task.samples, 'answer')} each"
        if task.left_out:
            asked += f" ({task.left_out:,} more leave no room for it, left out)"
        cut = f"{values['cut_share']:.1%} cut at {sampler.max_new_tokens:,}"
        lines = [f"{subject.name} on {task.name}: {asked}, temperature {sampler.temperature:g}"]
        for name, error in errors.items():
            lines.append(f"  {name:<14} {with_error(values[name], error, 4)}")
        lines.append(f"  {values['answer_tokens']:.1f} tokens per answer, {cut}")
        if "tool_calls" in values:
            failed = f"{values['tool_errors']:.1%} of them failed"
            lines.append(f"  {values['tool_calls']:.2f} calls of tools per answer, {failed}")
        yield Result(lines)
        # JSON has no NaN: the error over a single question
        finite = {
            f"{name}_stderr": error if math.isfinite(error) else None
            for name, error in errors.items()
        }
        results[task.name] = {
            **values,
            **finite,
            "questions": len(task.questions),
            "questions_left_out": task.left_out,
            "samples": task.samples,
            "temperature": sampler.temperature,
            "max_new_tokens": sampler.max_new_tokens,
            "revision": task.revision,
        }
        if sampler.turns:
            results[task.name]["tools"] = sampler.turns.tools.revision
    yield Result(figures={"answers": results})


def _sample_answers(
    subject: Subject, task: QuestionTask
) -> tuple[dict[str, float], dict[str, float]]:
    """Sample answers to the questions of a task. Return figures by name, and the standard errors
    over the questions for the figures that are rates.
    """
    from nanogpt_hf.evaluation.answers import pass_at_k

    answers = answers_to(task, subject)
    # pass@k for k = 1, 2, 4, ... and for the number of samples
    counts = {2**power for power in range(task.samples.bit_length())} | {task.samples}
    reward = answers.grouped_rewards.double()  # (questions, samples)
    completions = answers.completions
    rates = {f"pass@{k}": pass_at_k(reward >= PASSED, k) for k in sorted(counts)}
    # A mean reward adds nothing to pass@1, unless some answers are partly right.
    if bool(((reward != 0) & (reward != 1)).any()):
        rates["reward"] = reward.mean(1)
    figures = {
        "answer_tokens": answers.learned.sum(1).double().mean(),
        "cut_share": 1 - completions.ended.double().mean(),
    }
    values = {name: tensor.mean().item() for name, tensor in (rates | figures).items()}
    values |= answers.tool_figures()
    # The questions are the independent draws, not the answers: answers to one question are alike.
    count = len(task.questions)
    errors = dict.fromkeys(rates, math.nan)
    if count > 1:
        errors = {name: (rate.std() / math.sqrt(count)).item() for name, rate in rates.items()}
    return values, errors
