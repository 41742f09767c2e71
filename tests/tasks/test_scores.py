"""Scores of completions against reference answers."""

import pytest

from nanogpt_hf.tasks.task import SCORES, Question, reference_problem


def score(task: str, completion: str, answer: str) -> float:
    return SCORES[task](completion, Question([{"role": "user", "content": "?"}], answer))


@pytest.mark.parametrize(
    ("task", "answer", "right", "wrong"),
    [
        (
            "gsm8k",
            "6 * 7 = 42\n#### 42",
            ["#### 42", "So 42.\n#### 42.0", "#### 41 no, #### 42"],
            ["42", "#### 4"],
        ),
        ("gsm8k", "#### 1,234", ["#### 1234", "#### $1,234."], ["#### 1.234", "####"]),
        ("gsm8k", "#### -3", ["#### -3"], ["#### 3"]),
        (
            "multiple_choice",
            "B",
            ["B", "(B)", "b", "B. Paris", "I think the answer is B."],
            ["C", "Between B", "A", ""],
        ),
        ("multiple_choice", "(C) no", ["Answer: C", "C) no"], ["The answer is a word", "B"]),
        ("exact", "nineteen  men", [" nineteen men\n"], ["nineteen", "Nineteen men"]),
        ("regex", r"^\d+ apples$", ["12 apples"], ["apples", "12 apples!"]),
    ],
)
def test_scores_of_right_and_wrong_completions(task, answer, right, wrong):
    assert [score(task, completion, answer) for completion in right] == [1.0] * len(right)
    assert [score(task, completion, answer) for completion in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("task", "answer"), [("gsm8k", "42"), ("multiple_choice", "Paris"), ("regex", "(")]
)
def test_reference_problem_names_answers_that_cannot_be_compared(task, answer):
    assert reference_problem(task, answer)
    assert not reference_problem("exact", answer)
