"""What is observed: loss spikes and rollback, skipped steps, clipping, norms by layer; diverged
weights, whose error names a sound checkpoint, and which every command handles.
"""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from arguments import argv
from assertions import column, replace_step
from nanogpt_hf.checkpoint import writer
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.methods.run import StepResult
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training import step
from nanogpt_hf.training.monitor import Monitor
from nanogpt_hf.training.step import train_step

ROLLBACK = {"checkpoint__every": 3, "eval__every": 4, "model__dropout": 0.1}
ROLLBACK |= {"train__rollback_ratio": 2.0, "train__max_steps": 12}
DIVERGING = {"optim__schedule": "constant", "train__max_steps": 30, "eval__every": 100}


@pytest.fixture
def patched_steps(monkeypatch):
    """Lists of trained data steps, and of spikes: logged losses ten times too large."""
    data_steps = []
    spikes = set()

    def spiking(run, step, learning_rate):
        result = train_step(run, step, learning_rate)
        data_steps.append(step)
        return result._replace(loss=result.loss * 10) if step in spikes else result

    replace_step(monkeypatch, spiking)
    return data_steps, spikes


@pytest.mark.parametrize("norms", [[math.inf, 1.0], [1.0, math.inf], [math.nan, 1.0]], ids=str)
def test_a_gradient_that_is_not_finite_counts_in_any_update_of_a_step(monkeypatch, norms):
    results = iter([StepResult(torch.tensor(2.0), *2 * (torch.tensor(n),), {}, {}) for n in norms])
    method = SimpleNamespace(begin_step=lambda run, number: {"x": 1.0}, updates=lambda config: 2)
    monkeypatch.setattr(step, "method_of", lambda config: method)
    monkeypatch.setattr(step, "train_step", lambda run, number, rate: next(results))
    result = step.take_step(SimpleNamespace(config=None), 0, 0.1)
    assert not result.grad_norm.isfinite()
    assert str(result.last_grad_norm.item()) == str(norms[-1])
    assert result.figures == {"x": 1.0}


@pytest.mark.long
def test_spike_rolls_back_to_checkpoint_and_skips_its_data(pretrain, patched_steps):
    data_steps, spikes = patched_steps
    spikes.add(7)
    status, _, err, run = pretrain(**ROLLBACK | {"eval__every": 1, "checkpoint__keep": 9})
    assert status == 0
    # step 8 spiked on the data of step 7; after step 6 the data is two steps ahead
    assert data_steps == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert "step 8: the loss is above 2 times its running average; rolling back to step 6" in err
    assert list(column(run, "train/loss")) == list(range(1, 13))
    assert max(column(run, "train/loss").values()) < 5
    assert state_at(run, 12)["skipped_steps"] == 2
    # best/ has the model of this step.
    assert state_at(run, 6)["best_step"] == 7


def state_at(run: RunFolder, step: int) -> dict:
    return json.loads((run.checkpoint(step) / "state.json").read_text())


@pytest.mark.long
def test_repeated_spikes_end_the_run(pretrain, patched_steps):
    patched_steps[1].update(range(7, 100))
    ended = pretrain(**ROLLBACK)
    assert ended.status == 2
    assert "again after 3 rollbacks to step 6; lower optim.learning_rate" in ended.err
    assert ended.run.newest_checkpoint() == ended.run.checkpoint(6)


@pytest.fixture
def monitor(tmp_path):
    """A Monitor of a run without a checkpoint, with knobs such as tracking__every=5."""

    def build(**knobs) -> Monitor:
        config = replace_knobs(
            Config(), {key.replace("__", "."): value for key, value in knobs.items()}
        )
        return Monitor(
            Accelerator(),
            config,
            CheckpointWriter(Accelerator(), RunFolder(tmp_path / "none"), keep=1),
        )

    return build


def test_loss_average_ignores_spikes_and_nan(monitor):
    monitor = monitor(train__rollback_ratio=1.5)
    state = TrainState()
    assert not monitor.spiked(state, 4.0, None)
    assert state.loss_average == pytest.approx(4.0)
    assert not monitor.spiked(state, 2.0, None)
    assert state.loss_average == pytest.approx(3.8)
    assert not monitor.spiked(state, float("nan"), None)
    assert not monitor.spiked(state, 100.0, None)  # there is no checkpoint to roll back to
    assert state.loss_average == pytest.approx(3.8)


@pytest.mark.parametrize(
    ("max_norm", "norms", "share"),
    [
        (1.0, [2.0, 0.5, 3.0, float("inf")], 0.5),  # the last is skipped, not clipped
        (0.0, [2.0], None),  # nothing is clipped
    ],
)
def test_clipped_share_counts_steps_since_last_report(monitor, max_norm, norms, share):
    build = monitor
    state = TrainState(step=4, reported_step=4)
    monitor = build(optim__max_grad_norm=max_norm)
    for index, norm in enumerate(norms):
        state.step += 1
        monitor.add(torch.tensor(norm))
        if index == 1:  # saved and resumed
            monitor.count_steps(state)
            monitor = build(optim__max_grad_norm=max_norm)
    values = monitor.report(state)
    assert values.get("train/clipped_share") == share
    assert (state.reported_step, state.clipped_steps, state.not_finite_steps) == (state.step, 0, 0)


