"""Baselines for the training step: bare PyTorch and transformers' Trainer, timed alternately with
ours in one process.

On a shared machine the speed changes over time; the ratio of alternating measurements stays
comparable.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from nanogpt_hf.bench.workload import Workload
from nanogpt_hf.config.sources import learns_parts
from nanogpt_hf.distributed.preparation import prepared_blocks
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import start_model
from nanogpt_hf.optim.optimizer import build_optimizer, kind_of
from nanogpt_hf.training.clock import WARM_STEPS, synchronize, time_of

Pair = tuple[float, float]  # seconds per step: ours, the baseline's


def check_comparable(work: Workload, baselines: list[str]) -> None:
    """Raises UserError if one of the baselines cannot do the same work."""
    accelerator = work.run.accelerator
    config = work.run.config
    if work.run.mesh.world_size > 1:
        raise UserError(
            "--against needs one process; start it without accelerate launch, or with one process"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(
            f"--against: needs float32 or bf16, not mixed_precision {accelerator.mixed_precision}"
        )
    if config.finetune.model or learns_parts(config.data):
        raise UserError(
            "--against compares pretraining on text; use a recipe without finetune.model"
        )
    if "trainer" in baselines and kind_of(config.optim).in_trainer is None:
        raise UserError(
            f"--against trainer: transformers' Trainer has no {config.optim.name}; use --against "
            "bare, or optim.name adamw"
        )


def bare_step(work: Workload) -> Callable[[], None]:
    """Plain PyTorch's step with our model and optimizer: draw, forward, backward, clip, step."""
    accelerator = work.run.accelerator
    batches = work.run.batches
    optim = work.run.config.optim
    device = accelerator.device
    # The same start, so that both have the same arithmetic.
    model = start_model(work.run.config, work.run.model_config.vocab_size, None).to(device).train()
    optimizer = build_optimizer(model, optim)
    # It compiles the blocks if the accelerate config does.
    with prepared_blocks(model, accelerator, optimizer):
        pass
    bf16 = accelerator.mixed_precision == "bf16"
    step = 0

    def bare() -> None:
        nonlocal step
        for batch in batches.micro_batches(step):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                loss = model(**batch, use_cache=False).loss
            # The mean over micro-batches, as all have the same number of targets.
            (loss / batches.accumulation).backward()
        if optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1

    return bare


def pairs_with_bare(work: Workload, windows: int, steps: int) -> list[Pair]:
    """Time both alternately, `steps` of each per window; the order changes with each window."""
    device = work.run.accelerator.device
    theirs = bare_step(work)
    # The first steps compile and allocate, and are not timed.
    for _ in range(WARM_STEPS):
        theirs()
        work.step()
    sides = [theirs, work.step]
    pairs = []
    # Who comes second may find warmer caches, or a machine that has become busy: they take turns.
    for _ in range(windows):
        times = {side: time_of(device, side, steps) for side in sides}
        pairs.append((times[work.step], times[theirs]))
        sides.reverse()
    return pairs


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
