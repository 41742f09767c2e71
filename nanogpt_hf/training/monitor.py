"""Measurements of training steps: clipped and non-finite gradients, peak memory, loss spikes, and
norms of each layer.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from nanogpt_hf.checkpoint.reader import recovery_advice
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.full_state import named_tensors
from nanogpt_hf.distributed.gradient_tree import norm_by_rows
from nanogpt_hf.distributed.pipeline import merged_over_stages, pipeline_of
from nanogpt_hf.errors import DivergedError, UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.state import total_norm
from nanogpt_hf.planning.hardware import peak_memory
from nanogpt_hf.runs.state import TrainState

# A run ends after this many steps in a row without a finite gradient. fp16 skips a few while its
# loss scale settles.
BAD_STEPS_IN_A_ROW = 10
# It ends after this many rollbacks in a row to the same checkpoint.
ROLLBACKS_IN_A_ROW = 3
# The weight of the past in the running average of the loss, at each report.
_DECAY = 0.9

logger = logging.getLogger(__name__)


class Monitor:
    """Reads gradient norms only at steps that are logged, so that the host waits for the device
    no more often.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        checkpoints: CheckpointWriter,
        alert: Callable[[str, str], None] = lambda title, text: None,
    ):
        self.checkpoints = checkpoints
        self.device = accelerator.device
        # Tells the user of what the monitor warns about: title, text.
        self.alert = alert
        self.main = accelerator.is_main_process
        self.ratio = config.train.rollback_ratio
        self.max_grad_norm = config.optim.max_grad_norm
        # Gradient norms, on the device, of the steps that the state does not count yet.
        self._norms: list[torch.Tensor] = []
        # The steps of the checkpoints that rollbacks of this process have loaded.
        self._rolled_back: list[int] = []

    def add(self, grad_norm: torch.Tensor) -> None:
        """Keep the gradient norm of a step, a scalar on the device."""
        self._norms.append(grad_norm)

    def count_steps(self, state: TrainState) -> None:
        """Count the steps since the last call in `state`, which is then saved or reported.

        Waits for the device.
        """
        # One transfer for all steps since the last call.
        norms = torch.stack(self._norms).tolist() if self._norms else []
        self._norms.clear()
        for step, norm in enumerate(norms, state.step - len(norms) + 1):
            if not math.isfinite(norm):
                state.not_finite_steps += 1
                continue
            state.last_finite_step = step
            # Clipping scales by max / (norm + 1e-6) if this is below 1.
            state.clipped_steps += bool(self.max_grad_norm) and norm + 1e-6 > self.max_grad_norm

    def report(self, state: TrainState) -> dict[str, float]:
        """Metrics of the steps since the last report.

        Raises DivergedError if none of the last BAD_STEPS_IN_A_ROW steps had a finite gradient.
        """
        grad_norm = self._norms[-1].item()
        self.count_steps(state)
        if state.step - state.last_finite_step >= BAD_STEPS_IN_A_ROW:
            # The advice names a checkpoint to return to, so the last one has to be written.
            self.checkpoints.wait()
            advice = f" and {recovery_advice(self.checkpoints.run, state)}" if self.main else ""
            line = (
                f"no finite gradient in the last {BAD_STEPS_IN_A_ROW} steps, which were skipped; "
                f"lower optim.learning_rate{advice}"
            )
            self.alert("Training has diverged", line)
            raise DivergedError(line)
        values: dict[str, float] = {"train/grad_norm": grad_norm}
        if self.max_grad_norm:
            values["train/clipped_share"] = round(
                state.clipped_steps / (state.step - state.reported_step), 4
            )
        if skipped := state.not_finite_steps:
            values["train/skipped_steps"] = skipped
            self._warn(
                "No finite gradient",
                f"step {state.step:,}: {skipped} steps had no finite gradient and were skipped",
            )
        values["train/memory_peak_bytes"] = peak_memory(self.device)
        state.reported_step = state.step
        state.clipped_steps = 0
        state.not_finite_steps = 0
        return values

    def spiked(self, state: TrainState, loss: float, saved: TrainState | None) -> bool:
        """Whether the loss is above `rollback_ratio` times its running average; if not, it updates
        the average.

        False if no checkpoint is `saved` to return to.
        The average is part of the state, so a resumed run decides the same.
        """
        # A step whose loss is not finite was skipped: it has changed no weight.
        if self.ratio is None or not math.isfinite(loss):
            return False
        if state.loss_average is not None and loss > self.ratio * state.loss_average:
            return saved is not None
        # An exponential moving average, which begins with the first loss that is logged.
        before = loss if state.loss_average is None else state.loss_average
        state.loss_average = _DECAY * before + (1 - _DECAY) * loss
        return False

    def rolled_back(self, before: TrainState, state: TrainState) -> None:
        """Log that the run went back from `before` to `state`.

        Raises UserError after ROLLBACKS_IN_A_ROW rollbacks to the same step.
        """
        self._rolled_back.append(state.step)
        # The last 1 + ROLLBACKS_IN_A_ROW went to this step: skipping data does not help.
        if self._rolled_back[-ROLLBACKS_IN_A_ROW - 1 :] == [state.step] * (ROLLBACKS_IN_A_ROW + 1):
            raise UserError(
                f"the loss rose above {self.ratio:g} times its average again after "
                f"{ROLLBACKS_IN_A_ROW} rollbacks to step {state.step:,}; lower optim.learning_rate "
                "and continue with --resume"
            )
        self._warn(
            "Loss spike",
            f"step {before.step:,}: the loss is above {self.ratio:g} times its running average; "
            f"rolling back to step {state.step:,} and skipping the data of "
            f"{before.step - state.step:,} steps",
        )

    def _warn(self, title: str, line: str) -> None:
        if self.main:
            logger.warning(line)
        self.alert(title, line)


