"""Size dial: width, heads, learning rate, batch and number of steps of a compute-optimal model from
its depth.

The shape is GPT-2's: `aspect_ratio` channels per layer in heads of `aspect_ratio` channels, so
depth 12 is GPT-2 small. The idea of one dial, and the correction of the learning rate for a batch
that is stated, are those of nanochat's `--depth` (https://github.com/karpathy/nanochat). The
formulas:

- tokens = tokens_per_parameter × parameters; 20 is compute-optimal: Hoffmann et al. 2022,
  arXiv:2203.15556, table 3. All parameters count, each once: blocks, embeddings, norms.
- C = (72·L·d² + 12·L·d·T) × tokens: FLOPs of the run, without the embedding and the head, and from
  it tokens_per_step = 0.2920·C^0.3271 and learning_rate = 0.3118·C^-0.1250: DeepSeek LLM,
  arXiv:2401.02954, section 3.1, equation 1, fitted there for C from 1e17 to 2e19. For smaller runs
  a smaller batch and rate were better here (docs/log.md), so the batch is rounded down and the rate
  is at most 4e-3.
- learning_rate × √(batch / the batch chosen) for a batch that is stated: AdamW's square-root rule,
  Malladi et al. 2022, arXiv:2205.10287.

Everything here is a pure function of the recipe: it reads no files, so a character vocabulary
counts as 128 rows, and that of a tokenizer other than `char` and `gpt2` as many as GPT-2's.
"""

import math
from collections.abc import Container
from typing import Any

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.names import GPT2_VOCAB_SIZE, vocab_size_by_name
from nanogpt_hf.config.schema import KNOBS, LARGEST, Choice, Config, get_value, replace_knobs
from nanogpt_hf.formatting import align

_MICRO_BATCH_TOKENS = 8192
_SHARES = 8  # processes among which a step can be divided without a smaller micro-batch
_WARMUP = 0.05  # share of the steps
_LARGEST_RATE = 4e-3
_MUON_RATE = 0.02


def count_gpt2_parameters(config: Config, vocabulary: int) -> int:
    """Parameters of the recipe's GPT-2, whose head is its embedding; equal to the model's own
    count.
    """
    model, width = config.model, config.model.n_embd
    block = 12 * width**2 + 2 * width + 11 * width * model.bias
    return model.n_layer * block + (vocabulary + model.n_positions + 1 + model.bias) * width


def dial_choices(config: Config, depth: int, stated: Container[str]) -> tuple[Choice, ...]:
    """The knobs that follow from the depth, each with its reason; those in `stated` keep the value
    in `config`.

    Raises ValueError if the size is out of bounds, the run fine-tunes, or the architecture is
    not gpt2.
    """
    aspect = config.model.aspect_ratio
    ratio, block_size = config.train.tokens_per_parameter, config.data.block_size
    vocabulary, _ = vocab_size_by_name(config.data.tokenizer, config.data.vocab_size) or (
        GPT2_VOCAB_SIZE,
        "",
    )
    if config.finetune.model:
        raise ValueError(f"{config.finetune.model} has its size already; leave it out")
    if config.model.architecture != "gpt2":
        architecture = config.model.architecture
        raise ValueError(f"counts the parameters of gpt2, not of {architecture}; state the sizes")
    choices: list[Choice] = []

    def choose(key: str, value: Any, reason: str) -> Any:
        if key in stated:
            value, reason = get_value(config, key), f"stated; the dial chooses {_plain(value)}"
        elif value > (limit := KNOBS[key].high or LARGEST):
            raise ValueError(f"{depth} gives {key} {_plain(value)}, more than {_plain(limit)}")
        choices.append(Choice(key, value, reason))
        return value

    layers = choose("model.n_layer", depth, "model.depth")
    width = choose("model.n_embd", aspect * depth, f"model.depth × model.aspect_ratio {aspect}")
    heads = min(divisors(width), key=lambda heads: abs(heads - width / aspect))
    choose("model.n_head", heads, f"heads of {width // heads} channels")
    parameters = count_gpt2_parameters(
        replace_knobs(config, {"model.n_layer": layers, "model.n_embd": width}), vocabulary
    )
    tokens = ratio * parameters
    compute = (72 * layers * width**2 + 12 * layers * width * block_size) * tokens
    batch = 0.2920 * compute**0.3271
    sequences = 2 ** max(0, math.floor(math.log2(batch / block_size)))
    chosen = sequences * block_size
    per_step = choose(
        "train.tokens_per_step",
        chosen,
        f"0.292 × C^0.3271 = {batch:,.0f} for C = {compute:.2e} FLOPs (arXiv:2401.02954), "
        "rounded down to a power of 2 of blocks",
    )
    sequences = max(1, per_step // block_size)
    limit = min(sequences / _SHARES, _MICRO_BATCH_TOKENS / block_size)
    choose(
        "train.micro_batch_size",
        max((size for size in divisors(sequences) if size <= limit), default=1),
        f"at most {_MICRO_BATCH_TOKENS:,} tokens and 1/{_SHARES} of a step, which {_SHARES} "
        "processes can share",
    )
    stated_batch = f" × √(batch / {chosen:,})" if per_step != chosen else ""
    rate = choose(
        "optim.learning_rate",
        _rounded(min(_LARGEST_RATE, 0.3118 * compute**-0.1250) * math.sqrt(per_step / chosen)),
        f"0.3118 × C^-0.125 (arXiv:2401.02954), at most {_LARGEST_RATE}{stated_batch}",
    )
    if config.optim.name == "muon":
        value, reason = rate, "AdamW's, since optim.muon_scale is match_rms_adamw"
        if config.optim.muon_scale == "original":
            value, reason = _MUON_RATE, "of any width and batch (github.com/KellerJordan/Muon)"
        choose("optim.muon_learning_rate", value, reason)
    choose("optim.min_learning_rate", _rounded(rate / 10), "a tenth of optim.learning_rate")
    steps = choose(
        "train.max_steps",
        max(1, round(tokens / per_step)),
        f"{ratio:g} tokens (train.tokens_per_parameter) × {parameters:,} parameters "
        "(arXiv:2203.15556)",
    )
    choose("optim.warmup_steps", round(_WARMUP * steps), f"{_WARMUP:.0%} of train.max_steps")
    return tuple(choices)


def _rounded(rate: float) -> float:
    """Three digits, as a person would write it in a recipe."""
    return float(f"{rate:.3g}")


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def dial_lines(config: Config) -> list[str]:
    """The choices of the size dial as a table of knob, value and reason; no lines if the recipe
    states its sizes.
    """
    if not config.dial:
        return []
    rows = [(f"  {choice.key}", _plain(choice.value), choice.reason) for choice in config.dial]
    return ["size dial:", align(rows, right=[1]), ""]
