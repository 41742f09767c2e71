"""train.epochs: the number of steps that read the training data that many times, counted from its
size.
"""

import logging
from fractions import Fraction
from math import ceil

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import with_known_steps
from nanogpt_hf.data.prepared import PreparedData, fitting_manifest, load_prepared
from nanogpt_hf.data.summary import repetition_warnings
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.methods.table import method_of

logger = logging.getLogger(__name__)


def steps_of(
    epochs: float, sequences: float, sequences_per_step: int, largest_divisor: int = 1
) -> int:
    """The fewest steps that read `sequences` sequences `epochs` times: a last step that is not full
    reads on into the next epoch.

    `sequences` may be a fraction whose divisor is at most `largest_divisor`.
    """
    # In fractions: as floating-point numbers 0.1 · 30 sequences are more than 3.
    whole = Fraction(sequences).limit_denominator(largest_divisor)
    return ceil(Fraction(repr(epochs)) * whole / sequences_per_step)


def with_steps_of_epochs(config: Config, data: PreparedData) -> Config:
    """The recipe with the number of steps of its train.epochs as train.max_steps, and without
    train.epochs; a recipe without train.epochs as it is.

    An epoch is all blocks of `data.train` once: blocks of a text, of whole documents or
    conversations, or pairs of answers. Raises UserError if the warm-up is longer than the run.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config
    known = count_steps(config, data.train.samples_per_epoch)
    steps = known.train.max_steps
    logger.info(
        f"train.epochs {epochs:g}: {plural(steps, 'step')}: "
        f"{_sizes(config, data.train.samples_per_epoch)}; the run records train.max_steps {steps}",
        # A dry run may be refused.
        extra={"is_notice": True},
    )
    for line in repetition_warnings(known, data):
        logger.warning(line)
    return known


def count_steps(config: Config, sequences: float) -> Config:
    """The recipe with the number of steps that read an epoch of `sequences` sequences
    train.epochs times. Raises UserError if the warm-up is longer.

    Blocks that begin at any offset overlap: a number that may be no integer has all tokens once.
    """
    epochs = config.train.epochs
    assert epochs is not None
    steps = steps_of(epochs, sequences, _sequences_per_step(config), config.data.block_size)
    warmup_steps = config.optim.warmup_in(steps)
    longest = config.optim.longest_warmup(steps)
    if longest < warmup_steps:
        before = "before the decay " if longest < steps else ""
        raise UserError(
            f"optim.warmup_steps: {warmup_steps:,} is more than the {plural(longest, 'step')} "
            f"{before}of train.epochs {epochs:g}: {_sizes(config, sequences)}; lower it: below 1 "
            "it is a share of the steps, such as 0.05"
        )
    return with_known_steps(config, steps)


def _sequences_per_step(config: Config) -> int:
    return config.train.tokens_per_step // config.data.block_size


def _sizes(config: Config, sequences: float) -> str:
    return (
        f"an epoch has {sequences:,.10g} sequences, a step {_sequences_per_step(config):,} of "
        "train.tokens_per_step"
    )


def with_steps_of_known_data(config: Config) -> Config:
    """`with_steps_of_epochs` for a run that does not start: the recipe as it is if its data is not
    known.
    """
    if config.train.epochs is None:
        return config
    data = known_data(config)
    return config if data is None else with_steps_of_epochs(config, data)


def known_data(config: Config) -> PreparedData | None:
    """The data that a recipe trains on; None if it is not prepared yet, or with other knobs."""
    method = method_of(config)
    if not method.uses_prepared_data:
        return method.load(config)
    # Not by its method, which may load a teacher, too.
    return None if fitting_manifest(config.data) is None else load_prepared(config)
