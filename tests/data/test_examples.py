"""Conversations and documents in blocks: none lost or split, pure functions of the index, and
attention does not leave them.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.examples import DocumentBlocks, Examples, document_starts, pack
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.architecture import architecture_of


def examples(lengths, packing="packed", mask=None) -> Examples:
    """Examples in blocks of 16 whose tokens count up over all of them, in small chunks; the second
    half of each is the answer.
    """
    total = sum(lengths)
    ids = np.arange(total, dtype=np.uint16)
    if mask is None:
        mask = np.concatenate([np.arange(n) >= n / 2 for n in lengths]).astype(np.uint8)
    streams = (TokenStream([a[i : i + 7] for i in range(0, total, 7)]) for a in (ids, mask))
    return Examples(*streams, np.array(lengths), block_size=16, packing=packing)


# 17 tokens are 16 positions: a block
LENGTHS = np.random.default_rng(0).integers(2, 18, 200).tolist()


def test_packing_keeps_examples_whole_and_wastes_little():
    lengths = np.random.default_rng(1).integers(1, 65, 5000)
    blocks = pack(lengths, 64)
    assert sorted(number for block in blocks for number in block) == list(range(5000))
    filled = [sum(lengths[block]) for block in blocks]
    assert max(filled) <= 64
    assert len(blocks) <= 1.02 * lengths.sum() / 64 + 1
    assert blocks == pack(lengths, 64)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_each_target_occurs_once(packing):
    data = examples(LENGTHS, packing=packing)
    batch = data.batch(np.arange(len(data)))
    targets = batch["shift_labels"][batch["shift_labels"] != -100]
    ends = np.cumsum(LENGTHS)
    expected_targets = [
        i
        for end, n in zip(ends, LENGTHS, strict=True)
        for i in range(end - n, end)
        if i - (end - n) >= n / 2
    ]
    assert sorted(targets.tolist()) == expected_targets
    # the stream counts up
    assert torch.equal(batch["input_ids"][batch["shift_labels"] != -100], targets - 1)
    assert (data.cut, data.skipped) == (0, 0)
    some = np.arange(0, len(data), 3)
    assert data.num_targets(some) == (data.batch(some)["shift_labels"] != -100).sum().item()


def test_positions_restart_with_each_example():
    data = examples([5, 9, 3, 17])  # 4, 8, 2 and 16 positions
    batch = data.batch(np.arange(len(data)))
    assert [data.blocks[0], data.blocks[1]] == [[3], [1, 0, 2]]
    assert batch["position_ids"][0].tolist() == list(range(16))
    assert batch["position_ids"][1].tolist() == [*range(8), *range(4), *range(2), *range(2)]
    padded = examples([5, 9, 3, 17], packing="padded").batch(np.array([0]))
    assert list(padded) == ["input_ids", "shift_labels"]
    assert padded["input_ids"].tolist() == [[0, 1, 2, 3] + [0] * 12]
    assert padded["shift_labels"].tolist() == [[-100, -100, 3, 4] + [-100] * 12]


def test_long_examples_are_cut_and_dropped_without_answer():
    mask = np.concatenate([[0] * 16 + [1] * 4, [0] * 17 + [1] * 3, [0, 1]]).astype(np.uint8)
    data = examples([20, 20, 2], mask=mask)
    assert (data.cut, data.skipped) == (1, 1)
    assert sorted(number for block in data.blocks for number in block) == [0, 2]
    batch = data.batch(np.arange(len(data)))
    # the 17th token, and the last
    assert batch["shift_labels"][batch["shift_labels"] != -100].tolist() == [16, 41]
    assert len(examples([20], mask=mask[20:40])) == 0


# --- documents
# ------------------------------------------------------------------------------

VOCAB = 50


def stream_of(lengths, seed=0) -> tuple[TokenStream, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(1, VOCAB, sum(lengths)).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0  # the end of a document
    return TokenStream(np.split(tokens, [len(tokens) // 3])), tokens.astype(np.int64)


def rows_of(lengths, from_end=True, apart=True, block_size=16) -> DocumentBlocks:
    stream, _ = stream_of(lengths)
    sizes = np.array(lengths)
    return DocumentBlocks(stream, sizes, block_size=block_size, from_end=from_end, apart=apart)


DOCUMENTS = {
    "short": [3, 5, 2, 9, 4, 7, 6, 2, 2],
    "long": [40, 3, 17, 16, 18, 1, 33],
    "one": [50],
    "equal to a row": [17, 16, 16, 16],
    "random": random.Random(4).choices(range(1, 40), k=80),
}


@pytest.mark.parametrize("from_end", [True, False])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_rows_begin_with_a_document_and_hold_every_token_once(lengths, from_end):
    rows = rows_of(lengths, from_end)
    tokens = stream_of(lengths)[1]
    ends = np.cumsum(lengths)
    firsts = {0} | {int(end) - from_end for end in ends[:-1]}
    # all tokens but the first that a document is read from, by their place in the stream
    unread = (
        {0} if from_end else {int(end - length) for end, length in zip(ends, lengths, strict=True)}
    )
    pairs = []
    for index in range(len(rows)):
        batch = rows.batch(np.array([index]))
        inputs, targets, positions = (
            batch[name][0].tolist() for name in ("input_ids", "shift_labels", "position_ids")
        )
        pieces = [(rows._starts[piece], rows._positions[piece]) for piece in rows.blocks[index]]
        place = 0
        for start, count in pieces:
            document = np.searchsorted(sorted(firsts), start, side="right") - 1
            assert (start - sorted(firsts)[document]) % 16 == 0
            assert positions[place : place + count] == list(range(count))
            assert inputs[place : place + count] == tokens[start : start + count].tolist()
            assert targets[place : place + count] == tokens[start + 1 : start + count + 1].tolist()
            pairs += range(start + 1, start + count + 1)
            place += count
        assert set(targets[place:]) <= {-100}
        assert rows.num_targets(np.array([index])) == place
    assert sorted(pairs) == sorted(set(range(len(tokens))) - unread)
    assert rows.filled == len(pairs)


def build(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPTForCausalLM(GPTConfig(**sizes, **ends, initializer_range=0.3)).eval()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 24, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, initializer_range=0.3)
    return architecture_of(config).model_class(config).eval()


@pytest.mark.parametrize("packing", ["documents", "end to end"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_logits_equal_those_of_the_documents_one_by_one(kind, packing):
    model = build(kind)
    lengths = DOCUMENTS["random"]
    if packing == "documents":
        blocks = rows_of(lengths)
    else:
        starts = document_starts(np.array(lengths), from_end=True)
        blocks = TokenBlocks(stream_of(lengths)[0], 16, starts=starts)
    batch = blocks.batch(np.arange(len(blocks)))
    inputs = batch["input_ids"]
    positions = batch["position_ids"]
    together = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
    compared = 0
    for row in range(len(inputs)):
        begins = [*(positions[row] == 0).nonzero()[:, 0].tolist(), 16]
        for first, last in itertools.pairwise(begins):
            alone = model(input_ids=inputs[row : row + 1, first:last]).logits[0]
            torch.testing.assert_close(together[row, first:last], alone, atol=1e-5, rtol=1e-5)
            compared += first > 0
    assert compared > 20
    # without the restarts they differ
    assert (model(input_ids=inputs).logits - together).abs().max() > 0.1