class LayerStats:
    """Norms of gradient, weights and update by layer (`tracking.layers`) at steps that are logged,
    which change no number. All processes call it and get the same numbers.

    Layers are the blocks by index, `embedding` (tokens and learned positions; a tied head is the
    same matrix) and `head` (the last norm, and an untied head). Norms cover trainable parameters; a
    frozen layer has none.
    """

    def __init__(self, accelerator: Accelerator, config: Config):
        self.accelerator = accelerator
        self.on = config.tracking.layers
        self.every = config.tracking.every
        self.max_grad_norm = config.optim.max_grad_norm
        # With gradient groups, norms have to have the same bytes on any shards, too.
        self.norm_of = norm_by_rows if config.train.gradient_groups else total_norm
        # Norms of gradients, weights and updates of the last measured step, by layer.
        self._norms: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})

    @contextlib.contextmanager
    def measured_step(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, step: int
    ) -> Iterator[None]:
        """Context that measures the norms of a step that will be logged.

        Copies the weights meanwhile.
        """
        if not self.on or step % self.every:
            yield
            return
        layers = self._trainable(model)
        before = {
            name: [p.detach().clone() for p in parameters] for name, parameters in layers.items()
        }
        gradients: dict[str, torch.Tensor] = {}

        def measure_gradients(*_) -> None:
            for name, parameters in layers.items():
                grads = [p.grad for p in parameters if p.grad is not None]
                if len(grads) == len(parameters):
                    gradients[name] = self.norm_of(grads)

        # When the optimizer steps, the gradients are complete and clipped; after it they are gone.
        handle = optimizer.optimizer.register_step_pre_hook(measure_gradients)
        try:
            yield
        finally:
            handle.remove()
        with torch.no_grad():
            weights = {name: self.norm_of(old) for name, old in before.items()}
            # before - after, in place: another copy of the model might not fit.
            for name, parameters in layers.items():
                for old, parameter in zip(before[name], parameters, strict=True):
                    old.sub_(parameter)
            updates = {name: self.norm_of(changes) for name, changes in before.items()}
        self._norms = (gradients, weights, updates)

    def step_report(self, grad_norm: float) -> dict[str, float]:
        """Report the norms of the last `measured_step`, of its last update.

        `grad_norm` is the whole gradient's in that update, before clipping.
        """
        if not self.on:
            return {}
        # The gradients were measured after clipping: undo the scaling of nn.utils.clip_grad_norm_.
        scale = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm else 1.0
        gradients, weights, updates = (_as_numbers(norms) for norms in self._norms)
        values: dict[str, float] = {
            f"layers/{name}/grad_norm": norm / scale for name, norm in gradients.items()
        }
        for name, norm in weights.items():
            values[f"layers/{name}/weight_norm"] = norm
            if norm:
                values[f"layers/{name}/update_ratio"] = updates[name] / norm
        return merged_over_stages(pipeline_of(self.accelerator), values)

    def _trainable(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by layer."""
        pipeline = pipeline_of(self.accelerator)
        parameters = named_tensors(self.accelerator, model)
        if pipeline and pipeline.stage.is_last:
            # A tied head is the embedding, which the first stage reports.
            parameters.pop(pipeline.stage.tied_name, None)
        trained = [p for p in parameters.values() if p.requires_grad]
        whole = cast(PreTrainedModel, self.accelerator.unwrap_model(model))
        architecture = architecture_of(whole)
        modules = {"embedding": architecture.embeddings(whole)}
        modules |= {str(i): [block] for i, block in enumerate(architecture.blocks(whole))}
        layers: dict[str, list[nn.Parameter]] = {}
        inside: set[int] = set()
        for name, parts in modules.items():
            layers[name] = [p for part in parts for p in part.parameters() if p.requires_grad]
            inside |= {id(parameter) for parameter in layers[name]}
        # What is in no block and no embedding: the last norm, and a head that is not tied.
        layers["head"] = [p for p in trained if id(p) not in inside]
        return {name: parameters for name, parameters in layers.items() if parameters}


def _as_numbers(norms: dict[str, torch.Tensor]) -> dict[str, float]:
    """Read norms by name from the device; the host waits once."""
    if not norms:
        return {}
    return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
