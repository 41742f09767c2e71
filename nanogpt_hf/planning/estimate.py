"""Estimate memory, time and disk of a run from its recipe and accelerate config, without running
it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import planned_tokens, stages_of, tokens_by_source
from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.data.hf_tokenizer import known_vocab_size
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.data.prepared import fitting_manifest
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.generate.cache import starts_mergeable
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.architecture import architecture_of, padding_parameters, part_of
from nanogpt_hf.model.build import build_config, meta_model
from nanogpt_hf.model.checks import check_balance
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.planning.footprint import footprint, useless_checkpointing
from nanogpt_hf.planning.hardware import GPUS, USABLE_MEMORY
from nanogpt_hf.planning.memory import Footprint
from nanogpt_hf.planning.steps import flops_per_token, footprint_arguments

CHINCHILLA = 20  # compute-optimal tokens per parameter: arXiv:2203.15556, table 3


@dataclass(frozen=True)
class Device:
    """A kind of GPU, one per process."""

    name: str
    memory: float  # bytes
    # The largest that fits; None if one sequence does not.
    micro_batch_size: int | None
    # Seconds of the run at the given MFU; None if the peak FLOP/s is unknown.
    seconds: float | None


@dataclass(frozen=True)
class Estimate:
    """Estimates in bytes, seconds, tokens and parameters."""

    recipe: str
    machine: str
    vocabulary: str  # its size and source
    parameters: int
    active: int  # parameters that compute for a token
    trainable: int
    by_part: dict[str, int]
    micro_batch_size: int
    block_size: int
    accumulation: int
    memory: Footprint
    useless: str | None  # a line about activation checkpointing that saves nothing
    flops_per_token: float  # the model's, forward and backward
    flops: float  # the whole run's, with the optimizer's if they are not negligible
    mfu: float
    devices: list[Device]
    uses_prepared_data: bool  # else its method reads the data when a run starts
    noun: str  # what a block is
    sequences: int  # that a step reads of each, with a gradient
    blocks: int
    # Tokens in the sequences of all blocks.
    tokens: int
    chinchilla_tokens: int
    epochs: dict[str, float]  # how often the data is read, or each source of a mixture
    data_bytes: int | None  # on disk; None if it is not prepared
    run_bytes: int


def estimate(
    config: Config,
    launch: Launch,
    base: PreTrainedConfig | None = None,
    *,
    mfu: float = 0.4,
    memory: float | None = None,
) -> Estimate:
    """Estimate a run of `config`; `base` is the config of the model to fine-tune.

    Of a recipe with stages, `config` may be that of any of them: memory and layout are its own.
    `memory`: bytes of another device, in addition to the known GPUs. Raises UserError for a
    layout that cannot be trained, and if the size of the vocabulary is unknown.
    """
    accumulation = check_layout(config, launch)
    method = method_of(config)
    manifest = _manifest_of(config)
    model, vocabulary = _checked_model(config, base, manifest)
    micro = config.train.min_micro_batch_size
    # Sequences of a process in a step, which any micro-batch size divides.
    sequences = micro * accumulation
    size = _size(config, model)
    step = footprint_arguments(config)

    # Micro-batches of several devices are of the same sizes, so estimates are kept.
    @cache
    def footprint_of(size: int, launch: Launch) -> Footprint:
        accumulation = sequences // size
        return footprint(model, launch, micro_batch_size=size, accumulation=accumulation, **step)

    one = step | {"micro_batch_size": micro, "accumulation": accumulation}
    # Experts that a token does not reach, and embeddings that are only looked up, compute nothing.
    active = size.parameters - architecture_of(model).sizes(model.config).idle
    # Sampling takes a time that is not estimated.
    timed_flops = None if config.rl.task else planned_tokens(config) * size.flops_per_token
    return Estimate(
        recipe=config.name,
        machine=str(launch),
        vocabulary=vocabulary,
        parameters=size.parameters,
        active=active,
        trainable=size.trainable,
        by_part=_parameters_by_part(model),
        micro_batch_size=micro,
        block_size=config.data.block_size,
        accumulation=accumulation,
        memory=footprint_of(micro, launch),
        useless=useless_checkpointing(model, launch, **one),
        flops_per_token=size.flops_per_token,
        flops=size.flops,
        mfu=mfu,
        devices=_devices(footprint_of, sequences, launch, memory, timed_flops, mfu),
        uses_prepared_data=method.uses_prepared_data,
        noun=method.noun,
        sequences=method.sequences,
        blocks=sum(stage.tokens // stage.config.data.block_size for stage in stages_of(config)),
        tokens=size.tokens,
        chinchilla_tokens=CHINCHILLA * active,
        epochs=_epochs(config, manifest),
        data_bytes=_data_bytes(config) if manifest else None,
        run_bytes=_run_bytes(config, model),
    )


@dataclass(frozen=True)
class Size:
    """What of an `Estimate` needs neither memory nor devices, which take most of its time."""

    parameters: int
    trainable: int
    tokens: int
    flops_per_token: float
    flops: float


def planned_size(config: Config) -> Size:
    """The size of a run of `config` from scratch on one device.

    Raises UserError for a run that cannot be trained, and if the size of the vocabulary is unknown.
    """
    check_layout(config, Launch(device="cpu"))
    return _size(config, _checked_model(config, None, _manifest_of(config))[0])


def _size(config: Config, model: PreTrainedModel) -> Size:
    method = method_of(config)
    tokens = planned_tokens(config)
    updates = config.train.max_steps * method.updates(config)
    parameters, trainable = _parameters(model)
    per_token = _mean_flops_per_token(config, model)
    return Size(
        parameters=parameters,
        trainable=trainable,
        tokens=tokens * method.sequences,
        flops_per_token=per_token,
        flops=tokens * per_token + kind_of(config.optim).update_flops(model) * updates,
    )


def _manifest_of(config: Config) -> Manifest | None:
    return fitting_manifest(config.data) if method_of(config).uses_prepared_data else None


def _checked_model(
    config: Config, base: PreTrainedConfig | None, manifest: Manifest | None
) -> tuple[PreTrainedModel, str]:
    """The model of a run on the meta device, and its vocabulary in words."""
    model, vocabulary = _meta_model(config, base, manifest)
    check_balance(config, model.config)
    _check_sampling(config, model)
    return model, vocabulary


def _check_sampling(config: Config, model: PreTrainedModel) -> None:
    """Raises UserError if the run samples answers in a memory that is not known."""
    if config.rl.task and not starts_mergeable(model.config):
        raise UserError(
            f"model.architecture {config.model.architecture}: the memory in which it samples "
            "answers is not known; only key-value caches are estimated"
        )


def _devices(
    footprint_of: Callable[[int, Launch], Footprint],
    sequences: int,
    launch: Launch,
    memory: float | None,
    flops: float | None,
    mfu: float,
) -> list[Device]:
    """Return the user's device with `memory`, and each known GPU, which computes `flops`, if they
    are known, at `mfu` of its peak.
    """

    # Sizes that divide the sequences of a step: accumulation makes up for the rest.
    def largest(memory: float, launch: Launch) -> int | None:
        usable = USABLE_MEMORY * memory
        fitting = (n for n in divisors(sequences) if footprint_of(n, launch).peak <= usable)
        return max(fitting, default=None)

    devices = []
    if memory:
        devices.append(Device("this much memory", memory, largest(memory, launch), None))
    on_gpu = dataclasses.replace(launch, device="cuda")
    for name, gpu in GPUS.items():
        seconds = None if flops is None else flops / (gpu.bf16_flops * mfu * launch.world_size)
        devices.append(Device(name, gpu.memory, largest(gpu.memory, on_gpu), seconds))
    return devices


def _mean_flops_per_token(config: Config, model: PreTrainedModel) -> float:
    """Return the mean over the tokens of all stages, whose sequences may have other lengths."""
    tokens = planned_tokens(config)
    mean = 0.0
    for stage in stages_of(config):
        mean += stage.tokens / tokens * flops_per_token(stage.config, model)
    return mean


def _run_bytes(config: Config, model: PreTrainedModel) -> int:
    # A checkpoint's optimizer state is float32, whatever it is in training.
    in_float32 = dataclasses.replace(config.optim, state="float32")
    state = kind_of(in_float32).state_bytes(model, 1)
    return run_bytes(model.num_parameters(), state, config.checkpoint.keep)


def _parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Count the parameters, all and the trainable ones. Those that pad the vocabulary take memory
    and disk, but are none of the model's.
    """
    padding = padding_parameters(model.config)
    # The matrices with padding: one, if the head is tied. The lower may be frozen alone.
    head: Any = model.get_output_embeddings()
    padded = {next(model.get_input_embeddings().parameters()), head.weight}
    trained = sum(matrix.requires_grad for matrix in padded) / len(padded)
    trainable = model.num_parameters(only_trainable=True) - int(padding * trained)
    return model.num_parameters() - padding, trainable


