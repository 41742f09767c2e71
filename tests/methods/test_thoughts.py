"""Models whose template thinks: what rewards read, and what `rl` and `align` learn and count."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from chat_templates import calling
from nanogpt_hf.data.conversations import pair_of
from nanogpt_hf.evaluation import answers as answers_file
from nanogpt_hf.evaluation.answers import AnswerSampler
from nanogpt_hf.generate import Completions
from nanogpt_hf.methods.pairs import encode_answer
from nanogpt_hf.methods.rollouts import sequence_batch
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import Question, exact_match

WRITTEN = {
    "<think>\n1 and 1\n</think>\n\n2": 1.0,
    "2": 1.0,
    "<think>\n2": 0.0,
    "<think>\n2\n</think>\n\n3": 0.0,
}


@pytest.fixture
def sampled(monkeypatch, fresh_accelerate):
    """The answers of WRITTEN to one question, by a sampler whose model wrote them."""
    hf = calling("hermes that thinks")

    def generate(model, prompts, *, limits, **options):
        ids = torch.zeros(len(prompts), limits[0], dtype=torch.int64)
        texts = [
            [*hf(text, add_special_tokens=False)["input_ids"], hf.eos_token_id] for text in WRITTEN
        ]
        for row, tokens in enumerate(texts):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in texts])
        ended = torch.ones(len(texts), dtype=torch.bool)
        return Completions(ids, lengths, ended)

    monkeypatch.setattr(answers_file, "generate_completions", generate)
    end = SimpleNamespace(eos_token_id=hf.eos_token_id)
    model = torch.nn.Linear(1, 1)
    model.config = model.generation_config = end
    sampler = AnswerSampler(
        hf,
        RewardFunction(exact_match, 5.0, "stop"),
        max_new_tokens=60,
        temperature=1.0,
        batch_size=4,
        positions=200,
    )
    question = Question([{"role": "user", "content": "1+1"}], "2")
    return sampler, sampler.sample(Accelerator(cpu=True), model, [question], list(range(4)))


def test_rewards_read_the_text_after_the_thought(sampled):
    _, answers = sampled
    assert list(answers.texts) == ["2", "2", "", "3"]
    assert answers.rewards.tolist() == [*WRITTEN.values()]


def test_thoughts_are_learned_counted_and_shown(sampled):
    sampler, answers = sampled
    batch = sequence_batch(answers, range(4))
    for row, text in enumerate(WRITTEN):
        labels = batch["shift_labels"][row]
        learned = sampler.tokenizer.decode(labels[labels != -100])
        assert learned == f"{text}<|im_end|>"
    lengths = answers.completions.lengths.double()
    assert answers.metrics()["completion_tokens"] == lengths.mean()
    assert sampler.texts(answers, [0]) == [next(iter(WRITTEN))]


def test_align_learns_the_thought_of_an_answer_with_its_text():
    from nanogpt_hf.data.chat_examples import finder_of

    hf = calling("hermes that thinks")
    row = {
        "prompt": "1+1",
        "chosen": [{"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    }
    learned = []
    for conversation in pair_of(json.loads(json.dumps(row))):
        ids, start = encode_answer(conversation, hf, finder_of(hf))
        learned.append(hf.decode(ids[start:]))
    assert learned == ["<think>\n1 and 1\n</think>\n\n2<|im_end|>", "3<|im_end|>"]
