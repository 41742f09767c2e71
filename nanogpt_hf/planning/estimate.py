"""What a run will need and how long it will take, before it starts: arithmetic on its recipe and accelerate config."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.checks import accumulation_steps, divisors
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.manifest import Manifest, read_manifest
from nanogpt_hf.data.source import find_files
from nanogpt_hf.data.tokenizer import known_vocab_size
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.model.architecture import architecture_of, padding_rows, part_of
from nanogpt_hf.model.build import build_config, meta_model
from nanogpt_hf.optim.adamw_8bit import NOT_UNDER_ZERO
from nanogpt_hf.planning.footprint import Footprint, footprint
from nanogpt_hf.planning.hardware import GPUS, USABLE_MEMORY
from nanogpt_hf.planning.placement import Placement

CHINCHILLA = 20  # tokens a parameter that make the best of a given amount of arithmetic: arXiv:2203.15556, table 3


@dataclass(frozen=True)
class Device:
    """A GPU of which a run takes one for each process."""

    name: str
    memory: float  # bytes
    micro_batch_size: int | None  # the largest that fits; None where not one sequence does
    seconds: float | None  # of the whole run at the MFU that was asked for; None where the peak is not known


@dataclass(frozen=True)
class Estimate:
    """The figures, in bytes, seconds, tokens and parameters."""

    recipe: str
    machine: str
    vocabulary: str  # its size, and how that is known
    parameters: int
    trained: int
    by_part: dict[str, int]
    micro_batch_size: int
    block_size: int
    accumulation: int
    memory: Footprint
    flops_per_token: float
    flops: float
    mfu: float
    devices: list[Device]
    tokens: int
    chinchilla_tokens: int
    epochs: float | None  # over the prepared data
    data_bytes: int | None  # of the prepared data, or the most that it can be; None where that is not known
    data_is_prepared: bool
    run_bytes: int


def estimate(
    config: Config,
    place: Placement,
    base: PreTrainedConfig | None = None,
    *,
    mfu: float = 0.4,
    memory: float | None = None,
) -> Estimate:
    """The estimate of a run of `config`, from the model that `base` configures where it is fine-tuned.

    `memory`: bytes of a device that is asked about beside the GPUs that are known. Raises UserError where the steps do
    not divide over the processes, where the vocabulary cannot be known, and for moments in 8 bits under ZeRO.
    """
    if config.optim.state == "8bit" and place.zero:
        raise UserError(NOT_UNDER_ZERO)
    manifest = read_manifest(Path(config.data.dir))
    model, vocabulary = _meta_model(config, base, manifest)
    try:
        accumulation = accumulation_steps(config, place.processes)
    except ValueError as error:
        raise UserError(str(error)) from None
    block_size, tokens = config.data.block_size, config.train.max_steps * config.train.tokens_per_step
    micro = 1 if config.train.micro_batch_size == "auto" else config.train.micro_batch_size
    sequences = micro * accumulation  # of a process in a step
    each = architecture_of(model).flops_per_token(model.config, block_size)

    def of(size: int, where: Placement) -> Footprint:
        sizes = {"micro_batch_size": size, "block_size": block_size}
        return footprint(model, where, **sizes, accumulates=size < sequences, optimizer_state=config.optim.state)

    on_gpu = dataclasses.replace(place, on_cpu=False)
    asked = [("this much memory", memory, place)] if memory else []
    peaks: dict[bool, dict[int, float]] = {
        where.on_cpu: {size: of(size, where).peak for size in divisors(sequences)} for where in {place, on_gpu}
    }
    devices = []
    for name, room, where in [*asked, *((name, gpu.memory, on_gpu) for name, gpu in GPUS.items())]:
        fits = [size for size, peak in peaks[where.on_cpu].items() if peak <= USABLE_MEMORY * room]
        seconds = tokens * each / (GPUS[name].bf16_flops * mfu * place.processes) if name in GPUS else None
        devices.append(Device(name, room, max(fits, default=None), seconds))

    # rows that only pad the vocabulary are in memory and in checkpoints, but no part of the model
    padding = padding_rows(model.config) * model.config.hidden_size
    held, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    by_part = _by_part(model)
    by_part["token embedding and head"] -= padding
    return Estimate(
        recipe=config.name,
        machine=str(place),
        vocabulary=vocabulary,
        parameters=held - padding,
        trained=trained - padding * model.get_input_embeddings().weight.requires_grad,
        by_part=by_part,
        micro_batch_size=micro,
        block_size=block_size,
        accumulation=accumulation,
        memory=of(micro, place),
        flops_per_token=each,
        flops=each * tokens,
        mfu=mfu,
        devices=devices,
        tokens=tokens,
        chinchilla_tokens=CHINCHILLA * (held - padding),
        epochs=tokens / manifest.train.tokens if manifest else None,
        data_bytes=_data_bytes(config, manifest, model.config.vocab_size),
        data_is_prepared=manifest is not None,
        run_bytes=run_bytes(held, trained, config.checkpoint.keep),
    )


def run_bytes(parameters: int, trained: int, keep: int) -> int:
    """The most that a run folder holds: `keep` checkpoints and one more while it is written, best/ twice, final/.

    With `keep` 1 they are 2: the newest, and the one before that is known to be sound.
    A checkpoint has float32 weights, and AdamW's two moments of what trains.
    """
    return (4 * parameters + 8 * trained) * (max(keep, 2) + 1) + 4 * parameters * 3


def _meta_model(
    config: Config, base: PreTrainedConfig | None, manifest: Manifest | None
) -> tuple[PreTrainedModel, str]:
    """The run's model on the meta device, with what trains in the last step, when it is the most; its vocabulary."""
    if base is not None:
        return meta_model(
            config, base, step=config.train.max_steps - 1
        ), f"{base.vocab_size:,}, of {config.finetune.model}"
    try:
        size, known = known_vocab_size(config.data, manifest)
    except DataError as error:
        raise UserError(f"data.tokenizer: its size is not known yet, run `prepare` first: {error}") from None
    return meta_model(config, build_config(config.model, size)), f"{size:,}, {known}"


def _by_part(model: PreTrainedModel) -> dict[str, int]:
    counts = Counter()
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return dict(counts)


def _data_bytes(config: Config, manifest: Manifest | None, vocab_size: int) -> int | None:
    if manifest:
        return sum(path.stat().st_size for path in Path(config.data.dir).rglob("*") if path.is_file())
    files = find_files(config.data.source)
    if config.data.tokenizer not in ("char", "gpt2") or not files or {path.suffix for path in files} - {".txt", ".md"}:
        return None
    # neither tokenizer makes more tokens than a text has bytes
    return sum(path.stat().st_size for path in files) * (2 if vocab_size <= 2**16 else 4)
