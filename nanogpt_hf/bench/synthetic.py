"""A small recipe, and random tokens in place of prepared data, for `bench` and `doctor`."""

import contextlib
from dataclasses import dataclass

import numpy as np

from nanogpt_hf.config.names import GPT2_VOCAB_SIZE
from nanogpt_hf.config.schema import Config, DataSection, ModelSection, TrainSection
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.data.tokenizer import known_vocab_size
from nanogpt_hf.errors import DataError


@dataclass(frozen=True)
class SyntheticData:
    """Stands in for PreparedData when a run is measured."""

    train: TokenBlocks
    vocab_size: int
    end_of_text_id: None = None
    end_of_turn_id: None = None


def small_config(name: str, world_size: int) -> Config:
    """The recipe if none is given: 0.8 M parameters, one micro-batch per process and step."""
    return Config(
        name=name,
        model=ModelSection(n_layer=4, n_head=4, n_embd=128, n_positions=128),
        data=DataSection(tokenizer="char", block_size=128, dir="data"),
        train=TrainSection(micro_batch_size=8, tokens_per_step=8 * 128 * world_size),
    )


def vocab_size_of(config: Config) -> int:
    """Tokens of the prepared data, or of the recipe's tokenizer; as many as GPT-2's if neither
    can be read.
    """
    manifest = None
    with contextlib.suppress(DataError):  # reported when the data is opened
        manifest = find_manifest(config.data)
    with contextlib.suppress(DataError):
        return known_vocab_size(config.data, manifest)[0]
    return GPT2_VOCAB_SIZE


def synthetic_data(config: Config, vocab_size: int | None = None) -> SyntheticData:
    """Enough random tokens for a few steps of `config`."""
    vocab_size = vocab_size or vocab_size_of(config)
    stream = synthetic_tokens(
        vocab_size, 4 * max(config.train.tokens_per_step, config.data.block_size) + 1
    )
    stride = 1 if config.data.order == "random" else None
    return SyntheticData(TokenBlocks(stream, config.data.block_size, stride=stride), vocab_size)


def synthetic_tokens(vocab_size: int, count: int) -> TokenStream:
    """Random tokens, the same on every process."""
    return TokenStream(
        [(np.random.Philox(key=0).random_raw(count) % np.uint64(vocab_size)).astype(np.uint32)]
    )
