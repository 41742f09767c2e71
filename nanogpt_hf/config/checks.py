"""Rules over knobs that hold on every machine and with all data, each with its message."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from nanogpt_hf.config.compatibility import refused_in_recipe
from nanogpt_hf.config.schema import KNOBS, LORA_TARGETS, Config, ModelSection
from nanogpt_hf.config.sources import sources_of

# user/name on the Hub
REPO_ID = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))(?=.{3,96}$)[A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII
)


class Conflict(NamedTuple):
    """A rule that is broken. The message is about the first of the knobs that the rule reads."""

    keys: tuple[str, ...]
    message: str


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule that `config` breaks."""
    for rule, message in refused_in_recipe(config).items():
        knob, *others = (name.partition(" ")[0] for name in (rule.a, rule.b))
        keys = (knob, *(other for other in others if other in KNOBS))
        yield Conflict(keys, message.removeprefix(f"{knob} "))
    yield from _data_conflicts(config)
    yield from _model_conflicts(config)
    yield from _step_conflicts(config)
    yield from _finetune_conflicts(config)
    if config.rl.task:
        yield from _rl_conflicts(config)
    yield from _hub_conflicts(config)


def _data_conflicts(config: Config) -> Iterator[Conflict]:
    data = config.data
    if not data.source and not config.rl.task:
        yield Conflict(("data.source",), "required: the text to train on, for example python-docs")
    for source in sources_of(data):
        if not source.data.validation_fraction and not source.data.validation_split:
            yield Conflict(
                ("data.validation_fraction", "data.validation_split", "data.source"),
                "must be above 0 if data.validation_split is not given",
            )
    if data.tokenizer == "bpe" and data.vocab_size is None:
        yield Conflict(
            ("data.vocab_size", "data.tokenizer"),
            "required by data.tokenizer bpe, for example 4096",
        )
    if data.tokenizer != "bpe" and data.vocab_size is not None:
        yield Conflict(
            ("data.vocab_size", "data.tokenizer"),
            (
                f"only data.tokenizer bpe is trained to a size, and this is {data.tokenizer}; "
                "leave it out"
            ),
        )
    if data.tokenizer != "bpe" and data.bpe_pattern != "gpt2":
        yield Conflict(
            ("data.bpe_pattern", "data.tokenizer"),
            (
                f"only data.tokenizer bpe is trained with a pattern, and this is {data.tokenizer}; "
                "leave it out"
            ),
        )


def _model_conflicts(config: Config) -> Iterator[Conflict]:
    model, block_size, start = config.model, config.data.block_size, config.finetune.model
    if model.n_embd % model.n_head:
        yield Conflict(
            ("model.n_embd", "model.n_head"),
            f"{model.n_embd} is not a multiple of model.n_head {model.n_head}",
        )
    if model.n_kv_head and model.n_head % model.n_kv_head:
        yield Conflict(
            ("model.n_kv_head", "model.n_head"),
            f"{model.n_kv_head} does not divide model.n_head {model.n_head}",
        )
    yield from _architecture_conflicts(config)
    if block_size > model.n_positions:
        reason = f": {start} was trained with no more; use a shorter one" if start else ""
        yield Conflict(
            ("data.block_size", "model.n_positions", "finetune.model"),
            f"{block_size} is longer than model.n_positions {model.n_positions}{reason}",
        )


