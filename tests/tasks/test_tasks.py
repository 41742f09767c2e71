"""Loading tasks: questions as functions of (seed, index), disjoint splits, mistakes in one line."""

import dataclasses
import json
from itertools import islice

import pytest

from assertions import refusal
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.built_in import arithmetic_rows, arithmetic_text, is_held_out
from nanogpt_hf.errors import UserError
from nanogpt_hf.tasks.load import load_task


def test_arithmetic_questions_depend_only_on_seed_and_index():
    first, again, other = (load_task("arithmetic", DataSection(), seed=seed) for seed in (1, 1, 2))
    assert first.train[900:910] == again.train[900:910] == [again.train[i] for i in range(900, 910)]
    assert first.train[900:910] != other.train[900:910]
    with pytest.raises(IndexError):
        first.train[len(first.train)]


def test_arithmetic_answers_are_right_and_scored():
    task = load_task("arithmetic", DataSection())
    for question in task.train[:50]:
        assert int(question.answer) == eval(question.prompt)
        assert task.score(f" {question.answer}\n", question) == 1
        assert task.score(question.answer + "0", question) == 0


@pytest.mark.long
def test_arithmetic_held_out_questions_are_in_no_text_or_conversation():
    task = load_task("arithmetic", DataSection())
    held_out = {question.prompt for question in task.held_out[:300]}
    assert all(is_held_out(prompt) for prompt in held_out)
    lines = (line for row in islice(arithmetic_text(), 500) for line in row.splitlines())
    text = {line.partition("=")[0] for line in lines}
    asked = {row["prompt"] for row in islice(arithmetic_rows(), 5000)}
    assert len(text | asked) > 5000
    assert not held_out & (text | asked | {question.prompt for question in task.train[:300]})


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSection(source=str(path), validation_fraction=0.25)


def test_questions_of_a_file_are_split_and_keep_system_messages(tmp_path):
    rows = [{"prompt": f"{n} apples?", "completion": f"#### {n}"} for n in range(7)]
    rows.append(
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in (("system", "Hi"), ("user", "8"), ("assistant", "#### 8"))
            ]
        }
    )
    task = load_task("gsm8k", write_rows(tmp_path / "questions.jsonl", rows))
    questions = [*task.train, *task.held_out]
    assert (len(task.train), len(task.held_out)) == (6, 2)
    assert {q.answer for q in questions} == {f"#### {n}" for n in range(9) if n != 7}
    assert ["system", "user"] in [[m["role"] for m in q.messages] for q in questions]


def test_mistakes_end_in_one_line(tmp_path):
    data = write_rows(
        tmp_path / "q.jsonl",
        [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}],
    )
    for arguments, options, message in (
        (("aritmetic", data), None, "did you mean arithmetic"),
        (("gsm8k", data), None, "####"),
        (("gsm8k", DataSection()), None, "gsm8k"),
        (("exact", data), {"x": 1}, "rl.options: "),
    ):
        assert message in refusal(load_task, *arguments, options=options, error=UserError)


def test_reasoning_gym_questions_and_scores():
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:chain_sum", DataSection(), options={"max_terms": 3}, seed=3)
    again = load_task("reasoning_gym:chain_sum", DataSection(), options={"max_terms": 3}, seed=3)
    question = task.train[777_777]
    assert question == again.train[777_777]
    assert task.score(question.answer, question) == 1 > task.score("nonsense", question)
    train, held_out = ({q.prompt for q in split[:200]} for split in (task.train, task.held_out))
    assert len(held_out) > 50
    assert not train & held_out
    unknown = {"options": {"max_term": 3}, "error": UserError}
    assert "max_term" in refusal(load_task, "reasoning_gym:chain_sum", DataSection(), **unknown)


@pytest.mark.parametrize("name", ["arithmetic", "reasoning_gym:chain_sum"])
def test_generated_questions_that_do_not_fit_are_replaced(name):
    if name != "arithmetic":
        pytest.importorskip("reasoning_gym")
    task = load_task(name, DataSection())
    shortest, longest = (
        pick(len(question.prompt) for question in task.train[:100]) for pick in (min, max)
    )
    assert shortest < longest
    fitting = dataclasses.replace(task.train, fits=lambda q: len(q.prompt) < longest)
    questions = fitting[:100]
    assert max(len(question.prompt) for question in questions) < longest
    # Those that fit stay in their places.
    for question, own in zip(questions, task.train[:100], strict=True):
        assert question == own or len(own.prompt) >= longest
    assert fitting[7] == questions[7]
    none = dataclasses.replace(task.train, fits=lambda question: False)
    assert name in refusal(none.__getitem__, 3, error=UserError)