def test_layers_have_the_gradient_of_the_last_update(pretrain, monkeypatch):
    def with_a_larger_update_before(run, step, learning_rate):
        result = train_step(run, step, learning_rate)
        return result._replace(grad_norm=10 * result.grad_norm)

    replace_step(monkeypatch, with_a_larger_update_before)
    knobs = {"tracking__layers": True, "tracking__every": 1, "optim__max_grad_norm": 0.01}
    run = pretrain(**knobs, train__max_steps=2).run
    for event in read_metrics(run):
        if "train/grad_norm" in event:
            norms = [value for key, value in event.items() if key.endswith("/grad_norm")]
            norms.remove(event["train/grad_norm"])
            assert math.hypot(*norms) == pytest.approx(event["train/grad_norm"] / 10)


def test_frozen_layers_have_no_norms(start, tiny_base, text_file):
    run = start(
        "tuned",
        model__n_layer=4,
        model__bias=True,
        model__activation_function="gelu_new",
        data__tokenizer=str(tiny_base),
        finetune__model=str(tiny_base),
        finetune__freeze_layers=2,
        tracking__layers=True,
        train__max_steps=2,
    )
    (last, _) = read_metrics(run)[-2:]
    norms = {key.split("/")[1] for key in last if key.startswith("layers/")}
    assert norms == {"2", "3", "head"}


@pytest.mark.long
def test_checkpoint_named_after_divergence_is_sound_and_resumes(pretrain):
    knobs = DIVERGING | {"checkpoint__every": 1, "checkpoint__keep": 1}
    assert pretrain(**knobs | {"train__max_steps": 10}).status == 0
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


@pytest.mark.long
def test_divergence_before_first_checkpoint(pretrain):
    ended = pretrain("--optim.learning_rate", 1e20, **DIVERGING | {"checkpoint__every": 100})
    assert ended.status == 2
    assert "start again with --overwrite" in ended.line


@pytest.mark.long
def test_non_finite_checkpoint_is_not_saved(pretrain, monkeypatch):
    knobs = {"optim__schedule": "constant", "eval__every": 100, "checkpoint__keep": 3}
    run = pretrain(train__max_steps=4, **knobs).run
    name = "transformer.ln_f.weight.exp_avg_sq"
    saved = writer.FullState.own_optimizer_state

    def with_an_infinity(*arguments):
        for other, tensor in saved(*arguments):
            if other == name:
                tensor = tensor.clone()
                tensor.view(-1)[1] = math.inf
            yield other, tensor

    monkeypatch.setattr(writer.FullState, "own_optimizer_state", with_an_infinity)
    ended = pretrain("--resume", train__max_steps=8, **knobs)
    assert ended.status == 2
    assert ended.line.startswith(f"step 6: {name} is not finite")
    assert ended.line.endswith(f"continue with --resume from {run.checkpoint(4)}")


@pytest.mark.long
def test_samples_with_non_finite_logits_do_not_end_the_run(pretrain):
    knobs = {"eval__samples": ["The"], "eval__sample_tokens": 5, "checkpoint__every": 100}
    knobs |= {"optim__schedule": "constant", "eval__every": 2, "train__max_steps": 5}
    ended = pretrain("--optim.learning_rate", 1e20, **knobs)
    # It trains to its end, and then says that it has diverged.
    assert ended.status == 2
    assert "its last evaluation, at step 5, is not finite" in ended.line
    assert "step 2: eval.samples: no sample is generated" in ended.out + ended.err
    assert list(column(ended.run, "samples")) == [0]
    assert "NaN" not in ended.run.metrics.read_text()


@pytest.mark.parametrize("value", [math.nan, 1e20])
def test_commands_on_diverged_model_end_in_one_line(
    letter_model, tmp_path, capsys, forget_accelerate, value
):
    """Weights are multiplied by a value that makes the logits non-finite."""
    folder = tmp_path / "broken"
    shutil.copytree(letter_model, folder)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor *= value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "text.txt").write_text("abc def gh?\n" * 20)
    for options in ([], ["--temperature", "0"]):
        assert main(["sample", str(folder), "--prompt", "abc", *options]) == 2
        assert capsys.readouterr().err.startswith("the model's logits are not finite")
        forget_accelerate()
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("damaged; nothing was written\n")
    assert not (tmp_path / "out").exists()
    words = argv("evaluate {} --data {} --output {}", folder, tmp_path / "text.txt", tmp_path / "o")
    assert main(words) == 0
    assert "the loss is not finite: training diverged" in capsys.readouterr().out
    assert json.loads((tmp_path / "o").read_text())["text"]["loss"] is None
