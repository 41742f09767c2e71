"""Loss on blocks and on text: equal to plain PyTorch, each token once; standard errors."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tokenizers import processors
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2LMHeadModel

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.tokenizer import build_tokenizer, char_tokenizer
from nanogpt_hf.evaluation import text
from nanogpt_hf.evaluation.base import Subject
from nanogpt_hf.evaluation.corpus import Corpus
from nanogpt_hf.evaluation.loss import evaluate_blocks, evaluate_data, evaluation_indices
from nanogpt_hf.evaluation.text import bootstrap_error, evaluate_text
from nanogpt_hf.methods.terms import next_token_loss
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs.state import MeasuredLoss


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPTForCausalLM(
        GPTConfig(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2, dropout=0.3)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def corpus():
    tokens = np.random.default_rng(0).integers(0, 23, 301).astype(np.uint16)
    return Corpus("tokens", TokenStream([tokens[:77], tokens[77:]]), 1, 602, "none")


def blocks_of(length: int, block_size: int) -> TokenBlocks:
    return TokenBlocks(TokenStream([np.arange(length, dtype=np.uint16)]), block_size, partial=True)


def test_evaluation_indices_are_evenly_spaced():
    blocks = blocks_of(10_001, 10)
    indices = evaluation_indices(blocks, 500)
    assert (indices[0], indices[-1], len(indices)) == (0, 999, 50)
    assert set(np.diff(indices)) <= {20, 21}
    assert np.array_equal(evaluation_indices(blocks, 10**9), evaluation_indices(blocks, "all"))
    assert len(evaluation_indices(blocks, 1)) == 1


def measure_blocks(model, corpus, size):
    blocks = TokenBlocks(corpus.stream, 16, partial=True)
    options = {"micro_batch_size": size, "tokens": "all", "bytes_per_token": 2.0}
    return evaluate_blocks(Accelerator(), model, next_token_loss, blocks, **options)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_evaluate_blocks_is_the_mean_over_tokens_for_any_batch_size(
    model, corpus, micro_batch_size
):
    model.train()
    result = measure_blocks(model, corpus, micro_batch_size)
    assert model.training
    model.eval()
    total = 0.0
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    with torch.no_grad():
        for start in range(0, 300, 16):  # the last block has 12 targets and must count as 12
            window = ids[start : start + 17]
            logits = model(window[None, :-1]).logits[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").double().item()
    assert result.tokens == 300
    assert result.loss == pytest.approx(total / 300, abs=1e-6)


def subject(model, batch_size=4) -> Subject:
    return Subject("model", model, None, Accelerator(), batch_size)


@pytest.mark.parametrize(
    ("block_size", "stride", "batch_size"),
    [(16, 16, 4), (16, 5, 64), pytest.param(16, 1, 7, marks=pytest.mark.slow), (9, 4, 1)],
)
def test_evaluate_text_equals_transformers_token_by_token(
    tmp_path, model, corpus, block_size, stride, batch_size
):
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    nats = []
    first = 0
    for target in range(1, len(ids)):
        while target - first > block_size:  # a later window predicts this token
            first += stride
        with torch.no_grad():
            logits = reference(ids[None, first:target]).logits[0, -1]
        nats.append(F.cross_entropy(logits.double(), ids[target]).item())
    model.train()
    result, _, _ = evaluate_text(subject(model, batch_size), corpus, block_size, stride)
    assert model.training
    assert result.tokens == 300
    assert result.loss == pytest.approx(np.mean(nats), abs=1e-6)
    assert result.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / 602, rel=1e-6)
    if stride == block_size:
        assert result.loss == pytest.approx(measure_blocks(model, corpus, 3).loss, abs=1e-6)


def test_bootstrap_error_equals_the_formula():
    draw = np.random.default_rng(1)
    nats = draw.normal(100, 20, 400)
    counts = np.full(400, 10)
    expected = nats.std(ddof=1) / math.sqrt(400) / 10
    assert bootstrap_error(nats, counts) == pytest.approx(expected, rel=0.1)
    # each value repeated four times holds no more information: blocks of four show that
    assert bootstrap_error(nats.repeat(4), counts.repeat(4), windows_at_once=4) == pytest.approx(
        expected, rel=0.1
    )
    assert bootstrap_error(nats.repeat(4), counts.repeat(4)) < 0.6 * expected


def test_figures_of_too_little_text_have_no_error(model):
    corpus = Corpus("few", TokenStream([np.arange(5, dtype=np.uint16)]), 1, 5, "none")
    *_, result = text._measure(corpus, 16, 16, {}, subject(model))
    figures = result.figures["text"]
    assert figures["loss"] > 0
    assert figures["loss_standard_error"] is None
    assert figures["tokens_predicted"] == 4


TEXTS = ["The böse cat.", "A rat – two", "mats\n", "", "Ünder 5 €", "x", "sat on it", "and saw"] * 3


@pytest.fixture(scope="module", params=["char", "bytes", "bytes after a start token"])
def text_data(request, tmp_path_factory, byte_tokenizer):
    """Documents, a tokenizer that is saved in a folder, and what the tokens' bytes are by id."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    if request.param == "char":
        hf = char_tokenizer(sorted(set().union(*TEXTS))).hf
    else:
        hf = AutoTokenizer.from_pretrained(byte_tokenizer)
    if "start" in request.param:
        hf.add_special_tokens({"bos_token": "<s>"})
        hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", hf.bos_token_id)]
        )
    hf.save_pretrained(folder / "tokenizer")
    special = set(hf.all_special_ids)
    names = hf.convert_ids_to_tokens(range(len(hf)))
    sizes = [len(n.encode()) if request.param == "char" else 1 for n in names]
    sizes = [0 if number in special else size for number, size in enumerate(sizes)]
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=len(hf), n_positions=16, n_embd=16, n_head=2))
    return folder, model, sizes


