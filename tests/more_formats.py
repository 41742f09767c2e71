"""A data format as a row and a file of the tests' own, to show that a new one changes no file of
the package: prompts with completions, of which the completion alone is learned. It has no chat
template.
"""

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from unittest import mock

import numpy as np

from nanogpt_hf.config import compatibility
from nanogpt_hf.config.formats import FORMATS, FormatRow, rules_of
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.data.examples import masked_blocks
from nanogpt_hf.data.formats import Format
from nanogpt_hf.data.rows import ROW_ENDINGS
from nanogpt_hf.data.shards import Row, token_dtype

NAME = "test_completion"
ROW = FormatRow(
    meaning="prompts, whose completions alone are learned",
    code="test_completion",
    noun="exercise",
    learned="completions",
    apart=("packed",),
)


def document(row, data):
    if not isinstance(row, dict) or not row.get("prompt") or not row.get("completion"):
        raise ValueError(f"expected a row with prompt and completion, got {row!r:.60}")
    return row["prompt"], row["completion"]


def encoder(tokenizer, end_of_text_id):
    kind = token_dtype(tokenizer.vocab_size)

    def encode(documents, first):
        rows = []
        for number, texts in enumerate(documents, first):
            prompt, completion = tokenizer.encode_batch(list(texts))
            ids = np.concatenate((prompt, completion, [end_of_text_id])).astype(kind)
            mask = np.ones(len(ids), dtype=np.uint8)
            mask[: len(prompt)] = 0
            rows.append(Row(number, ids, len(texts[1].encode()), mask))
        return rows

    return encode


FORMAT = Format(
    endings=ROW_ENDINGS,
    document=document,
    texts=lambda document: document,
    encoder=encoder,
    blocks=masked_blocks,
)


@contextmanager
def added_row(row: FormatRow = ROW) -> Iterator[None]:
    """Context in which the format is one of the package, as if its row were in the table."""
    module = types.ModuleType(f"nanogpt_hf.data.{row.code}")
    module.FORMAT = FORMAT
    rules = rules_of(NAME, row)
    knob = KNOBS["data.format"]
    with mock.patch.dict(sys.modules, {module.__name__: module}), mock.patch.dict(KNOBS):
        FORMATS[NAME] = row
        KNOBS[knob.key] = dataclasses.replace(knob, kind=Literal[(*FORMATS,)])
        compatibility.RULES.extend(rules)
        yield
        del FORMATS[NAME], compatibility.RULES[-len(rules) :]
