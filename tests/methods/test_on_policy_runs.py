"""Runs of on-policy distillation: they learn the teacher, resume exactly, do not depend on
processes, and refuse teachers and knobs that do not fit.
"""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from assertions import copy_at, file_contents, same_weights, series, weights
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

pytestmark = pytest.mark.long
KNOBS = {
    "data.block_size": 64,
    "train.tokens_per_step": 1024,  # 16 sequences: 4 questions × 4 completions
    "train.micro_batch_size": 4,
    "train.max_steps": 6,
    "optim.learning_rate": 1e-2,
    "eval.every": 3,
    "checkpoint.every": 2,
    "rl.samples": 4,
    "rl.max_new_tokens": 6,
    "rl.eval_questions": 3,
    "rl.eval_samples": 2,
    "distill.weight": 1.0,
}
# Rewards, given answers and every part of the objective.
MIXED = {
    "distill__weight": 0.6,
    "distill__beta": 0.3,
    "distill__temperature": 1.5,
    "distill__on_policy": 0.5,
    "rl__kl": 0.1,
    "rl__updates": 2,
    "rl__clip": 0.2,
    "tracking__layers": "true",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model):
    """A student of random weights, and a teacher of one block more that answers with sevens."""
    folder = tmp_path_factory.mktemp("on_policy")

    def prefers(text: str):
        def change(model, tokenizer):
            likely = tokenizer(text, add_special_tokens=False)["input_ids"]
            likely = [*likely, tokenizer.eos_token_id]
            model.transformer.ln_f.bias.copy_(torch.randn(32).sign())
            model.transformer.wte.weight[likely] += 0.2 * model.transformer.ln_f.bias

        return change

    save_chat_model(folder / "student", prefers("0123456789"), bias=True)
    save_chat_model(folder / "teacher", prefers("7"), bias=True, n_layer=3, dropout=0.1)
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs."""

    def arguments(name: str, **knobs) -> list[str]:
        values = KNOBS | {key.replace("__", "."): value for key, value in knobs.items()}
        options = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        start = ["--from", str(folder / "student"), "--task", "arithmetic"]
        start += ["--distill.teacher", str(folder / "teacher")]
        return [*start, "--run-dir", str(folder / name), *options]

    return arguments


@pytest.fixture(scope="module")
def train(folder, arguments, forget_accelerate):
    """Train with other knobs into the run folder `name`; return it."""

    def train(name: str, *flags: str, **knobs) -> RunFolder:
        forget_accelerate()
        assert main(["rl", *arguments(name, **knobs), *flags]) == 0
        forget_accelerate()
        return RunFolder(folder / name)

    return train


@pytest.fixture(scope="module")
def mixed(train) -> RunFolder:
    return train("mixed", **MIXED)


def test_student_learns_the_teacher_on_its_own_answers(train):
    run = train("learning", train__max_steps=25, eval__every=25)
    divergences = series(run, "train/divergence")
    assert divergences[-1] < 0.5 * divergences[0]
    assert series(run, "train/loss") == pytest.approx(divergences, rel=1e-6)
    first, last = series(run, "val/divergence")
    assert last < 0.5 * first
    assert len(series(run, "train/reward")) == 25
    sevens = [event["samples"][0]["text"].count("7") for event in read_metrics(run) if "samples" in event]
    assert sevens[-1] > sevens[0]
    assert f"{last:.4f} on held-out questions" in (run.best / "README.md").read_text()
