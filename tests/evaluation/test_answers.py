"""Answers to questions, as each of several processes samples them."""

from types import SimpleNamespace

import pytest

from nanogpt_hf.commands.generate import open_model
from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation import answers
from nanogpt_hf.evaluation.answers import AnswerSampler
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import Question


def length_of(completion: str, question: Question) -> float:
    return float(len(completion))


@pytest.fixture(scope="module", params=[False, True], ids=["text", "chat"])
def opened(request, letter_model, chat_model):
    return open_model(str(chat_model if request.param else letter_model))


@pytest.mark.parametrize(
    ("questions", "samples", "batch_size", "processes"),
    [(1, 1, 8, 2), (3, 1, 8, 3), (5, 2, 3, 2), (4, 1, 1, 8), (6, 1, 2, 2)],
)
def test_each_process_samples_its_rows_even_if_it_has_none(
    opened, questions, samples, batch_size, processes, monkeypatch
):
    model, tokenizer = opened
    reward = RewardFunction(length_of, 5.0, "stop")
    sampler = AnswerSampler(
        tokenizer,
        reward,
        max_new_tokens=5,
        temperature=1.0,
        batch_size=batch_size,
        positions=model.config.max_position_embeddings,
    )
    asked = [
        Question([{"role": "user", "content": "abc"[: n % 3 + 1]}], "a") for n in range(questions)
    ]
    seeds = range(questions * samples)
    accelerator = build_evaluation_accelerator(Mesh())
    given = []
    monkeypatch.setattr(answers, "gather_object", lambda part: given.append(part) or part)
    expected = sampler.sample(accelerator, model, asked, seeds)
    whole = given[0]
    for rank in range(processes):
        given.clear()
        mesh = SimpleNamespace(dp_size=processes, dp_rank=rank, is_sharded=False)
        monkeypatch.setattr(answers, "mesh_of", lambda _, mesh=mesh: mesh)
        # What the other processes have gathered: all rows, or all errors.
        monkeypatch.setattr(
            answers,
            "gather_object",
            lambda part: given.append(part) or (whole if len(given) == 1 else part),
        )
        found = sampler.sample(accelerator, model, asked, seeds)
        own = [row for row in range(len(seeds)) if row // batch_size % processes == rank]
        assert given[0] == [whole[row] for row in own]
        assert found.texts == expected.texts
        assert found.rewards.equal(expected.rewards)
