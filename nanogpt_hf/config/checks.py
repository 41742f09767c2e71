"""What has to hold between knobs, whatever machine and data: each rule once, with its complaint."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from nanogpt_hf.config.schema import LORA_TARGETS, Config


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _uneven_step(tokens: int, micro: int | str, block: int, processes: int = 1) -> str | None:
    """The complaint where micro-batches do not add up to a step of `tokens`, with the sum and values that would."""
    micro = 1 if isinstance(micro, str) else micro
    unit = micro * block * processes
    if tokens % unit == 0:
        return None
    below = tokens // unit * unit
    nearest = f"{below + unit:,}" if below == 0 else f"{below:,} or {below + unit:,}"
    sequences, left_over = divmod(tokens, block * processes)
    smaller = max((m for m in divisors(sequences) if m < micro), default=None) if not left_over else None
    return (
        f"{tokens:,} is not a multiple of train.micro_batch_size {micro} × data.block_size {block}"
        + (f" × {processes} processes" if processes > 1 else "")
        + f" = {unit:,}; nearest: {nearest}"
        + (f", or train.micro_batch_size {smaller}" if smaller else "")
    )


def _longer_than_the_model(block: int, most: int, start: str | None) -> str | None:
    if block <= most:
        return None
    return f"{block} is longer than model.n_positions {most}" + (
        f": {start} has learned no positions beyond; take a shorter one" if start else ""
    )


def _cannot_freeze(frozen: int, start: str | None, layers: int) -> str | None:
    if start is None:
        return "there is nothing worth keeping in a model from scratch; say what to start from: --from MODEL"
    return f"{frozen} is more than the model's {layers} blocks" if frozen > layers else None


def _cannot_unfreeze(frozen: int | None, micro: int | str) -> str | None:
    if frozen is None:
        return "nothing is frozen that could thaw; give --freeze-layers N"
    if micro == "auto":
        return "what thaws takes memory that train.micro_batch_size auto has not seen; state a number there"
    return None


def _cannot_adapt(start: str | None, frozen: int | None) -> str | None:
    if start is None:
        return "an adapter needs a model that it adapts; say what to start from: --from MODEL"
    return "LoRA freezes the whole model; leave finetune.freeze_layers out" if frozen is not None else None


def _cannot_quantize(bits: str | None, rank: int | None, merge: bool) -> str | None:
    if bits and not rank:
        return "only a frozen base can be held in so few bits: give --lora RANK"
    if bits and merge:
        return "an adapter is merged into whole weights: leave lora.merge out, and merge with cli.py export RUN OUT"
    return None


def seconds_of(time: str) -> int | None:
    """`11h30m` -> 41400; None for what is no time."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", time)
    return sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else None


# user/name on the Hub
REPO_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?=.{3,96}$)[A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)


@dataclass(frozen=True)
class Check:
    """A rule over several knobs. `problem` gives the complaint, or None where the values fit."""

    keys: tuple[str, ...]  # the first is the one that is blamed
    problem: Callable[..., str | None]


CHECKS = (
    Check(("data.source",), lambda s: None if s else "required: the text to train on, for example python-docs"),
    Check(
        ("data.validation_fraction", "data.validation_split"),
        lambda share, split: None if share or split else "must be above 0 where no data.validation_split is given",
    ),
    Check(
        ("data.source", "data.format"),
        lambda source, kind: (
            "python-docs is text; name a file of conversations" if (source, kind) == ("python-docs", "chat") else None
        ),
    ),
    Check(
        ("data.tokenizer", "data.format"),
        lambda name, kind: (
            "char has no token to end an answer with; take gpt2" if (name, kind) == ("char", "chat") else None
        ),
    ),
    Check(
        ("data.order", "data.format"),
        lambda order, kind: (
            "conversations have no random windows; take shuffled" if (order, kind) == ("random", "chat") else None
        ),
    ),
    Check(
        ("model.n_embd", "model.n_head"),
        lambda width, heads: f"{width} is not a multiple of model.n_head {heads}" if width % heads else None,
    ),
    Check(("data.block_size", "model.n_positions", "finetune.model"), _longer_than_the_model),
    Check(
        ("train.max_time",),
        lambda t: None if t is None or seconds_of(t) else f"expected a time such as 11h30m, 45m or 90s, got {t!r}",
    ),
    Check(
        ("optim.warmup_steps", "train.max_steps"),
        lambda warmup, most: f"{warmup} is more than train.max_steps {most}" if warmup > most else None,
    ),
    Check(
        ("optim.min_learning_rate", "optim.learning_rate"),
        lambda least, peak: f"{least} is above optim.learning_rate {peak}" if least > peak else None,
    ),
    Check(
        ("train.tokens_per_step", "train.micro_batch_size", "data.block_size"),
        _uneven_step,
    ),
    Check(
        ("finetune.freeze_layers", "finetune.model", "model.n_layer"),
        lambda frozen, start, layers: (frozen is not None and _cannot_freeze(frozen, start, layers)) or None,
    ),
    Check(
        ("finetune.unfreeze_every", "finetune.freeze_layers", "train.micro_batch_size"),
        lambda every, frozen, micro: (every and _cannot_unfreeze(frozen, micro)) or None,
    ),
    Check(
        ("lora.rank", "finetune.model", "finetune.freeze_layers"),
        lambda rank, start, frozen: (rank and _cannot_adapt(start, frozen)) or None,
    ),
    Check(
        ("lora.targets",),
        lambda targets: (
            None if targets and set(targets) <= set(LORA_TARGETS) else f"expected some of {', '.join(LORA_TARGETS)}"
        ),
    ),
    Check(("lora.quantize", "lora.rank", "lora.merge"), _cannot_quantize),
    Check(
        ("hub.repo",),
        lambda repo: None if repo is None or REPO_ID.fullmatch(repo) else f"expected user/name, got {repo!r:.80}",
    ),
    Check(
        ("hub.push", "hub.repo"),
        lambda push, repo: "needs hub.repo: user/name, where to push to" if push and not repo else None,
    ),
    Check(
        ("hub.license",),
        lambda name: (
            None
            if name is None or re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)
            else f"expected the Hub's name of a licence, such as mit or apache-2.0, got {name!r:.80}"
        ),
    ),
)


def accumulation_steps(config: Config, num_processes: int) -> int:
    """Micro-batches that each of `num_processes` data-parallel processes runs in one optimizer step; auto counts as 1.

    Raises ValueError, with the sum and the nearest tokens_per_step that divide, where no whole number results.
    """
    train, block_size = config.train, config.data.block_size
    problem = _uneven_step(train.tokens_per_step, train.micro_batch_size, block_size, num_processes)
    if problem:
        raise ValueError(f"train.tokens_per_step: {problem}")
    micro = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    return train.tokens_per_step // (micro * block_size * num_processes)
