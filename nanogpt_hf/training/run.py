"""Run: what a training run is made of, as one object for the loop, bench and doctor."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.model.architecture import Architecture, architecture_of
from nanogpt_hf.model.objective import Objective
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState


@dataclass
class Run:
    """Built by setup.build_run. `model` and `optimizer` are prepared by Accelerate."""

    config: Config
    accelerator: Accelerator
    mesh: Mesh
    model: torch.nn.Module
    model_config: PreTrainedConfig
    optimizer: AcceleratedOptimizer
    data: PreparedData
    batches: Batches
    objective: Objective
    state: TrainState
    saved: TrainState | None = None  # the state in the newest checkpoint
    start_model: PreTrainedModel | None = None  # of reinforcement learning (policy.py)
    run_folder: RunFolder | None = None  # bench and doctor have none

    @property
    def folder(self) -> RunFolder:
        assert self.run_folder is not None, "a run that is only measured has no run folder"
        return self.run_folder

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.model_config)
