"""Runs of reinforcement learning whose answers call a tool: what is learned, counted and shown,
resumed exactly, and equal on two processes.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from assertions import copy_at, same_weights, series, weights
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics
from policy_runs import TOOL, policy_trainer, save_tool_caller, tool_words

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model):
    folder = tmp_path_factory.mktemp("tools")
    save_tool_caller(folder, save_chat_model)
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs."""
    return tool_words(folder)


@pytest.fixture(scope="module")
def train(folder, arguments, forget_accelerate):
    """Train with other knobs into the run folder `name`; return it."""
    return policy_trainer(folder, arguments, forget_accelerate)


@pytest.fixture(scope="module")
def plain(train) -> RunFolder:
    return train("plain", rl__kl=0.1)


def test_run_calls_the_tool_and_reports_calls_and_errors(plain):
    events = read_metrics(plain)
    calls = series(plain, "train/tool_calls")
    assert len(calls) == 4
    assert max(calls) > 0.4
    assert max(series(plain, "train/tool_errors")) > 0
    shown = [sample["text"] for event in events for sample in event.get("samples", [])]
    assert any('<tool_call>\n{"name": "f"' in text and "### Tool:\n" in text for text in shown)


def places_of_the_model(tokenizer, answer: list[int]) -> list[int]:
    """The places of an answer that no tool has written, found by the text of its results."""
    pieces = [tokenizer.decode([token]) for token in answer]
    results = [
        range(*found.span())
        for found in re.finditer("### Tool:\n.*?### Assistant:\n", "".join(pieces), re.DOTALL)
    ]
    places = []
    start = 0
    for place, piece in enumerate(pieces):
        if not any(start in result for result in results):
            places.append(place)
        start += len(piece)
    return places


def test_results_of_tools_are_no_targets(folder, plain, fresh_accelerate):
    from accelerate import Accelerator

    from nanogpt_hf.config.load import load_config
    from nanogpt_hf.methods.rollouts import load_questions
    from nanogpt_hf.model import GPTForCausalLM

    data = load_questions(load_config(plain.recipe))
    model = GPTForCausalLM.from_pretrained(folder / "start")
    data.train.draw(Accelerator(cpu=True), model, 0)
    rows = torch.arange(8).numpy()
    labels = data.train.batch(rows)["shift_labels"]
    assert data.train.num_targets(rows) == (labels != -100).sum()
    assert data.train.metrics()["tool_calls"] > 0
    answers = data.train._answers
    results = 0
    for row in rows:
        answer = answers.completions.ids[row, : answers.completions.lengths[row]].tolist()
        places = places_of_the_model(data.tokenizer, answer)
        results += len(places) < len(answer)
        targets = labels[row][labels[row] != -100].tolist()
        assert targets == [answer[place] for place in places]
    assert results > 0


@pytest.fixture(scope="module")
def teacher(folder) -> str:
    """A folder with the start model and noise in its weights."""
    from transformers import AutoTokenizer

    from nanogpt_hf.model import GPTForCausalLM

    model = GPTForCausalLM.from_pretrained(folder / "start")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(folder / "start").save_pretrained(folder / "teacher")
    return str(folder / "teacher")


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_teacher_is_learned_on_what_the_student_has_written(
    folder, plain, teacher, share, fresh_accelerate
):
    """The objective against bare PyTorch, with the results of tools found by their text."""
    from accelerate import Accelerator

    from nanogpt_hf.config.load import load_config
    from nanogpt_hf.config.schema import DistillSection
    from nanogpt_hf.methods.on_policy import load_taught_questions, taught_policy_objective
    from nanogpt_hf.model import GPTForCausalLM

    config = load_config(plain.recipe)
    section = DistillSection(teacher=teacher, weight=1.0, beta=0.0, on_policy=share)
    config = replace(config, rl=replace(config.rl, kl=0.0), distill=section)
    data = load_taught_questions(config)
    model = GPTForCausalLM.from_pretrained(folder / "start")
    data.train.draw(Accelerator(cpu=True), model, 0)
    rows = torch.arange(8).numpy()
    batch = data.train.batch(rows)
    loss, _ = taught_policy_objective(config, data)(model, batch)
    answers = data.train._answers
    expected = torch.zeros(())
    targets = results = 0
    for row in rows:
        prompt = answers.prompts[row]
        answer = answers.completions.ids[row, : answers.completions.lengths[row]].tolist()
        places = places_of_the_model(data.tokenizer, answer)
        results += len(places) < len(answer)
        targets += len(places)
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            p = data.teacher(ids).logits[0].log_softmax(-1)
            q = model(ids).logits[0].log_softmax(-1)
        divergences = (p.exp() * (p - q)).sum(-1)
        # A token is predicted at the position before it.
        expected += divergences[[len(prompt) + place - 1 for place in places]].sum()
    assert results > 0
    assert data.train.num_targets(rows) == targets
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)


def test_run_with_a_teacher_resumes_exactly_in_the_middle(train, teacher, folder):
    knobs = {"distill__teacher": teacher, "distill__on_policy": 0.5}
    whole = train("taught", **knobs)
    copy_at(whole, 2, folder / "taught_parts")
    resumed = train("taught_parts", "--resume", **knobs)
    assert same_weights(resumed, whole)
    assert max(series(whole, "train/tool_calls")) > 0.4
    for name in ("train/loss", "train/tool_calls", "val/divergence"):
        assert series(resumed, name) == series(whole, name)


def test_run_resumes_exactly_in_the_middle(plain, train, folder):
    copy_at(plain, 2, folder / "parts")
    resumed = train("parts", "--resume", rl__kl=0.1)
    assert same_weights(resumed, plain)
    for name in ("train/loss", "train/tool_calls", "train/reward", "val/reward"):
        assert series(resumed, name) == series(plain, name)


def test_resume_notices_that_a_tool_has_changed(plain, folder, arguments, capsys):
    path = folder / "mine.py"
    path.write_text(TOOL + "\n# changed\n")
    try:
        assert main(["rl", *arguments("plain", rl__kl=0.1, train__max_steps=5), "--resume"]) == 2
    finally:
        path.write_text(TOOL)
    error = capsys.readouterr().err
    assert "data revision" in error
    assert "mine.py" in error


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_equal_one(plain, arguments, launch_warm, machine):
    run = launch_warm(machine, "rl", *arguments(machine, rl__kl=0.1))
    for name in ("train/reward", "train/tool_calls", "train/tool_errors", "samples"):
        assert series(run, name) == series(plain, name), name
    for name in ("train/loss", "train/kl", "train/grad_norm"):
        tolerance = 1e-4 if "grad" in name else 1e-5
        assert series(run, name) == pytest.approx(series(plain, name), abs=tolerance, rel=3e-5)
    ours = weights(run)
    theirs = weights(plain)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-4


def test_evaluate_lets_answers_call_tools(folder, capsys, tmp_path, forget_accelerate):
    options = ["--tasks", "rl:exact", "--questions", str(folder / "rows.jsonl")]
    options += ["--max-new-tokens", "150", "--json", str(tmp_path / "out.json")]
    options += ["--tools", str(folder / "mine.py")]
    forget_accelerate()
    assert main(["evaluate", str(folder / "start"), *options]) == 0
    assert "calls of tools per answer" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "out.json").read_text())["answers"].values()
    assert found["tool_calls"] > 0.5
    assert 0 < found["tool_errors"] < 1
    assert "mine.py sha256:" in found["tools"]
