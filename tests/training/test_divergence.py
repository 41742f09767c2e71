"""Diverged weights: the error names a sound checkpoint, and every command handles such a model."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanogpt_hf.commands import main
from nanogpt_hf.errors import DivergedError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import checkpoint_writer
from nanogpt_hf.training.checkpoint import read_checkpoint

KNOBS = {"optim__schedule": "constant", "train__max_steps": 30, "eval__every": 100}


@pytest.fixture
def pretrain(capsys, tmp_path, write_recipe, forget_accelerate):
    def pretrain(*options, **overrides) -> tuple[int, str]:
        forget_accelerate()
        capsys.readouterr()
        arguments = [
            "pretrain",
            str(write_recipe(**KNOBS | overrides)),
            "--run-dir",
            str(tmp_path / "run"),
        ]
        status = main([*arguments, *map(str, options)])
        return status, "".join(capsys.readouterr())

    return pretrain


@pytest.mark.parametrize(("every", "keep"), [(1, 1), (3, 1), (7, 2)])
def test_checkpoint_named_after_divergence_is_sound_and_resumes(pretrain, tmp_path, every, keep):
    knobs = {"checkpoint__every": every, "checkpoint__keep": keep}
    assert pretrain(train__max_steps=10, **knobs)[0] == 0
    run = RunFolder(tmp_path / "run")
    status, output = pretrain("--resume", "--optim.learning_rate", 1e20, **knobs)
    assert status == 2
    line = output.splitlines()[-1]
    assert (
        "no finite gradient in the last 10 steps, which were skipped; lower "
        "optim.learning_rate and continue"
    ) in line
    assert f"continue with --resume from {run.newest_checkpoint()}" in line
    weights, optimizer_state, *_ = read_checkpoint(run.newest_checkpoint())
    assert (
        max(tensor.abs().max() for tensor in (*weights.values(), *optimizer_state.values())) < 1e3
    )
    status, output = pretrain("--resume", **knobs)
    assert status == 0, output
    losses = [
        json.loads(line).get("train/loss", 0) for line in run.metrics.read_text().splitlines()
    ]
    assert all(math.isfinite(loss) and loss < 10 for loss in losses)


def test_divergence_before_first_checkpoint(pretrain):
    status, output = pretrain("--optim.learning_rate", 1e20, checkpoint__every=100)
    assert status == 2
    assert output.splitlines()[-1].endswith(
        "start again with --overwrite: no checkpoint is older than the divergence"
    )


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_non_finite_checkpoint_is_not_saved(pretrain, tmp_path, monkeypatch, part):
    assert pretrain(train__max_steps=4, checkpoint__keep=3)[0] == 0
    run = RunFolder(tmp_path / "run")
    end = "ln_f.weight" if part == "model" else "ln_f.weight.exp_avg_sq"
    name = f"transformer.{end}"
    owner, function = {
        "model": (checkpoint_writer, "own_weights"),
        "optimizer": (checkpoint_writer.FullState, "own_optimizer_state"),
    }[part]
    saved = getattr(owner, function)

    def with_an_infinity(*arguments):
        for other, tensor in saved(*arguments):
            if other == name:
                tensor = tensor.clone()
                tensor.view(-1)[1] = math.inf
            yield other, tensor

    monkeypatch.setattr(owner, function, with_an_infinity)
    status, output = pretrain("--resume", train__max_steps=8)
    assert status == 2
    line = output.splitlines()[-1]
    assert line.startswith(
        f"step 6: {name} is not finite, so no checkpoint was written; lower optim.learning_rate"
    )
    assert line.endswith(f"continue with --resume from {run.checkpoint(4)}")


def test_samples_with_non_finite_logits_do_not_end_the_run(pretrain, tmp_path):
    knobs = {
        "eval__every": 2,
        "eval__samples": ["The"],
        "eval__sample_tokens": 5,
        "checkpoint__every": 100,
    }
    status, output = pretrain("--optim.learning_rate", 1e20, train__max_steps=5, **knobs)
    assert status == 0, output
    assert (
        "step 2: eval.samples: no sample is generated: the model's logits are not finite"
    ) in output
    assert max(len(line) for line in output.splitlines() if "perplexity" in line) < 200
    events = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [event["step"] for event in events if "samples" in event] == [0]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


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


def test_non_finite_logits_are_refused_by_every_sampling_method():
    from nanogpt_hf.generate import generate_tokens
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM

    model = GPTForCausalLM(
        GPTConfig(vocab_size=5, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    ).eval()
    torch.nn.init.constant_(model.transformer.ln_f.bias, math.nan)
    for options in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"num_samples": 3}):
        with pytest.raises(DivergedError, match="logits are not finite"):
            list(generate_tokens(model, [1], max_new_tokens=2, **options))
