"""Rows of documents: each begins with one, no token is lost, and attention does not leave them."""

import itertools
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.documents import DocumentBlocks, document_starts
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.architecture import architecture_of

VOCAB = 50


def stream_of(lengths, seed=0) -> tuple[TokenStream, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(1, VOCAB, sum(lengths)).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0  # the end of a document
    return TokenStream(np.split(tokens, [len(tokens) // 3])), tokens.astype(np.int64)


def rows_of(lengths, from_end=True, apart=True, block_size=16) -> DocumentBlocks:
    stream, _ = stream_of(lengths)
    sizes = np.array(lengths)
    return DocumentBlocks(stream, sizes, block_size=block_size, from_end=from_end, apart=apart)


LENGTHS = {
    "short": [3, 5, 2, 9, 4, 7, 6, 2, 2],
    "long": [40, 3, 17, 16, 18, 1, 33],
    "one": [50],
    "equal to a row": [17, 16, 16, 16],
    "random": random.Random(4).choices(range(1, 40), k=80),
}


@pytest.mark.parametrize("from_end", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rows_begin_with_a_document_and_hold_every_token_once(lengths, from_end):
    rows, tokens = rows_of(lengths, from_end), stream_of(lengths)[1]
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


def test_packing_is_that_of_the_best_fit():
    rows = rows_of([12, 10, 7, 5, 4, 3], from_end=False)  # 11, 9, 6, 4, 3 and 2 positions
    assert rows.blocks == [[0, 3], [1, 2], [4, 5]]


@pytest.mark.parametrize("stride", [16, 1])
def test_positions_of_a_stream_restart_at_documents(stride):
    lengths = LENGTHS["random"]
    stream, _ = stream_of(lengths)
    starts = document_starts(np.array(lengths), from_end=True)
    blocks = TokenBlocks(stream, 16, stride=stride, partial=True, starts=starts)
    firsts = set(starts.tolist())
    for index in range(0, len(blocks), 1 if stride == 16 else 7):
        batch, expected = blocks.batch(np.array([index])), []
        for offset in range(16):
            restarts = offset == 0 or index * stride + offset in firsts
            expected.append(0 if restarts else expected[-1] + 1)
        assert batch["position_ids"][0].tolist() == expected
        plain = TokenBlocks(stream, 16, stride=stride, partial=True).batch(np.array([index]))
        assert plain.keys() == {"input_ids", "shift_labels"}
        assert all(torch.equal(plain[name], batch[name]) for name in plain)


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
    model, lengths = build(kind), LENGTHS["random"]
    if packing == "documents":
        blocks = rows_of(lengths)
    else:
        starts = document_starts(np.array(lengths), from_end=True)
        blocks = TokenBlocks(stream_of(lengths)[0], 16, starts=starts)
    batch = blocks.batch(np.arange(len(blocks)))
    inputs, positions = batch["input_ids"], batch["position_ids"]
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
