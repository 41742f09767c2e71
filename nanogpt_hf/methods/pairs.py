"""Data of preference training: pairs of a chosen and a rejected answer, or answers that are labeled
alone, in memory.

A block is a pair, padded at the end. A labeled answer is a pair, too: the answer, and its prompt
with the answer of the row before, a mismatch from which KTO estimates its KL divergence.
"""

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.data.batches import blocks_read
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.chat_examples import AnswerFinder, finder_of
from nanogpt_hf.data.conversations import labeled_of, pair_of
from nanogpt_hf.data.documents import split_documents
from nanogpt_hf.data.hf_tokenizer import encode_ordinary, end_of_text_id_of, prompt_ids
from nanogpt_hf.data.messages import Conversation, fields_of
from nanogpt_hf.data.prepared import PreparedData, in_memory
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.errors import DataError

logger = logging.getLogger(__name__)
NO_TARGET = -100
# Token ids, and how many of them are the prompt.
Encoded = tuple[list[int], int]
Encode = Callable[[Conversation], Encoded]
EncodedPair = tuple[Encoded, Encoded]
# Token ids with their text and label.
EncodedAnswer = tuple[Encoded, Conversation, bool]


# A split is in memory: preference data are small, and each row is read in every epoch.
class Pairs(Blocks):
    """Preference pairs as blocks: input_ids and shift_labels (n, 2, T), the chosen answer first,
    and `reference` (n, 2), the log-probabilities of the answers under the model before training.
    """

    def __init__(self, pairs: list[tuple[Encoded, Encoded]], block_size: int):
        self.pairs = pairs
        self.block_size = block_size
        # The target of position i is token i + 1, so n tokens have n - 1 positions.
        self.width = max((len(ids) for pair in pairs for ids, _ in pair), default=0) - 1
        self.reference = torch.zeros(len(pairs), 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def num_targets(self, indices: np.ndarray) -> int:
        """Count the pairs at `indices`: each counts the same, however long its answers are."""
        return len(indices)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Make a batch of pairs; shift_labels is -100 except for the tokens of the answers."""
        inputs = torch.zeros(len(indices), 2, self.width, dtype=torch.int64)
        labels = torch.full_like(inputs, NO_TARGET)
        for row, index in enumerate(indices.tolist()):
            for side, (ids, prompt) in enumerate(self.pairs[index]):
                inputs[row, side, : len(ids) - 1] = torch.tensor(ids[:-1])
                # The last token of the prompt predicts the first one of the answer.
                labels[row, side, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
        # Zeros until the log-probabilities before training are computed (methods/reference.py).
        reference = self.reference[torch.from_numpy(indices)]
        return {"input_ids": inputs, "shift_labels": labels, "reference": reference}


class LabeledAnswers(Pairs):
    """Answers as blocks, with the mismatched pair of each; `desirable` (n), and `kl` (n), the
    estimate for all of them.
    """

    def __init__(
        self, pairs: list[tuple[Encoded, Encoded]], block_size: int, desirable: list[bool]
    ):
        super().__init__(pairs, block_size)
        self.desirable = torch.tensor(desirable)
        self.kl = 0.0

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        desirable = self.desirable[torch.from_numpy(indices)]
        kl = torch.full((len(indices),), self.kl)
        return super().batch(indices) | {"desirable": desirable, "kl": kl}


def full_answers(config: Config, count: int) -> LabeledAnswers:
    """Make `count` labeled answers as long as a block, of tokens that mean nothing, with their
    log-probabilities.
    """
    answer = ([0] * (config.data.block_size + 1), 1)
    blocks = LabeledAnswers([(answer, answer)] * count, config.data.block_size, [True] * count)
    # Zeros would mean that they are still to be computed.
    blocks.reference = torch.ones(count, 2)
    return blocks


def _load(
    config: Config,
    encode_row: Callable[[Any, Encode], Any],
    blocks_of: Callable[[list[Any], Encode, int], Pairs],
    noun: str,
) -> PreparedData:
    """Read data.source with `encode_row`, split it, and make blocks of the rows that fit with
    `blocks_of`.

    A row that the tokenizer or its chat template refuses is one that cannot be read. Raises
    UserError if they cannot be read, or none fits into a block.
    """
    data = config.data
    splits = []
    if is_mixture(data):
        raise DataError(f"data.source: {noun} come from one source; a list is not supported")
    tokenizer = build_tokenizer(data.tokenizer, ()).hf
    encode = partial(encode_answer, tokenizer=tokenizer, finder=finder_of(tokenizer))
    with tempfile.TemporaryDirectory() as scratch:
        documents = load_documents(data, Path(scratch), lambda row, _: encode_row(row, encode))
        for name, rows in zip(
            ("train", "validation"), split_documents(documents, data), strict=True
        ):
            blocks = blocks_of(rows, encode, data.block_size)
            splits.append(blocks)
            if not blocks:
                raise DataError(
                    f"data.block_size: {data.block_size} tokens are too few for all {noun} of "
                    f"{name}"
                )
            if name == "train" and isinstance(blocks, LabeledAnswers):
                _check_labels(blocks)
            line = f"  {name:<10} {len(blocks):,} {noun}"
            if left_out := len(rows) - len(blocks):
                line += f"; {left_out:,} are longer than data.block_size, left out"
            logger.info(line)
    train, validation = splits
    # A text has thousands of blocks, and preference data often some hundred pairs.
    if not config.train.steps_from:
        steps = config.train.max_steps
        epochs = blocks_read(config, steps)[0] / len(train)
        logger.info(f"  {steps:,} steps read each of the {noun} {epochs:,.2f} times (epochs)")
    return in_memory(
        train,
        validation,
        tokenizer,
        source=data.source,
        revision=documents.revision,
    )


def _check_labels(answers: LabeledAnswers) -> None:
    """Raises DataError if all answers to train on have the same label."""
    # With one label only, the loss falls by making every answer more probable, or less.
    labels = set(answers.desirable.tolist())
    if len(labels) == 1:
        (label,) = labels
        raise DataError(
            f"data.source: all {len(answers):,} labeled answers of train have the label "
            f"{str(label).lower()}; kto compares good answers with bad ones: add rows with "
            f"{str(not label).lower()}"
        )


def _encoded_pair(row: Any, encode: Encode) -> EncodedPair:
    """Encode a row as a pair. Raises ValueError or DataError if its answers cannot be compared."""
    pair = pair_of(row)
    chosen, rejected = (encode(side) for side in pair)
    # The loss of equal answers is a constant, and its gradient 0.
    if chosen == rejected:
        texts = (f"{side.messages[-1]['content']!r:.40}" for side in pair)
        raise DataError(
            f"the answers {' and '.join(texts)} have the same tokens, which prefers nothing; "
            "leave the row out"
        )
    return chosen, rejected


def _pairs(encoded: list[EncodedPair], _: Encode, block_size: int) -> Pairs:
    """Make blocks of the pairs that fit. A pair that is cut would teach answers without an end."""
    fitting = [pair for pair in encoded if all(len(ids) <= block_size + 1 for ids, _ in pair)]
    return Pairs(fitting, block_size)


def _encoded_answer(row: Any, encode: Encode) -> EncodedAnswer:
    """Encode a row as a labeled answer. Raises ValueError or DataError if it is none."""
    conversation, label = labeled_of(row)
    return encode(conversation), conversation, label


def _labeled_answers(
    encoded: list[EncodedAnswer], encode: Encode, block_size: int
) -> LabeledAnswers:
    """Make blocks of the answers that fit. Mismatched pairs, which are not trained, are cut."""
    kept = [row for row in encoded if len(row[0][0]) <= block_size + 1]
    if len(kept) == 1:
        raise DataError("data.source: one answer alone has no mismatched pair; add rows")
    pairs = []
    for row, (own, conversation, _) in enumerate(kept):
        # Row 0 gets the answer of the last row.
        other = kept[row - 1][1].messages[-1]
        mismatched = conversation._replace(messages=[*conversation.messages[:-1], other])
        ids, prompt = encode(mismatched)
        pairs.append((own, (ids[: block_size + 1], prompt)))
    return LabeledAnswers(pairs, block_size, [label for *_, label in kept])


def encode_answer(
    conversation: Conversation, tokenizer: Any, finder: AnswerFinder | None
) -> Encoded:
    """Encode a conversation whose last answer is trained: its token ids, and where the answer
    begins.

    Without a chat template the answer continues the last question as text, and the token that
    ends a text ends it.
    """
    messages = conversation.messages
    if finder is None:
        if len(messages) > 2 or len(list(fields_of(messages))) > 2 or conversation.tools:
            raise DataError(
                "the model has no chat template, so a pair is one question with two answers; "
                f"the one that starts {messages[0]['content']!r:.40} has more messages or fields"
            )
        prompt = prompt_ids(tokenizer, messages[0]["content"])
        end = end_of_text_id_of(tokenizer)
        answer = encode_ordinary(tokenizer, messages[1]["content"])
        return [*prompt, *answer, *([] if end is None else [end])], len(prompt)
    example = finder.examples([conversation])[-1]
    # The mask is 1 on all tokens of the assistant. The trained answer is its last run of ones.
    counts = np.array([0, *example.assistant_mask])
    begins = np.flatnonzero(np.diff(counts) == 1)
    end = int(np.flatnonzero(counts)[-1])
    return example.input_ids[:end], int(begins[-1])


load_pairs = partial(_load, encode_row=_encoded_pair, blocks_of=_pairs, noun="preference pairs")
load_answers = partial(
    _load, encode_row=_encoded_answer, blocks_of=_labeled_answers, noun="labeled answers"
)
