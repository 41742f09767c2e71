"""What several test files assert: that two runs are the same experiment, that a call refuses its
input in one line.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanogpt_hf.checkpoint.reader import find_checkpoint, load_checkpoint
from nanogpt_hf.errors import DataError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training import step as step_file
from nanogpt_hf.training.step import take_step

# Knobs of a recipe whose runs `assert_same_experiment` compares.
EXPERIMENT = {
    "train__max_steps": 10,
    "eval__every": 5,
    "eval__tokens": "all",
    "eval__samples": ["A cat "],
    "eval__sample_tokens": 20,  # more than the 16 positions of the model
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
    "tracking__layers": True,
}
# Environment of such a run: several chunks of rows, so that the loss computes gradients with a
# gathered head.
CHUNKS = {"LOGITS_PER_CHUNK": "200"}


def column(run: RunFolder, name: str) -> dict[int, float]:
    """step -> value of a metric that is logged at most once per step."""
    rows = [(event["step"], event[name]) for event in read_metrics(run) if name in event]
    assert rows, name
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def series(run: RunFolder, name: str) -> list[float]:
    return list(column(run, name).values())


def numbers(run: RunFolder) -> list[dict]:
    """The events of metrics.jsonl without times and memory."""
    measured = {"seconds", "train/tokens_per_second", "train/data_wait", "train/memory_peak_bytes"}
    return [
        {name: value for name, value in event.items() if name not in measured}
        for event in read_metrics(run)
    ]


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The final model's."""
    loaded = load_file(run.final / "model.safetensors")
    assert len(loaded) > 10
    return loaded


def same_weights(a: RunFolder, b: RunFolder) -> bool:
    """Whether the final models are equal bit for bit."""
    first = weights(a)
    second = weights(b)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def tensor_files(run: RunFolder, step: int) -> dict[str, bytes]:
    """The files with tensors of the final model and of the checkpoint of a step."""
    paths = [*run.final.rglob("*.safetensors"), *run.checkpoint(step).glob("*.safetensors")]
    assert len(paths) >= 3
    return {str(path.relative_to(run.path)): path.read_bytes() for path in paths}


def held_by_ranks(run: RunFolder) -> list[dict]:
    """What each process held at its last checkpoint: see launched.py."""
    files = sorted(run.path.parent.glob(f"{run.path.name}.held.*.json"))
    return [json.loads(file.read_text()) for file in files]


def replace_step(monkeypatch, step: Callable) -> None:
    """Take `step(run, data step, learning rate)` for each step that a run takes."""
    monkeypatch.setattr(step_file, "take_step", step)


def at_step(monkeypatch, number: int, action: Callable[[], object]) -> None:
    """Call `action` before the step after `number`."""

    def step(run, *arguments):
        if run.state.step == number:
            action()
        return take_step(run, *arguments)

    replace_step(monkeypatch, step)


def load_newest(run: RunFolder, accelerator, model, optimizer) -> TrainState:
    """Load the newest checkpoint into a prepared model and optimizer."""
    return load_checkpoint(accelerator, model, optimizer, find_checkpoint(accelerator, run))


def assert_same_experiment(run: RunFolder, reference: RunFolder, samples: bool = True) -> None:
    """Losses, gradient norms, samples and final weights are equal up to rounding."""
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("val/loss", 1e-5)):
        assert len(column(reference, name)) >= 3, name
        assert column(run, name) == pytest.approx(column(reference, name), abs=tolerance), name
    if samples:
        assert column(run, "samples") == column(reference, "samples")
    ours = weights(run)
    theirs = weights(reference)
    assert ours.keys() == theirs.keys()
    differences = {name: (ours[name] - theirs[name]).abs() for name in ours}
    for name in differences:
        # that of keys has no gradient but rounding errors, which AdamW enlarges
        if "c_attn.bias" in name:
            assert differences[name].chunk(3)[1].max() < 1e-4
            differences[name].chunk(3)[1].zero_()
    assert max(difference.max().item() for difference in differences.values()) < 1e-5


def copy_at(run: RunFolder, step: int, folder: Path) -> RunFolder:
    """Copy a run as if it had been killed after the checkpoint of `step`: without later ones and
    a final model.
    """
    copy = RunFolder(Path(shutil.copytree(run.path, folder)))
    for checkpoint in copy.checkpoint_folders():
        if checkpoint > copy.checkpoint(step):
            shutil.rmtree(checkpoint)
    shutil.rmtree(copy.final)
    return copy


def file_contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder and below it, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run_without_this_package(script: str, folder: Path, *arguments: str) -> str:
    """Run a Python script in a new process in `folder` that cannot import this package; return
    its output.
    """
    script = f"import sys; sys.modules['nanogpt_hf'] = None\n{script}"
    command = [sys.executable, "-c", script, *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def refusal(call: Callable, *arguments, error: type[Exception] = DataError, **options) -> str:
    """The message of the error that a call raises, one line."""
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)
