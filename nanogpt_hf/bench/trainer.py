"""The baseline of transformers' Trainer, whose windows of steps alternate with ours."""

import tempfile
import time
from collections.abc import Iterator

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from nanogpt_hf.bench.workload import Pair, Workload
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.training.clock import WARM_STEPS, synchronize, time_of


class _Rows(torch.utils.data.IterableDataset):
    """Sequences of our batches, one by one, endlessly."""

    def __init__(self, work: Workload):
        self.batches = work.run.batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        step = 0
        while True:
            # The Trainer makes micro-batches of the rows again, of the same size.
            for batch in self.batches.micro_batches(step):
                yield from ({"input_ids": row, "labels": row} for row in batch["input_ids"])
            step += 1


class _AlternateSteps(TrainerCallback):
    """Times a window of our steps after each window of the Trainer's; stops the Trainer after
    `windows` of them.
    """

    def __init__(self, work: Workload, windows: int, steps: int):
        self.work = work
        self.windows = windows
        self.steps = steps
        self.pairs: list[Pair] = []
        # When the window began, 0 before the first, and its steps so far.
        self.started = 0.0
        self.taken = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.taken += 1
        if self.taken < (self.steps if self.started else WARM_STEPS):
            return
        device = self.work.run.accelerator.device
        synchronize(device)
        if self.started:
            theirs = (time.perf_counter() - self.started) / self.steps
            self.pairs.append((self._ours(), theirs))
        control.should_training_stop = len(self.pairs) == self.windows
        # After our steps, which are not part of the Trainer's next window.
        self.taken = 0
        self.started = time.perf_counter()

    def _ours(self) -> float:
        # All accelerators share gradient_accumulation_steps, and the Trainer, which accumulates
        # itself, sets it to 1.
        accelerator = self.work.run.accelerator
        before = accelerator.gradient_accumulation_steps
        accelerator.gradient_accumulation_steps = self.work.run.batches.accumulation
        seconds = time_of(accelerator.device, self.work.step, self.steps)
        accelerator.gradient_accumulation_steps = before
        return seconds


def pairs_with_trainer(work: Workload, windows: int, steps: int) -> list[Pair]:
    """Time transformers' Trainer in its fastest configuration, on transformers' model with sdpa,
    alternately with ours.

    Its time is measured from the end of a step to the end of the next: DataLoader, step and
    callbacks. It does not log, save or evaluate.
    """
    config = work.run.config
    accelerator = work.run.accelerator
    optimizer = kind_of(config.optim).in_trainer
    assert optimizer is not None, "check_comparable refuses the others"
    architecture = architecture_of(work.run.model_config)
    model = architecture.standard_model(work.run.model_config)
    # Its default, stated so that transformers does not warn.
    model.loss_type = "ForCausalLM"
    alternate = _AlternateSteps(work, windows, steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=WARM_STEPS + windows * steps + 1,
            per_device_train_batch_size=work.run.batches.micro_batch_size,
            gradient_accumulation_steps=work.run.batches.accumulation,
            optim=optimizer,
            learning_rate=config.optim.learning_rate,
            weight_decay=config.optim.weight_decay,
            max_grad_norm=config.optim.max_grad_norm,
            bf16=accelerator.mixed_precision == "bf16",
            use_cpu=accelerator.device.type == "cpu",
            torch_compile=work.run.mesh.compiles,
            logging_strategy="no",
            save_strategy="no",
            logging_nan_inf_filter=False,  # it would read the loss of each step
            report_to="none",
            disable_tqdm=True,
            # else it resets the state that our step needs
            accelerator_config={"use_configured_state": True},
        )
        trainer = Trainer(model, arguments, train_dataset=_Rows(work), callbacks=[alternate])
        # It would print its own table of figures.
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    accelerator.gradient_accumulation_steps = work.run.batches.accumulation
    return alternate.pairs
