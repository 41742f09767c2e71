"""Diverged weights: the error names a sound checkpoint, and every command handles such a model."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file

from assertions import column
from nanogpt_hf.checkpoint import writer
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main

pytestmark = pytest.mark.long


@pytest.fixture
def knobs():
    return {"optim__schedule": "constant", "train__max_steps": 30, "eval__every": 100}


@pytest.mark.parametrize(("every", "keep"), [(1, 1), pytest.param(7, 2, marks=pytest.mark.slow)])
def test_checkpoint_named_after_divergence_is_sound_and_resumes(pretrain, every, keep):
    knobs = {"checkpoint__every": every, "checkpoint__keep": keep}
    assert pretrain(train__max_steps=10, **knobs).status == 0
    ended = pretrain("--resume", "--optim.learning_rate", 1e20, **knobs)
    assert ended.status == 2
    assert "no finite gradient in the last 10 steps" in ended.line
    newest = ended.run.newest_checkpoint()
    assert ended.line.endswith(f"optim.learning_rate and continue with --resume from {newest}") or (
        f"continue with --resume from {newest} (removed" in ended.line
    )
    for tensors in read_checkpoint(newest)[:2]:
        assert max(tensor.abs().max() for tensor in tensors.values()) < 1e3
    assert pretrain("--resume", **knobs).status == 0
    assert all(loss < 10 for loss in column(ended.run, "train/loss").values())


def test_divergence_before_first_checkpoint(pretrain):
    ended = pretrain("--optim.learning_rate", 1e20, checkpoint__every=100)
    assert ended.status == 2
    assert "start again with --overwrite" in ended.line


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_non_finite_checkpoint_is_not_saved(pretrain, monkeypatch, part):
    run = pretrain(train__max_steps=4, checkpoint__keep=3).run
    end = "ln_f.weight" if part == "model" else "ln_f.weight.exp_avg_sq"
    name = f"transformer.{end}"
    owner, function = {
        "model": (writer, "own_weights"),
        "optimizer": (writer.FullState, "own_optimizer_state"),
    }[part]
    saved = getattr(owner, function)

    def with_an_infinity(*arguments):
        for other, tensor in saved(*arguments):
            if other == name:
                tensor = tensor.clone()
                tensor.view(-1)[1] = math.inf
            yield other, tensor

    monkeypatch.setattr(owner, function, with_an_infinity)
    ended = pretrain("--resume", train__max_steps=8)
    assert ended.status == 2
    assert ended.line.startswith(f"step 6: {name} is not finite")
    assert ended.line.endswith(f"continue with --resume from {run.checkpoint(4)}")


def test_samples_with_non_finite_logits_do_not_end_the_run(pretrain):
    knobs = {"eval__samples": ["The"], "eval__sample_tokens": 5, "checkpoint__every": 100}
    knobs |= {"eval__every": 2, "train__max_steps": 5}
    ended = pretrain("--optim.learning_rate", 1e20, **knobs)
    assert ended.status == 0
    assert "step 2: eval.samples: no sample is generated" in ended.out + ended.err
    assert max(len(line) for line in ended.out.splitlines() if "perplexity" in line) < 200
    assert list(column(ended.run, "samples")) == [0]
    assert "NaN" not in ended.run.metrics.read_text()


@pytest.fixture
def broken_model(letter_model, tmp_path):
    """Copy the tiny model with weights multiplied by a value that makes its logits non-finite."""

    def make(value: float):
        folder = tmp_path / "broken"
        shutil.copytree(letter_model, folder)
        tensors = load_file(folder / "model.safetensors")
        for tensor in tensors.values():
            tensor *= value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("value", [math.nan, 1e20])
def test_commands_on_diverged_model_end_in_one_line(
    broken_model, tmp_path, capsys, forget_accelerate, value
):
    folder = broken_model(value)
    (tmp_path / "text.txt").write_text("abc def gh?\n" * 20)
    for arguments in (
        ["sample", folder, "--prompt", "abc"],
        ["sample", folder, "--prompt", "abc", "--temperature", 0],
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert capsys.readouterr().err.startswith("the model's logits are not finite")
        forget_accelerate()
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("damaged; nothing was written\n")
    assert not (tmp_path / "out").exists()
    arguments = [
        "evaluate",
        folder,
        "--data",
        tmp_path / "text.txt",
        "--output",
        tmp_path / "o.json",
    ]
    assert main([str(argument) for argument in arguments]) == 0
    output = capsys.readouterr().out.replace(str(tmp_path), "")
    assert "the loss is not finite (" in output
    assert max(map(len, output.splitlines())) < 200
    assert json.loads((tmp_path / "o.json").read_text())["text"]["loss"] is None
