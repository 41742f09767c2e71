"""Weights that diverged: a sound checkpoint stays and is named, and nothing that reads such a model crashes."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanogpt_hf.commands import main
from nanogpt_hf.errors import DivergedError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import checkpoint
from nanogpt_hf.training.checkpoint import read_checkpoint

STEADY = {"optim__schedule": "constant", "train__max_steps": 30, "eval__every": 100}


@pytest.fixture
def pretrain(capsys, tmp_path, write_recipe, forget_accelerate):
    def pretrain(*arguments, **overrides) -> tuple[int, str]:
        forget_accelerate()
        capsys.readouterr()
        words = ["pretrain", str(write_recipe(**STEADY | overrides)), "--run-dir", str(tmp_path / "run")]
        status = main([*words, *map(str, arguments)])
        return status, "".join(capsys.readouterr())

    return pretrain


@pytest.mark.parametrize(("every", "keep"), [(1, 1), (1, 2), (3, 1), (7, 2)])
def test_after_a_divergence_the_named_checkpoint_is_sound_and_resumes(pretrain, tmp_path, every, keep):
    knobs = {"checkpoint__every": every, "checkpoint__keep": keep}
    assert pretrain(train__max_steps=10, **knobs)[0] == 0
    run = RunFolder(tmp_path / "run")
    status, said = pretrain("--resume", "--optim.learning_rate", 1e20, **knobs)
    assert status == 2
    line = said.splitlines()[-1]
    assert "no finite gradient in the last 10 steps, which were skipped; lower optim.learning_rate and continue" in line
    assert f"continue with --resume from {run.newest_checkpoint()}" in line
    weights, moments, _ = read_checkpoint(run.newest_checkpoint())
    assert max(tensor.abs().max() for tensor in (*weights.values(), *moments.values())) < 1e3
    status, said = pretrain("--resume", **knobs)
    assert status == 0, said
    losses = [json.loads(line).get("train/loss", 0) for line in run.metrics.read_text().splitlines()]
    assert all(math.isfinite(loss) and loss < 10 for loss in losses)


def test_a_divergence_before_the_first_checkpoint_says_so(pretrain):
    status, said = pretrain("--optim.learning_rate", 1e20, checkpoint__every=100)
    assert status == 2
    assert said.splitlines()[-1].endswith("start again with --overwrite: no checkpoint is older than the divergence")


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_is_not_finite_is_never_saved_nor_gone_back_to(pretrain, tmp_path, monkeypatch, what):
    assert pretrain(train__max_steps=4, checkpoint__keep=3)[0] == 0
    run = RunFolder(tmp_path / "run")
    newest = run.newest_checkpoint() / f"{what}.safetensors"
    tensors = load_file(newest)
    name = next(name for name in tensors if name.endswith("ln_f.weight" if what == "model" else "exp_avg_sq"))
    tensors[name].view(-1)[1] = math.inf
    save_file(tensors, newest)  # as an older version may have done
    sums = {path.name: checkpoint._file_digest(path) for path in newest.parent.iterdir() if "sums" not in path.name}
    (newest.parent / "checksums.json").write_text(json.dumps(sums))
    status, said = pretrain("--resume", train__max_steps=4, checkpoint__keep=3)
    assert status == 0
    assert f"{newest.parent}: damaged checkpoint: {name} is not finite: the run had diverged; trying an older" in said
    assert f"resuming from {run.checkpoint(2)}" in said
    read_checkpoint(run.newest_checkpoint())

    full = getattr(checkpoint, "full_weights" if what == "model" else "full_optimizer_state")

    def with_an_infinity(*arguments):
        tensors = full(*arguments)
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[1] = math.inf
        return tensors

    monkeypatch.setattr(checkpoint, full.__name__, with_an_infinity)
    status, said = pretrain("--resume", train__max_steps=8)
    assert status == 2
    line = said.splitlines()[-1]
    assert line.startswith(f"step 6: {name} is not finite, so no checkpoint was written; lower optim.learning_rate")
    assert line.endswith(f"continue with --resume from {run.checkpoint(4)}")


def test_samples_of_logits_that_are_not_finite_do_not_end_a_run(pretrain, tmp_path):
    knobs = {"eval__every": 2, "eval__samples": ["The"], "eval__sample_tokens": 5, "checkpoint__every": 100}
    status, said = pretrain("--optim.learning_rate", 1e20, train__max_steps=5, **knobs)
    assert status == 0, said
    assert "step 2: eval.samples: no sample is generated: the model's logits are not finite" in said
    assert max(len(line) for line in said.splitlines() if "perplexity" in line) < 200
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in kept if "samples" in event] == [0]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.fixture
def broken_model(letter_model, tmp_path):
    """Make a copy of the tiny model whose logits are not finite: for its weights are not, or are far too large."""

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
def test_commands_on_a_diverged_model_say_so_in_one_line(broken_model, tmp_path, capsys, forget_accelerate, value):
    folder = broken_model(value)
    (tmp_path / "text.txt").write_text("abc def gh?\n" * 20)
    for words in (["sample", folder, "--prompt", "abc"], ["sample", folder, "--prompt", "abc", "--temperature", 0]):
        assert main([str(word) for word in words]) == 2
        assert capsys.readouterr().err.startswith("the model's logits are not finite")
        forget_accelerate()
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("damaged; nothing was written\n")
    assert not (tmp_path / "out").exists()
    words = ["evaluate", folder, "--data", tmp_path / "text.txt", "--output", tmp_path / "o.json"]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "the loss is not finite (" in said
    assert max(map(len, said.splitlines())) < 200
    assert json.loads((tmp_path / "o.json").read_text())["text"]["loss"] is None


def test_logits_are_looked_at_however_tokens_are_chosen():
    from nanogpt_hf.generate import generate_tokens
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM

    model = GPTForCausalLM(GPTConfig(vocab_size=5, n_positions=8, n_embd=8, n_layer=1, n_head=2)).eval()
    torch.nn.init.constant_(model.transformer.ln_f.bias, math.nan)
    for options in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"num_samples": 3}):
        with pytest.raises(DivergedError, match="logits are not finite"):
            list(generate_tokens(model, [1], max_new_tokens=2, **options))