def planned_parameters(config: Config, base: PreTrainedConfig) -> tuple[int, int]:
    """Count the parameters of a run from the model of `base`, all and the trainable ones of its
    last step.
    """
    return _parameters(meta_model(config, base, step=config.train.max_steps - 1))


def _parameters_by_part(model: PreTrainedModel) -> dict[str, int]:
    """Numbers of parameters by the part of the model that they are in, without padding."""
    by_part = Counter[str]()
    for name, parameter in model.named_parameters():
        by_part[part_of(name)] += parameter.numel()
    by_part["token embedding and head"] -= padding_parameters(model.config)
    return dict(by_part)


def planned_model(config: Config, base: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Return the model of a run of `config`, on the meta device.

    Raises UserError if its vocabulary is unknown.
    """
    return _meta_model(config, base, fitting_manifest(config.data))[0]


def _epochs(config: Config, manifest: Manifest | None) -> dict[str, float]:
    """Count how often each source is read; empty if the data is not prepared."""
    if manifest is None:
        return {}
    tokens = tokens_by_source(config)
    if not manifest.sources:
        return {"the prepared data": sum(tokens.values()) / manifest.train.tokens}
    return {s.name: tokens[s.name] / s.manifest.train.tokens for s in manifest.sources}


def run_bytes(parameters: int, optimizer_state: float, keep: int) -> int:
    """An upper bound for the size of a run folder: `keep` checkpoints, one more during a save,
    best/ twice, final/.

    `keep` 1 keeps 2: the newest, and the last one before it with finite gradients. A checkpoint
    has float32 weights and `optimizer_state` bytes.
    """
    # float32 weights are 4 bytes; best/ is there twice while it is replaced.
    return int((4 * parameters + optimizer_state) * (max(keep, 2) + 1) + 4 * parameters * 3)


def _meta_model(
    config: Config, base: PreTrainedConfig | None, manifest: Manifest | None
) -> tuple[PreTrainedModel, str]:
    """Return the model on the meta device, with the trainable parameters of the last step, the
    maximum; its vocabulary.
    """
    # The vocabulary of a model to fine-tune is in its config; others follow from the tokenizer.
    if base is not None:
        model = meta_model(config, base, step=config.train.max_steps - 1)
        return model, f"{base.vocab_size:,}, of {config.finetune.model}"
    try:
        size, source = known_vocab_size(config.data, manifest)
    except DataError as error:
        raise UserError(
            f"data.tokenizer: its vocabulary size is unknown; run `prepare` first: {error}"
        ) from None
    return meta_model(config, build_config(config.model, size)), f"{size:,}, {source}"


def _data_bytes(config: Config) -> int:
    folders = [Path(source.data.dir) for source in sources_of(config.data)]
    files = [path for folder in folders for path in folder.rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file())
