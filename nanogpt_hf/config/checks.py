"""Rules over the values of knobs that hold on every machine and with all data: each rule once, with its message."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from nanogpt_hf.config.schema import LORA_TARGETS, Config, DataSection, ModelSection
from nanogpt_hf.config.sources import has_conversations, is_mixture, sources_of

# user/name on the Hub
REPO_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?=.{3,96}$)[A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)


class Conflict(NamedTuple):
    """A rule that is broken. The message is about the first of the knobs that the rule reads."""

    keys: tuple[str, ...]
    message: str


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule that `config` breaks."""
    yield from _data_conflicts(config)
    yield from _model_conflicts(config)
    yield from _step_conflicts(config)
    yield from _finetune_conflicts(config)
    if config.rl.task:
        yield from _rl_conflicts(config)
    yield from _hub_conflicts(config)


def _data_conflicts(config: Config) -> Iterator[Conflict]:
    data, chat = config.data, has_conversations(config.data)
    if not data.source and not config.rl.task:
        yield Conflict(("data.source",), "required: the text to train on, for example python-docs")
    for source in sources_of(data):
        if not source.data.validation_fraction and not source.data.validation_split:
            yield Conflict(
                ("data.validation_fraction", "data.validation_split", "data.source"),
                "must be above 0 if data.validation_split is not given",
            )
        yield from _part_conflicts(source.data)
        if source.data.format == "chat" and source.data.source == "python-docs":
            yield Conflict(("data.source", "data.format"), "python-docs is text; name a file of conversations")
    if chat and data.tokenizer == "char":
        yield Conflict(("data.tokenizer", "data.format"), "char has no token that ends an answer; use gpt2")
    if is_mixture(data) and data.tokenizer in ("char", "bpe"):
        yield Conflict(
            ("data.tokenizer", "data.source"),
            f"{data.tokenizer} is made from one text; for a mixture use gpt2 or a tokenizer's folder, such as "
            "data/NAME/tokenizer of another prepared text",
        )
    if data.tokenizer in ("char", "bpe") and any(source.data.format == "datatrove" for source in sources_of(data)):
        yield Conflict(
            ("data.tokenizer", "data.format", "data.source"),
            f"{data.tokenizer} is made from text, and datatrove has made the tokens; name the tokenizer that it used",
        )
    if data.tokenizer == "bpe" and data.vocab_size is None:
        yield Conflict(("data.vocab_size", "data.tokenizer"), "required by data.tokenizer bpe, for example 4096")
    if data.tokenizer != "bpe" and data.vocab_size is not None:
        yield Conflict(
            ("data.vocab_size", "data.tokenizer"),
            f"only data.tokenizer bpe is trained to a size, and this is {data.tokenizer}; leave it out",
        )
    if data.tokenizer != "bpe" and data.bpe_pattern != "gpt2":
        yield Conflict(
            ("data.bpe_pattern", "data.tokenizer"),
            f"only data.tokenizer bpe is trained with a pattern, and this is {data.tokenizer}; leave it out",
        )
    if chat and data.order == "random":
        yield Conflict(("data.order", "data.format"), "random windows would cut conversations; use shuffled")


def _model_conflicts(config: Config) -> Iterator[Conflict]:
    model, block_size, start = config.model, config.data.block_size, config.finetune.model
    if model.n_embd % model.n_head:
        yield Conflict(
            ("model.n_embd", "model.n_head"), f"{model.n_embd} is not a multiple of model.n_head {model.n_head}"
        )
    if model.n_kv_head and model.n_head % model.n_kv_head:
        yield Conflict(
            ("model.n_kv_head", "model.n_head"), f"{model.n_kv_head} does not divide model.n_head {model.n_head}"
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
        yield Conflict(("train.max_time",), f"expected a time such as 11h30m, 45m or 90s, got {train.max_time!r}")
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
    if optim.state == "8bit" and optim.name != "adamw":
        yield Conflict(("optim.state", "optim.name"), "8bit is for adamw only")
    if message := _uneven_step(train.tokens_per_step, train.micro_batch_size, config.data.block_size):
        yield Conflict(("train.tokens_per_step", "train.micro_batch_size", "data.block_size"), message)


def _finetune_conflicts(config: Config) -> Iterator[Conflict]:
    model, finetune, lora = config.model, config.finetune, config.lora
    if finetune.freeze_layers is not None:
        keys = ("finetune.freeze_layers", "finetune.model", "model.n_layer")
        if finetune.model is None:
            yield Conflict(keys, "a model from scratch has nothing to keep; name a model to start from: --from MODEL")
        elif finetune.freeze_layers > model.n_layer:
            yield Conflict(keys, f"{finetune.freeze_layers} is more than the model's {model.n_layer} blocks")
    if finetune.unfreeze_every:
        keys = ("finetune.unfreeze_every", "finetune.freeze_layers", "train.micro_batch_size")
        if finetune.freeze_layers is None:
            yield Conflict(keys, "no layer is frozen; give --freeze-layers N")
        elif config.train.micro_batch_size == "auto":
            yield Conflict(
                keys,
                "unfrozen layers need memory that train.micro_batch_size auto does not measure; set a number",
            )
    if lora.rank:
        keys = ("lora.rank", "finetune.model", "finetune.freeze_layers")
        if finetune.model is None:
            yield Conflict(keys, "an adapter needs a base model; name one: --from MODEL")
        elif finetune.freeze_layers is not None:
            yield Conflict(keys, "LoRA freezes the whole model; leave finetune.freeze_layers out")
    # of another architecture, training/finetuning.py checks them
    if not lora.targets or (model.architecture == "gpt2" and not set(lora.targets) <= set(LORA_TARGETS)):
        yield Conflict(("lora.targets", "model.architecture"), f"expected some of {', '.join(LORA_TARGETS)}")
    if lora.quantize:
        keys = ("lora.quantize", "lora.rank", "lora.merge")
        if not lora.rank:
            yield Conflict(keys, "only the frozen base model of LoRA can be quantized: give --lora RANK")
        elif lora.merge:
            yield Conflict(
                keys,
                "an adapter cannot be merged into quantized weights: leave lora.merge out, and merge with "
                "cli.py export RUN OUT",
            )


def _hub_conflicts(config: Config) -> Iterator[Conflict]:
    hub = config.hub
    if hub.repo is not None and not REPO_ID.fullmatch(hub.repo):
        yield Conflict(("hub.repo",), f"expected user/name, got {hub.repo!r:.80}")
    if hub.push and not hub.repo:
        yield Conflict(("hub.push", "hub.repo"), "needs hub.repo: user/name, the repository to push to")
    if hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license):
        yield Conflict(
            ("hub.license",),
            f"expected the Hub's name of a licence, such as mit, got {hub.license!r:.80}",
        )


