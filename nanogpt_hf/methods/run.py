"""Run: what a training run is made of, as one object; results of its steps and evaluations."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.pipeline import Pipeline, pipeline_of
from nanogpt_hf.distributed.updates import Updater
from nanogpt_hf.methods.finetuning import learned_ids
from nanogpt_hf.model.architecture import Architecture, Metrics, Objective, architecture_of
from nanogpt_hf.model.build import load_resized
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.origin import check_start_folder
from nanogpt_hf.runs.state import MeasuredLoss, TrainState


@dataclass
class Run:
    """Objects of a training run, built by `build_at` (training/build.py). Accelerate has prepared
    `model` and `optimizer`.
    """

    config: Config
    accelerator: Accelerator
    model: torch.nn.Module
    model_config: PreTrainedConfig
    optimizer: AcceleratedOptimizer
    updater: Updater
    data: PreparedData
    batches: Batches
    objective: Objective
    state: TrainState
    # The defaults of `generate`, which are saved with the model.
    generation_config: GenerationConfig | None = None
    # The state in the newest checkpoint.
    saved: TrainState | None = None
    # The model that the run started from, if its method compares with it: `start_model_of`.
    start_model: PreTrainedModel | None = None
    # The knob by which this start found train.max_steps, such as `train.budget 55m`; or "".
    steps_from: str = ""
    # None for a run that is only measured, by `bench` or `doctor`.
    run_folder: RunFolder | None = None
    # The launch, as this process sees it.
    mesh: Mesh = field(init=False)
    # The recipe's. A caller of `prepare_run` may give `objective` another one.
    recipe_objective: Objective = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = mesh_of(self.accelerator)
        self.recipe_objective = self.objective

    @property
    def folder(self) -> RunFolder:
        assert self.run_folder is not None, "a run that is only measured has no run folder"
        return self.run_folder

    def check_start_folder(self) -> None:
        """Raises RunFolderError if the run started from a model in a folder that is gone."""
        # A run that is only measured has no identity.
        if origin := (self.state.identity or {}).get("origin"):
            check_start_folder(self.folder, self.config.finetune.model, origin)

    @property
    def pipeline(self) -> Pipeline | None:
        return pipeline_of(self.accelerator)

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.model_config)


def is_done(config: Config, state: TrainState) -> bool:
    """Whether no step is left, or no evaluation was the best for too long."""
    return state.step == config.train.max_steps or state.out_of_patience(config.eval)


class StepResult(NamedTuple):
    """Results of a step, scalars on the device: reading them makes the host wait."""

    # This rank's share. The sum over ranks is the mean over the targets of the step.
    loss: torch.Tensor
    # The norm of the whole gradient, before clipping: of the largest of the step's updates, and of
    # the last.
    grad_norm: torch.Tensor
    last_grad_norm: torch.Tensor
    # Metrics of the objective: shares, like the loss.
    metrics: Metrics
    # What the method has found before the step, the same on all processes.
    figures: dict[str, float]


class Evaluated(NamedTuple):
    """Findings of a method's evaluation."""

    # The model with the lowest score is the best: the validation loss, or minus the mean reward.
    score: float
    # The loss on validation data, if the method measures one.
    evaluation: MeasuredLoss | None
    metrics: dict[str, float]
    # Lines for the console.
    lines: list[str]
    # Prompts and texts for the report.
    samples: list[dict[str, str]]


def start_model_of(run: Run) -> PreTrainedModel:
    """Load the model that the run started from, whole on every process; the first call does it."""
    if run.start_model is None:
        config = run.config
        assert config.finetune.model is not None, "a method that compares with it requires one"
        run.check_start_folder()
        model = load_resized(config, run.data.vocab_size, learned_ids(config, run.data))
        run.start_model = model.to(run.accelerator.device).requires_grad_(False)
    return run.start_model
