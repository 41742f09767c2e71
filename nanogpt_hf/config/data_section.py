"""The knobs of section `data`: the source, its preparation and the blocks."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.knobs import (
    FROM_A_URL,
    FROM_COLUMNS,
    FROM_THE_HUB,
    knob,
    only_with,
    only_without,
)
from nanogpt_hf.config.names import ANY_OFFSET, MADE_TOKENIZERS
from nanogpt_hf.config.settings import FSDP2, Setting, choice, given, rules

# Choices without which nothing reads a knob, where several knobs have the same.
_COLUMN_FORMAT = only_with(
    "data.format", *(name for name, row in FORMATS.items() if row.reads_column)
)
_UNENCODED_FORMAT = only_without(
    "data.format", *(name for name, row in FORMATS.items() if row.has_tokens)
)
_WITH_BPE = only_with("data.tokenizer", "bpe")
_ON_TEXT = (only_without("rl.task"), only_without("align.loss"))


@dataclass(frozen=True)
class DataSection:
    """The text: its source and format, tokenizer, prepared folder and blocks."""

    source: str | list[dict[str, Any]] = knob(  # noqa: RUF009
        "",
        "the text: python-docs, arithmetic, a file, folder, glob, http(s) URL, or a Hub data "
        "set's name; or a list of {source, weight}, which are mixed",
    )
    max_epochs: int | float | None = knob(
        None, "warn before a run that reads a source more often (default: never)", 0, read=_ON_TEXT
    )
    format: Literal[tuple(FORMATS)] = knob(  # pyright: ignore[reportInvalidTypeForm]
        "text", "; ".join(row.meaning for row in FORMATS.values())
    )
    sha256: str | None = knob(None, "expected sha256 of the file at a URL", read=FROM_A_URL)
    config: str | None = knob(None, "configuration of a Hub data set", read=FROM_THE_HUB)
    split: str = knob("train", "split of a Hub data set to train on", read=FROM_THE_HUB)
    validation_split: str | None = knob(
        None,
        "split of a Hub data set to validate on (default: validation_fraction)",
        read=FROM_THE_HUB,
    )
    revision: str | None = knob(None, "commit or tag of a Hub data set", read=FROM_THE_HUB)
    text_column: str = knob(
        "text", "column with the text of a row", read=(*_ON_TEXT, _COLUMN_FORMAT, FROM_COLUMNS)
    )
    streaming: bool = knob(
        False, "read a Hub data set as it arrives, without its files on the disk", read=FROM_THE_HUB
    )
    max_tokens: int | None = knob(
        None,
        "read only the first documents, up to this many tokens: of each split, or of both together "
        "without data.validation_split (default: all)",
        1,
    )
    max_bad_rows: float = knob(
        0.0,
        "rows that cannot be used are left out, up to this number, or below 1 this share of the "
        "rows read (0: refuse the first)",
        0,
    )
    validation_fraction: float = knob(
        0.0005,
        "share held out: the end of a single document, or whole documents",
        0,
        0.5,
        read=only_without("data.validation_split", idle=(0,)),
    )
    # It is no part of train.seed: runs of several seeds are compared on the same validation data.
    validation_seed: int = knob(
        2357,
        "seed of the choice of documents to hold out",
        0,
        2**64 - 1,
        read=only_without("data.validation_split"),
    )
    tokenizer: str = knob(
        "gpt2",
        "char, char_end (with an end of text), gpt2, bpe (trained on the text), or the name or "
        "folder of another",
    )
    vocab_size: int | None = knob(
        None,
        "bpe: number of tokens: 256 bytes, the merges and end-of-text",
        257,
        1_000_000,
        read=_WITH_BPE,
    )
    bpe_pattern: Literal["gpt2", "gpt4"] = knob(
        "gpt2",
        "bpe: how text is split before merging; gpt4: digits in threes, no case in 's",
        read=_WITH_BPE,
    )
    num_threads: int | None = knob(
        None,
        "threads that tokenize text (default: one per core)",
        1,
        1024,
        read=(*_ON_TEXT, _UNENCODED_FORMAT),
    )
    dir: str = knob("", "folder of the prepared data (default: data/<recipe name>)")
    block_size: int = knob(1024, "tokens in a training sequence", 1, 100_000_000)
    order: Literal["shuffled", "shifted", "random"] = knob(
        "shuffled",
        "every block once per epoch, at the same offsets or at new ones in each epoch (shifted); "
        "or windows at random offsets",
    )
    packing: Literal["packed", "padded", "documents"] = knob(
        "packed",
        "text: end to end, or rows that begin with a document (documents), padded; chat: several "
        "conversations per block, apart in attention (packed), or one and padding (padded)",
        read=_ON_TEXT,
    )
    mask: Literal["documents"] | None = knob(
        None, "text: documents do not attend to others, and their positions begin at 0"
    )

    def __post_init__(self) -> None:
        # Here, so that ~ is the home folder for each that reads them, and the recorded recipe says
        # which one it was.
        for name in ("dir", "tokenizer"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))

    @property
    def one_source(self) -> str:
        """The source if it is not a mixture; of a mixture, config/sources.py gives the data
        section of each source.
        """
        assert isinstance(self.source, str)
        return self.source


# What the knobs of this file do not combine with.
RULES = [
    *rules(
        choice("data.tokenizer", *MADE_TOKENIZERS),
        Setting.SEVERAL_SOURCES,
        "it is made from one text",
        "use gpt2 or a tokenizer's folder, such as data/NAME/tokenizer of another prepared text",
    ),
    *rules(
        given("data.streaming", "data.max_tokens"),
        choice("data.tokenizer", *MADE_TOKENIZERS),
        "this tokenizer is made from the whole text",
        "use gpt2 or a tokenizer's folder",
    ),
    *rules(
        given("data.streaming"),
        Setting.SLICE_OF_A_SPLIT,
        "streaming reads whole splits",
        "set data.max_tokens to read the first documents only",
    ),
    *rules(
        choice("data.order", *ANY_OFFSET),
        choice("data.packing", "documents"),
        "it would cut documents",
        "use shuffled",
    ),
    *rules(
        choice("data.packing", "documents") + given("data.mask"),
        given("rl.task", "align.loss"),
        "only rows of text are documents there",
        "leave it out",
    ),
    *rules(
        given("data.streaming", "data.max_tokens"),
        given("rl.task", "align.loss"),
        "questions and pairs are read whole",
        "leave it out",
    ),
    *rules(
        choice("data.order", *ANY_OFFSET),
        given("rl.task", "align.loss"),
        "questions and pairs are drawn once per epoch",
        "use shuffled",
    ),
    *rules(
        given("data.mask"),
        Setting.RING_ATTENTION,
        "its kernels take no masks",
        "set a cp_size that divides the heads, or " + FSDP2,
    ),
]
