"""Run: what a training run is made of, as one object for the loop, bench and doctor."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import PreparedData
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.model.architecture import Architecture, architecture_of
from nanogpt_hf.model.objective import Objective
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState


@dataclass
class Run:
    """Built by setup.build_run. `model` and `optimizer` are prepared by Accelerate; `folder` is None in a bench."""

    config: Config
    accelerator: Accelerator
    mesh: Mesh
    model: torch.nn.Module
    model_config: PreTrainedConfig
    optimizer: torch.optim.Optimizer
    data: PreparedData
    batches: Batches
    objective: Objective
    state: TrainState
    saved: TrainState | None = None  # the state in the newest checkpoint
    folder: RunFolder | None = None

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.model_config)