def bits_per_byte(nats: list[float], labels: list[int], sizes: list[int]) -> float:
    return sum(nats) / math.log(2) / sum(sizes[label] for label in labels)


@pytest.mark.one_row_per("text_data", "stride")
@pytest.mark.parametrize(("block_size", "stride"), [(16, 16), (16, 5)])
def test_bits_per_byte_of_a_text_are_those_of_a_plain_loop(text_data, block_size, stride):
    folder, model, sizes = text_data
    tokenizer = build_tokenizer(str(folder / "tokenizer"), ())
    data = DataSection(source=str(folder / "rows.jsonl"))
    corpus = text.read_corpus(data, None, tokenizer, folder)
    ids = torch.from_numpy(np.concatenate(corpus.stream.chunks).astype(np.int64))
    assert sum(sizes[number] for number in ids) == corpus.bytes == len("".join(TEXTS).encode())
    nats = []
    first = 0
    for target in range(1, len(ids)):
        while target - first > block_size:
            first += stride
        with torch.no_grad():
            logits = model.eval()(ids[None, first:target]).logits[0, -1]
        nats.append(F.cross_entropy(logits, ids[target]).item())
    result, _, _ = evaluate_text(subject(model), corpus, block_size, stride)
    expected = bits_per_byte(nats, ids[1:].tolist(), sizes)
    assert result.bits_per_byte == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tokens", ["all", 32])
@pytest.mark.parametrize(
    "layout", [{}, {"data__packing": "documents"}, {"data__mask": "documents"}]
)
def test_bits_per_byte_of_a_run_are_those_of_a_plain_loop(
    text_data, make_recipe, tmp_path, tokens, layout
):
    folder, model, sizes = text_data
    knobs = {"data__source": str(folder / "rows.jsonl"), "data__validation_fraction": 0.4}
    knobs |= {"data__tokenizer": str(folder / "tokenizer")} | layout
    config = load_config(make_recipe(tmp_path / "tiny.yaml", **knobs))
    prepare(config)
    prepared = load_prepared(config)
    evaluate = functools.partial(
        evaluate_blocks, Accelerator(), model, next_token_loss, micro_batch_size=2
    )
    measured, _ = evaluate_data(evaluate, prepared, tokens)
    nats = []
    labels = []
    for index in evaluation_indices(prepared.validation, tokens):
        batch = prepared.validation.batch(np.array([index]))
        targets = batch.pop("shift_labels")[0]
        with torch.no_grad():
            logits = model.eval()(**batch, use_cache=False).logits[0]
        losses = F.cross_entropy(logits, targets, reduction="none")
        nats += losses[targets >= 0].tolist()
        labels += targets[targets >= 0].tolist()
    assert measured.tokens == len(labels)
    expected = bits_per_byte(nats, labels, sizes)
    assert measured.bits_per_byte == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_of_no_text_are_infinite():
    assert MeasuredLoss(1.0, 1, 0.0).bits_per_byte == math.inf
