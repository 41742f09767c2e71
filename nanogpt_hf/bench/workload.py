"""What a bench measures: the model, the optimizer, the batches and the step of a run, and no run folder."""

import dataclasses
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.distributed.accelerator import prepared_blocks
from nanogpt_hf.doctor.probes import made_up_tokens, tokens_for, vocab_size_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import start_model
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.training.loop import train_step
from nanogpt_hf.training.micro_batch import rehearsal, settle_micro_batch
from nanogpt_hf.training.optimizer import build_optimizer
from nanogpt_hf.training.schedule import learning_rate_at
from nanogpt_hf.training.setup import batches_of, keep_freed_memory


@dataclass
class Workload:
    """A run as it stands before its first step; `next_step` counts those that were taken since."""

    accelerator: Accelerator
    config: Config
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    model_config: GPTConfig
    tokens_from: str  # where the tokens lie, or that they are made up and why
    next_step: int = 0

    def step(self) -> None:
        """The step that a run would take next, by the loop's own `train_step`."""
        number, optim = self.next_step, self.config.optim
        self.next_step += 1
        train_step(
            self.accelerator,
            self.model,
            self.optimizer,
            self.batches,
            number,
            learning_rate=learning_rate_at(number, optim, self.config.train.max_steps),
            max_grad_norm=optim.max_grad_norm,
        )


@dataclass
class _Tokens:
    train: object  # a TokenStream or Examples, as of prepared data


def build_workload(accelerator: Accelerator, config: Config, *, use_prepared: bool) -> Workload:
    """`config` on this machine, on its prepared tokens or, where there are none, on made-up ones.

    Raises UserError where the prepared data does not fit the recipe, or the recipe the machine.
    """
    tokens, tokens_from, problem = tokens_for(config, use_prepared)
    if problem:
        raise UserError(problem)
    vocab_size = vocab_size_of(config)
    if tokens is None:
        tokens_from = f"made-up tokens ({tokens_from})"
        tokens = made_up_tokens(vocab_size, 4 * max(config.train.tokens_per_step, config.data.block_size) + 1)
    data = _Tokens(tokens)
    model = start_model(config, vocab_size, None)
    model_config, optimizer = model.config, build_optimizer(model, config.optim, config.finetune.layer_decay)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    with prepared_blocks(model, accelerator):
        model, optimizer = accelerator.prepare(model, optimizer)
    model.train()

    def rehearse(size: int) -> None:
        with rehearsal(accelerator, model, optimizer):
            batches = batches_of(accelerator, config, data, size)
            train_step(accelerator, model, optimizer, batches, 0, learning_rate=0.0, max_grad_norm=0.0)

    config = settle_micro_batch(accelerator, model, config, None, rehearse)
    batches = batches_of(accelerator, config, data, config.train.micro_batch_size)
    return Workload(accelerator, config, model, optimizer, batches, model_config, tokens_from)


def strong(config: Config, processes: int) -> Config:
    """The same step shared by `processes`: with the largest micro-batch, up to the recipe's, that divides it."""
    train, block = config.train, config.data.block_size
    sequences = train.tokens_per_step // block
    most = sequences if train.micro_batch_size == "auto" else train.micro_batch_size
    sizes = [size for size in range(1, most + 1) if sequences % (size * processes) == 0]
    if not sizes:
        raise UserError(f"--processes: {processes} do not divide a step of {sequences} sequences; try --scaling weak")
    return dataclasses.replace(config, train=dataclasses.replace(train, micro_batch_size=sizes[-1]))


def weak(config: Config, processes: int) -> Config:
    """As many tokens in a step for each of `processes` as the recipe gives one."""
    train = dataclasses.replace(config.train, tokens_per_step=config.train.tokens_per_step * processes)
    return dataclasses.replace(config, train=train)
