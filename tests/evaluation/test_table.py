"""A new evaluation is an object in `EVALUATIONS`: `evaluate` and training then measure it."""

import json

import pytest

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.evaluation import table
from nanogpt_hf.evaluation.base import Evaluation, Loaded, Option, Result, Subject
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics


class WeightNorm(Evaluation):
    """The norm of all weights, times a factor."""

    options = (Option("--norm FACTOR", "the factor", float),)

    def load(self, request):
        return Loaded(lambda subject: self.measure(subject, request.arguments.norm))

    def load_for_training(self, config, tokenizer):
        return lambda subject: self.measure(subject, config.optim.learning_rate)

    def measure(self, subject: Subject, factor: float):
        norm = sum(p.double().square().sum().item() for p in subject.model.parameters()) ** 0.5
        lines = [f"{subject.name}: {factor} x the norm"]
        yield Result(lines, {"norm": factor * norm}, [{"prompt": str(subject.step), "text": "x"}])


@pytest.fixture(autouse=True)
def row(monkeypatch):
    monkeypatch.setattr(table, "EVALUATIONS", (*table.EVALUATIONS, WeightNorm()))


def test_evaluate_measures_a_row_of_its_own(letter_model, tmp_path, capsys, refused):
    output = tmp_path / "out.json"
    assert main(argv("evaluate {} --norm 3 --output {}", letter_model, output)) == 0
    assert f"{letter_model}: 3.0 x the norm" in capsys.readouterr().out
    assert json.loads(output.read_text())["norm"] > 0
    assert "--stride" in refused("evaluate", letter_model, "--norm", 1, "--stride", 4)
    assert "--norm FACTOR" in refused("evaluate", letter_model)


def test_training_measures_a_row_of_its_own(write_recipe, tmp_path, capsys):
    assert main(argv("pretrain {} --run-dir {}", write_recipe(), tmp_path / "run")) == 0
    assert capsys.readouterr().out.count("tiny: 0.01 x the norm") == 3
    events = read_metrics(RunFolder(tmp_path / "run"))
    norms = [event["norm"] for event in events if "val/loss" in event]
    assert len(set(norms)) == 3
    assert all(norm > 0 for norm in norms)
    prompts = [event["samples"][0]["prompt"] for event in events if "samples" in event]
    assert prompts == ["0", "3", "6"]
