"""A new evaluation is an object in `EVALUATIONS`: `evaluate` and training then measure it."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.errors import DataError
from nanogpt_hf.evaluation import table
from nanogpt_hf.evaluation.base import Evaluation, Loaded, Option, Result, Subject
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics


class WeightNorm(Evaluation):
    """The norm of all weights, times a factor."""

    options = (Option("--norm FACTOR", "the factor", float),)
    knob = "optim.learning_rate"

    def load(self, request):
        return Loaded(lambda subject: self.measure(subject, request.arguments.norm))

    def load_for_training(self, config, tokenizer):
        return lambda subject: self.measure(subject, config.optim.learning_rate)

    def measure(self, subject: Subject, factor: float):
        norm = sum(p.double().square().sum().item() for p in subject.model.parameters()) ** 0.5
        lines = [f"{subject.name}: {factor} x the norm"]
        yield Result(lines, {"norm": factor * norm}, [{"prompt": str(subject.step), "text": "x"}])


class Cloze(Evaluation):
    """Bits per character of the last word of each line of a file."""

    options = (Option("--test-cloze FILE", "lines whose last word is predicted"),)
    knob = "eval.samples"  # a row of the package would have a knob of its own, such as eval.cloze

    def load(self, request):
        lines = read_lines(request.arguments.test_cloze)
        return Loaded(partial(self.measure, lines), {"cloze": lines})

    def load_for_training(self, config, tokenizer):
        return partial(self.measure, read_lines(config.eval.samples[0]))

    def measure(self, lines: list[str], subject: Subject):
        import torch
        from torch.nn import functional as F

        from nanogpt_hf.data.hf_tokenizer import encode_ordinary
        from nanogpt_hf.evaluation.loss import eval_mode

        nats = 0.0
        characters = 0
        with torch.no_grad(), eval_mode(subject.model), subject.accelerator.autocast():
            for line in lines:
                context = line.rpartition(" ")[0]
                known = len(encode_ordinary(subject.tokenizer, context))
                ids = torch.tensor(encode_ordinary(subject.tokenizer, line))
                ids = ids[None].to(subject.accelerator.device)  # (1, T)
                logits = subject.model(input_ids=ids).logits[0]  # (T, vocabulary)
                # The logits at position t predict the token at t + 1.
                losses = F.cross_entropy(logits[known - 1 : -1].float(), ids[0, known:])
                nats += losses.item() * (ids.shape[1] - known)
                characters += len(line) - len(context)
        bits = nats / math.log(2) / characters
        yield Result([f"  cloze {bits:.4f} bits per character"], {"cloze/bits_per_character": bits})


def read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError as error:
        raise DataError(f"--test-cloze: {path}: {error.strerror}") from None


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(table, "EVALUATIONS", (*table.EVALUATIONS, WeightNorm(), Cloze()))


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


@pytest.fixture
def cloze_file(tmp_path) -> Path:
    path = tmp_path / "cloze.txt"
    path.write_text("a bed\na cab had\n")
    return path


def test_evaluate_measures_a_cloze(letter_model, tmp_path, cloze_file, capsys, refused):
    output = tmp_path / "out.json"
    assert (
        main(argv("evaluate {} --test-cloze {} --output {}", letter_model, cloze_file, output)) == 0
    )
    bits = json.loads(output.read_text())["cloze/bits_per_character"]
    assert f"cloze {bits:.4f} bits per character" in capsys.readouterr().out
    assert 0 < bits < 20
    assert "--test-cloze: none.txt: No such file" in refused(
        "evaluate", letter_model, "--test-cloze", "none.txt"
    )


def test_training_measures_a_cloze(write_recipe, tmp_path):
    path = tmp_path / "cloze.txt"
    path.write_text("the cat sat\non a mat\n")
    recipe = write_recipe(eval__samples=[str(path)])
    assert main(argv("pretrain {} --run-dir {}", recipe, tmp_path / "run")) == 0
    events = read_metrics(RunFolder(tmp_path / "run"))
    bits = [event["cloze/bits_per_character"] for event in events if "val/loss" in event]
    assert len(bits) == 3
    assert bits[-1] < bits[0]
