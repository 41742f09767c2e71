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
  a smaller batch and rate were better here, so the batch is rounded down and the rate is at most
  4e-3. With Muon it is the rate of embeddings, norms and biases, and may be higher.
- Muon's rate is 0.02 at any width. In runs of 80 steps the best rate falls with the width, since
  the initial weights have one standard deviation at any width; in the dial's runs it does not
  (docs/performance.md, "Muon's rate over depth and width").
- learning_rate × √(batch / the batch chosen) for a batch that is stated: AdamW's square-root rule,
  Malladi et al. 2022, arXiv:2205.10287.

Everything here is a pure function of the recipe: it reads no files, so a character vocabulary
counts as 128 rows, and that of a tokenizer other than `char` and `gpt2` as many as GPT-2's.
"""

import math
from collections.abc import Container
from typing import Any

from nanogpt_hf.config.names import GPT2_VOCAB_SIZE, vocab_size_by_name
from nanogpt_hf.config.optim_section import tenth_of
from nanogpt_hf.config.schema import KNOBS, LARGEST, Choice, Config, get_value, replace_knobs
from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.formatting import align

_MICRO_BATCH_TOKENS = 8192
# Up to this many processes can share a step without a smaller micro-batch.
_SHARES = 8
# The share of the steps that warm-up takes.
_WARMUP = 0.05
# Small runs were better with less than the formula gives, where it is the rate of all weights.
LARGEST_RATE = 4e-3
# The best of the rates that were tried for the smallest run with Muon (docs/performance.md).
_LARGEST_RATE_WITH_MUON = 1.6e-2
_MUON_RATE = 0.02


def count_gpt2_parameters(config: Config, vocabulary: int) -> int:
    """Parameters of the recipe's GPT-2, whose head is its embedding; equal to the model's own
    count.
    """
    model = config.model
    width = model.n_embd
    # A block has 4·d² weights in attention and 8·d² in an MLP of width 4·d. Its two LayerNorms have
    # 2·d gains; with biases, they and the linear layers have 11·d more.
    block = 12 * width**2 + 2 * width + 11 * width * model.bias
    return model.n_layer * block + (vocabulary + model.n_positions + 1 + model.bias) * width


class _Dial:
    """The choices that were made so far for a depth."""

    def __init__(self, config: Config, depth: int, stated: Container[str]):
        self.config = config
        self.depth = depth
        self.stated = stated
        self.choices: list[Choice] = []

    def choose(self, key: str, value: Any, reason: str) -> Any:
        """Choose a value for a knob, unless it is stated; return the value that holds.

        Raises ValueError if it is out of bounds.
        """
        limit = KNOBS[key].high or LARGEST
        if key in self.stated:
            reason = f"stated; the dial chooses {_plain(value)}"
            value = get_value(self.config, key)
        elif value > limit:
            raise ValueError(f"{self.depth} gives {key} {_plain(value)}, more than {_plain(limit)}")
        self.choices.append(Choice(key, value, reason))
        return value


def dial_choices(config: Config, depth: int, stated: Container[str]) -> tuple[Choice, ...]:
    """The knobs that follow from the depth, each with its reason; those in `stated` keep the value
    in `config`.

    Raises ValueError if the size is out of bounds, the run fine-tunes, or the architecture is
    not gpt2.
    """
    if config.finetune.model:
        raise ValueError(f"{config.finetune.model} has its size already; leave it out")
    if config.model.architecture != "gpt2":
        architecture = config.model.architecture
        raise ValueError(f"counts the parameters of gpt2, not of {architecture}; state the sizes")
    dial = _Dial(config, depth, stated)
    layers, width = _choose_shape(dial)
    sizes = {"model.n_layer": layers, "model.n_embd": width}
    known = vocab_size_by_name(config.data.tokenizer, config.data.vocab_size)
    vocabulary = known[0] if known else GPT2_VOCAB_SIZE
    parameters = count_gpt2_parameters(replace_knobs(config, sizes), vocabulary)
    ratio = config.train.tokens_per_parameter
    tokens = ratio * parameters
    # The FLOPs of a token: 6 for each of the 12·L·d² weights in the blocks, forward and backward,
    # and 12·L·d·T for the scores and the sums of attention over T positions.
    per_token = 72 * layers * width**2 + 12 * layers * width * config.data.block_size
    per_step = _choose_batch_and_rates(dial, per_token * tokens)
    steps = dial.choose(
        "train.max_steps",
        max(1, round(tokens / per_step)),
        f"{ratio:g} tokens (train.tokens_per_parameter) × {parameters:,} parameters "
        "(arXiv:2203.15556)",
    )
    dial.choose("optim.warmup_steps", round(_WARMUP * steps), f"{_WARMUP:.0%} of train.max_steps")
    return tuple(dial.choices)


def _choose_shape(dial: _Dial) -> tuple[int, int]:
    """Choose layers, width and heads; return layers and width."""
    aspect = dial.config.model.aspect_ratio
    layers = dial.choose("model.n_layer", dial.depth, "model.depth")
    reason = f"model.depth × model.aspect_ratio {aspect}"
    width = dial.choose("model.n_embd", aspect * dial.depth, reason)
    # A stated width may not divide into heads of `aspect` channels: take the nearest number that
    # divides it.
    heads = min(divisors(width), key=lambda heads: abs(heads - width / aspect))
    dial.choose("model.n_head", heads, f"heads of {width // heads} channels")
    return layers, width


def _choose_batch_and_rates(dial: _Dial, compute: float) -> int:
    """Choose batch, micro-batch and learning rates for a run of `compute` FLOPs; return the tokens
    per step.
    """
    optim = dial.config.optim
    block_size = dial.config.data.block_size
    batch = 0.2920 * compute**0.3271
    # A power of 2 of whole blocks, so that 1, 2, 4, ... processes can share a step.
    sequences = 2 ** max(0, math.floor(math.log2(batch / block_size)))
    chosen = sequences * block_size
    per_step = dial.choose(
        "train.tokens_per_step",
        chosen,
        f"0.292 × C^0.3271 = {batch:,.0f} for C = {compute:.2e} FLOPs (arXiv:2401.02954), "
        "rounded down to a power of 2 of blocks",
    )
    sequences = max(1, per_step // block_size)
    limit = min(sequences / _SHARES, _MICRO_BATCH_TOKENS / block_size)
    dial.choose(
        "train.micro_batch_size",
        max((size for size in divisors(sequences) if size <= limit), default=1),
        f"at most {_MICRO_BATCH_TOKENS:,} tokens and 1/{_SHARES} of a step, which {_SHARES} "
        "processes can share",
    )
    # The formula's rate fits the formula's batch. For a batch that is stated, the gradient's noise
    # changes by its square root, and so may the rate.
    stated_batch = f" × √(batch / {chosen:,})" if per_step != chosen else ""
    # Else AdamW's rate applies to the matrices, too.
    has_own_rate = optim.name == "muon" and optim.muon_scale == "original"
    largest = _LARGEST_RATE_WITH_MUON if has_own_rate else LARGEST_RATE
    rate = dial.choose(
        "optim.learning_rate",
        _rounded(min(largest, 0.3118 * compute**-0.1250) * math.sqrt(per_step / chosen)),
        f"0.3118 × C^-0.125 (arXiv:2401.02954), at most {largest}{stated_batch}",
    )
    if has_own_rate:
        reason = "of any width and batch (docs/performance.md, github.com/KellerJordan/Muon)"
        dial.choose("optim.muon_learning_rate", _MUON_RATE, reason)
    elif optim.name == "muon":
        reason = "AdamW's, since optim.muon_scale is match_rms_adamw"
        dial.choose("optim.muon_learning_rate", rate, reason)
    dial.choose("optim.min_learning_rate", tenth_of(rate), "a tenth of optim.learning_rate")
    return per_step


def _rounded(rate: float) -> float:
    """Three digits, as a person would write it in a recipe."""
    return float(f"{rate:.3g}")


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def dial_lines(config: Config) -> list[str]:
    """The choices of the size dial as a table of knob, value and reason; no lines if the recipe
    states its sizes.
    """
    if not config.derived:
        return []
    rows = [(f"  {choice.key}", _plain(choice.value), choice.reason) for choice in config.derived]
    return ["size dial:", align(rows, right=[1]), ""]