def _step_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule over steps and the optimizer that `config` breaks."""
    optim, train = config.optim, config.train
    if train.max_time is not None and not parse_duration(train.max_time):
        yield Conflict(
            ("train.max_time",),
            f"expected a time such as 11h30m, 45m or 90s, got {train.max_time!r}",
        )
    if optim.warmup_steps > train.max_steps:
        yield Conflict(
            ("optim.warmup_steps", "train.max_steps"),
            f"{optim.warmup_steps} is more than train.max_steps {train.max_steps}",
        )
    if optim.min_learning_rate > optim.learning_rate:
        yield Conflict(
            ("optim.min_learning_rate", "optim.learning_rate"),
            f"{optim.min_learning_rate} is above optim.learning_rate {optim.learning_rate}",
        )
    if optim.name == "muon" and not optim.learning_rate:
        yield Conflict(
            ("optim.learning_rate", "optim.name"),
            "must be above 0 with muon, whose learning rate follows the same schedule",
        )
    if message := _uneven_step(
        train.tokens_per_step, train.micro_batch_size, config.data.block_size
    ):
        yield Conflict(
            ("train.tokens_per_step", "train.micro_batch_size", "data.block_size"), message
        )


def _finetune_conflicts(config: Config) -> Iterator[Conflict]:
    model, finetune, lora = config.model, config.finetune, config.lora
    if finetune.freeze_layers is not None:
        keys = ("finetune.freeze_layers", "finetune.model", "model.n_layer")
        if finetune.model is None:
            yield Conflict(
                keys,
                (
                    "a model from scratch has nothing to keep; name a model to start "
                    "from: --from MODEL"
                ),
            )
        elif finetune.freeze_layers > model.n_layer:
            yield Conflict(
                keys, f"{finetune.freeze_layers} is more than the model's {model.n_layer} blocks"
            )
    if finetune.unfreeze_every:
        keys = ("finetune.unfreeze_every", "finetune.freeze_layers", "train.micro_batch_size")
        if finetune.freeze_layers is None:
            yield Conflict(keys, "no layer is frozen; give --freeze-layers N")
    if lora.rank:
        keys = ("lora.rank", "finetune.model", "finetune.freeze_layers")
        if finetune.model is None:
            yield Conflict(keys, "an adapter needs a base model; name one: --from MODEL")
    # training/finetuning.py checks those of another architecture
    if not lora.targets or (
        model.architecture == "gpt2" and not set(lora.targets) <= set(LORA_TARGETS)
    ):
        yield Conflict(
            ("lora.targets", "model.architecture"), f"expected some of {', '.join(LORA_TARGETS)}"
        )
    if lora.quantize and not lora.rank:
        keys = ("lora.quantize", "lora.rank")
        yield Conflict(keys, "only the frozen base of LoRA can be quantized: give --lora RANK")


def _hub_conflicts(config: Config) -> Iterator[Conflict]:
    hub = config.hub
    if hub.repo is not None and not REPO_ID.fullmatch(hub.repo):
        yield Conflict(("hub.repo",), f"expected user/name, got {hub.repo!r:.80}")
    if hub.push and not hub.repo:
        yield Conflict(
            ("hub.push", "hub.repo"), "needs hub.repo: user/name, the repository to push to"
        )
    if hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license):
        yield Conflict(
            ("hub.license",),
            f"expected the Hub's name of a license, such as mit, got {hub.license!r:.80}",
        )


def accumulation_steps(config: Config, num_processes: int) -> int:
    """Micro-batches that each of `num_processes` data-parallel processes runs in one optimizer
    step; auto counts as 1.

    Raises ValueError, with the product and the nearest tokens_per_step that divide, if the
    result is not whole.
    """
    train, block_size = config.train, config.data.block_size
    message = _uneven_step(train.tokens_per_step, train.micro_batch_size, block_size, num_processes)
    if message:
        raise ValueError(f"train.tokens_per_step: {message}")
    micro = train.min_micro_batch_size
    return train.tokens_per_step // (micro * block_size * num_processes)


# Knobs that only our GPT-2 has, and what to use instead.
_GPT2_ONLY = {
    "bias": "its config may have a field such as attention_bias, for model.extra",
    "dropout": "its config may have a field such as attention_dropout, for model.extra",
    "activation_function": "its config may have a field such as hidden_act, for model.extra",
}
_OTHERS_ONLY = ("n_kv_head", "n_inner", "extra")


def _architecture_conflicts(config: Config) -> Iterator[Conflict]:
    """Knobs of the section `model` that its architecture does not have."""
    model, defaults = config.model, ModelSection()
    is_gpt2 = model.architecture == "gpt2"
    for name in _OTHERS_ONLY if is_gpt2 else _GPT2_ONLY:
        if getattr(model, name) != getattr(defaults, name):
            remedy = (
                ("leave it out, or set model.architecture")
                if is_gpt2
                else f"leave it out; {_GPT2_ONLY[name]}"
            )
            yield Conflict(
                (f"model.{name}", "model.architecture"),
                f"{model.architecture} has no such knob; {remedy}",
            )


def _rl_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule over the knobs of reinforcement learning that `config` breaks."""
    rl, sequences = config.rl, config.train.tokens_per_step // config.data.block_size
    size = rl.batch_size
    if sequences % rl.samples:
        yield Conflict(
            ("rl.samples", "train.tokens_per_step", "data.block_size"),
            f"{rl.samples} does not divide the {sequences} sequences of a step "
            f"(train.tokens_per_step {config.train.tokens_per_step:,} / data.block_size "
            f"{config.data.block_size})",
        )
    if size is not None and sequences % size:
        yield Conflict(
            ("rl.batch_size", "train.tokens_per_step", "data.block_size"),
            f"{size} does not divide the {sequences} sequences of a step",
        )
    if rl.max_new_tokens >= config.data.block_size:
        yield Conflict(
            ("rl.max_new_tokens", "data.block_size"),
            (
                f"{rl.max_new_tokens} leaves no room for a question in data.block_size "
                f"{config.data.block_size}"
            ),
        )
    if rl.clip is not None and rl.updates == 1:
        yield Conflict(
            ("rl.clip", "rl.updates"),
            "the ratio is 1 in the first update of a step; set rl.updates, or leave it out",
        )


def _uneven_step(tokens: int, micro: int | str, block: int, processes: int = 1) -> str | None:
    """The message if micro-batches do not add up to a step of `tokens`, with the product and
    values that would.
    """
    micro = 1 if isinstance(micro, str) else micro
    unit = micro * block * processes
    if tokens % unit == 0:
        return None
    below = tokens // unit * unit
    message = (
        f"{tokens:,} is not a multiple of train.micro_batch_size {micro} × data.block_size {block}"
    )
    if processes > 1:
        message += f" × {processes} processes"
    message += f" = {unit:,}; nearest: "
    message += f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
    sequences, remainder = divmod(tokens, block * processes)
    smaller = (
        max((m for m in divisors(sequences) if m < micro), default=None) if not remainder else None
    )
    if smaller:
        message += f", or train.micro_batch_size {smaller}"
    return message


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def parse_duration(text: str) -> int | None:
    """Seconds of a duration: `11h30m` -> 41400; None if it is not a duration."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    return (
        sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True))
        if parts
        else None
    )