def _part_conflicts(data: DataSection) -> Iterator[Conflict]:
    """Every rule that a source breaks which is read in parts: streamed, or up to a number of tokens."""
    for key, given in (("data.streaming", data.streaming), ("data.max_tokens", data.max_tokens is not None)):
        if given and data.tokenizer in ("char", "bpe"):
            reason = f"{data.tokenizer} is made from the whole text; use gpt2 or a tokenizer's folder"
            yield Conflict((key, "data.tokenizer", "data.source"), reason)
        if given and data.format == "datatrove":
            yield Conflict((key, "data.format", "data.source"), "datatrove has made the tokens already; leave it out")
    if data.streaming and "[" in f"{data.split}{data.validation_split}":
        yield Conflict(
            ("data.streaming", "data.split", "data.validation_split", "data.source"),
            "reads whole splits, without [...]; data.max_tokens reads the first documents only",
        )


def accumulation_steps(config: Config, num_processes: int) -> int:
    """Micro-batches that each of `num_processes` data-parallel processes runs in one optimizer step; auto counts as 1.

    Raises ValueError, with the product and the nearest tokens_per_step that divide, if the result is not whole.
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
            remedy = "leave it out, or set model.architecture" if is_gpt2 else f"leave it out; {_GPT2_ONLY[name]}"
            yield Conflict((f"model.{name}", "model.architecture"), f"{model.architecture} has no such knob; {remedy}")


def _rl_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule over the knobs of reinforcement learning that `config` breaks."""
    rl, sequences = config.rl, config.train.tokens_per_step // config.data.block_size
    size, micro = rl.batch_size, config.train.micro_batch_size
    if sequences % rl.samples:
        yield Conflict(
            ("rl.samples", "train.tokens_per_step", "data.block_size"),
            f"{rl.samples} does not divide the {sequences} sequences of a step (train.tokens_per_step "
            f"{config.train.tokens_per_step:,} / data.block_size {config.data.block_size})",
        )
    if size is not None and sequences % size:
        yield Conflict(
            ("rl.batch_size", "train.tokens_per_step", "data.block_size"),
            f"{size} does not divide the {sequences} sequences of a step",
        )
    if rl.max_new_tokens >= config.data.block_size:
        yield Conflict(
            ("rl.max_new_tokens", "data.block_size"),
            f"{rl.max_new_tokens} leaves no room for a question in data.block_size {config.data.block_size}",
        )
    if rl.clip is not None and rl.updates == 1:
        yield Conflict(
            ("rl.clip", "rl.updates"), "the ratio is 1 in the first update of a step; set rl.updates, or leave it out"
        )
    if micro == "auto":
        yield Conflict(("train.micro_batch_size", "rl.task"), "auto does not measure generation; set a number")
    for key, is_set in (("data.streaming", config.data.streaming), ("data.max_tokens", config.data.max_tokens)):
        if is_set:
            yield Conflict((key, "rl.task"), "questions are read whole; leave it out")
    if config.data.order == "random":
        yield Conflict(("data.order", "rl.task"), "questions are drawn once per epoch; use shuffled")
    if config.tracking.layers:
        yield Conflict(("tracking.layers", "rl.task"), "statistics of layers need validation text; leave it out")
    if config.finetune.unfreeze_every:
        yield Conflict(("finetune.unfreeze_every", "rl.task"), "not supported in reinforcement learning; leave it out")
    if config.train.rollback_ratio is not None:
        yield Conflict(("train.rollback_ratio", "rl.task"), "the loss of a policy has no trend; leave it out")


def _uneven_step(tokens: int, micro: int | str, block: int, processes: int = 1) -> str | None:
    """The message if micro-batches do not add up to a step of `tokens`, with the product and values that would."""
    micro = 1 if isinstance(micro, str) else micro
    unit = micro * block * processes
    if tokens % unit == 0:
        return None
    below = tokens // unit * unit
    message = f"{tokens:,} is not a multiple of train.micro_batch_size {micro} × data.block_size {block}"
    if processes > 1:
        message += f" × {processes} processes"
    message += f" = {unit:,}; nearest: "
    message += f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
    sequences, remainder = divmod(tokens, block * processes)
    smaller = max((m for m in divisors(sequences) if m < micro), default=None) if not remainder else None
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
    return sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else None
