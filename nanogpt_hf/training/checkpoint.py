"""The run folder: what lies where in it, and checkpoints that are whole or absent."""

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.training.evaluate import Evaluation

_STEP = re.compile(r"step_(\d{8,})")


@dataclass
class TrainState:
    """Where a run stands; with the recipe and the weights, all that going on needs."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen
    seconds: float = 0.0  # spent training and evaluating, over all resumes
    evaluation: Evaluation | None = None  # the last one
    evaluated_step: int = -1
    best_loss: float | None = None  # validation loss of best/
    best_step: int | None = None

    def facts(self) -> dict[str, str]:
        """What a model card says of the training so far."""
        facts = {"steps": f"{self.step:,}", "tokens seen": f"{self.tokens:,}"}
        if self.evaluation:
            facts |= {
                "validation loss": f"{self.evaluation.loss:.4f} nats a token, over {self.evaluation.tokens:,} tokens",
                "perplexity": f"{self.evaluation.perplexity:.2f}",
                "bits per byte": f"{self.evaluation.bits_per_byte:.4f}",
            }
        return facts


class RunFolder:
    """Names of what is in a run folder, and its beginnings. Writing is the main process's business."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "loss.png"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.final = self.path / "final"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raises RunFolderError where the folder holds what a run must not touch, or lacks what --resume needs."""
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite exclude each other")
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path}: is a file; choose another --run-dir")
        if resume:
            if not self.checkpoint_folders():
                raise RunFolderError(f"{self.path}: no checkpoint to resume from; leave --resume out to start anew")
        elif self.recipe.exists():
            if not overwrite:
                raise RunFolderError(
                    f"{self.path}: holds a run; add --resume to go on, --overwrite to start anew, or choose another "
                    "--run-dir"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise RunFolderError(f"{self.path}: is not empty and holds no run; choose another --run-dir")

    def changes(self, config: Config) -> list[str]:
        """What `config` says otherwise than the run's recipe, as `key: before -> now`.

        Raises RunFolderError where that would make it another experiment: another model, text, order or step.
        """
        before = load_config(self.recipe)
        different = [key for key in KNOBS if get_value(before, key) != get_value(config, key)]
        lines = [f"{key}: {get_value(before, key)} -> {get_value(config, key)}" for key in different]
        fixed = ("model.", "data.", "train.seed", "train.tokens_per_step")
        other = [
            line for line in lines if line.startswith(fixed) and not line.startswith(("data.dir", "data.num_proc"))
        ]
        if other:
            what = "; ".join(other)
            raise RunFolderError(
                f"{self.path}: --resume goes on with the same experiment; the recipe has changed: {what}"
            )
        return lines

    def start(self, recipe_yaml: str) -> None:
        """Make the folder, without whatever run was in it, and write the resolved recipe."""
        try:
            for folder in (self.checkpoints, self.best, self.final):
                shutil.rmtree(folder, ignore_errors=True)
            for file in (self.metrics, self.picture):
                file.unlink(missing_ok=True)
            self.checkpoints.mkdir(parents=True)
            self.recipe.write_text(recipe_yaml, encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error.strerror}") from None

    def checkpoint_folders(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return sorted(p for p in found if _STEP.fullmatch(p.name))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by our names, without what activation checkpointing puts in between; a tied head is left out."""
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights by our names, whole, on the main process's CPU. All processes call it."""
    named = _named_parameters(accelerator.unwrap_model(model)).items()
    whole = ((name, _whole(parameter)) for name, parameter in named)
    return {name: weight.cpu() for name, weight in whole if accelerator.is_main_process}


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's tensors as `<parameter>.<exp_avg, exp_avg_sq or step>`."""
    return {
        f"{name}.{key}": value
        for name, parameter in _named_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    run: RunFolder,
    keep: int,
) -> None:
    """Write a checkpoint aside, flush it, and move it into place; then drop all but the `keep` newest."""
    weights = full_weights(accelerator, model)
    moments = {}
    for name, value in _optimizer_state(accelerator.unwrap_model(model), optimizer).items():
        whole = _whole(value)
        if accelerator.is_main_process:
            moments[name] = whole.cpu()
    if accelerator.is_main_process:
        target = run.checkpoint(state.step)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(weights, partial / "model.safetensors")
        save_file(moments, partial / "optimizer.safetensors")
        facts = dataclasses.asdict(state)
        if accelerator.scaler is not None:
            facts["scaler"] = accelerator.scaler.state_dict()
        (partial / "state.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _flush(path)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _flush(run.checkpoints)
        for old in run.checkpoint_folders()[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> TrainState:
    """Put a checkpoint's weights and optimizer state into a prepared model and optimizer, and return where it stood.

    Raises RunFolderError where the checkpoint is damaged or of another model.
    """
    model = accelerator.unwrap_model(model)
    try:
        weights = load_file(folder / "model.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        scaler = facts.pop("scaler", None)
        evaluation = facts.pop("evaluation")
        state = TrainState(**facts, evaluation=evaluation and Evaluation(**evaluation))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{folder}: damaged checkpoint: {error}") from None
    for name, parameter in _named_parameters(model).items():
        if name not in weights or weights[name].shape != parameter.shape:
            raise RunFolderError(f"{folder}: is of another model: {name} does not fit; was the recipe's model changed?")
        with torch.no_grad():
            parameter.copy_(_placed_like(parameter, weights[name]))
        state_keys = [key for key in moments if key.rpartition(".")[0] == name]
        optimizer.state[parameter] = {
            key.rpartition(".")[2]: _placed_like(parameter, moments[key]) if moments[key].dim() else moments[key]
            for key in state_keys
        }
    if scaler is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(scaler)
    return state


def _placed_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
