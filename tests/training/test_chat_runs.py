"""Training on conversations: the loss equals that of single examples; runs end with a model for
chat.
"""

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from assertions import column, copy_at, numbers, same_weights
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.model import packed_attention
from nanogpt_hf.model.build import build_config, build_model

pytestmark = pytest.mark.long


@pytest.fixture
def knobs(chat_file, byte_tokenizer):
    return {
        "data__source": str(chat_file),
        "data__format": "chat",
        "data__tokenizer": str(byte_tokenizer),
        "model__n_positions": 128,
        "data__block_size": 128,
        "eval__tokens": "all",
        "train__tokens_per_step": 512,
        "train__micro_batch_size": 2,
    }


def example_losses(model, config, split: str) -> list[tuple[float, int]]:
    """The summed loss over the assistant tokens of each example, and their number, computed with
    transformers.
    """
    rows = datasets.load_from_disk(f"{config.data.dir}/{split}")
    losses = []
    for ids, mask in zip(rows["input_ids"], rows["assistant_mask"], strict=True):
        ids = torch.tensor(ids[: config.data.block_size + 1])
        mask = torch.tensor(mask)
        targets = ids[1:].masked_fill(mask[1 : len(ids)] == 0, -100)
        if (targets != -100).any():
            logits = model(input_ids=ids[None, :-1]).logits[0]
            losses.append(
                (
                    F.cross_entropy(logits, targets, reduction="sum").item(),
                    (targets >= 0).sum().item(),
                )
            )
    return losses


def block_loss(model, batch: dict[str, torch.Tensor]) -> float:
    """The summed loss, two blocks at a time: one float32 sum over all would lose digits."""
    parts = zip(*(tensor.split(2) for tensor in batch.values()), strict=True)
    return sum(
        model(**dict(zip(batch, part, strict=True)), num_items_in_batch=1).loss.item()
        for part in parts
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_block_loss_equals_loss_of_single_examples(write_recipe, knobs, packing, attention):
    sizes = {"model__n_positions": 256, "data__block_size": 256, "train__tokens_per_step": 512}
    config = load_config(write_recipe(**knobs | sizes, data__packing=packing))
    prepare(config)
    data = load_prepared(config)
    model = build_model(build_config(config.model, data.manifest.vocab_size), 0).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that attention matters
    model.set_attn_implementation(attention)
    examples = data.train
    longest = max(len(block) for block in examples.blocks)
    assert longest > 2 if packing == "packed" else longest == 1
    batch = examples.batch(np.arange(len(examples)))
    with torch.no_grad():
        total = block_loss(model, batch)
        losses = example_losses(model, config, "train")
    count = sum(tokens for _, tokens in losses)
    assert int((batch["shift_labels"] != -100).sum()) == count
    assert total / count == pytest.approx(sum(loss for loss, _ in losses) / count, abs=1e-6, rel=0)
    if packing == "packed":  # without restarting positions the examples attend to each other
        del batch["position_ids"]
        with torch.no_grad():
            assert abs(block_loss(model, batch) - total) / count > 1e-3


def test_gradient_is_per_assistant_token_over_uneven_micro_batches(start):
    # two micro-batches with different numbers of assistant tokens against a single one; packed ones
    # are in distributed/test_equalities.py
    halves, whole = (
        start(str(size), train__max_steps=2, train__micro_batch_size=size, data__packing="padded")
        for size in (2, 4)
    )
    for name, tolerance in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
        assert column(halves, name) == pytest.approx(column(whole, name), abs=tolerance)


def test_conversations_one_after_another_equal_the_mask_and_resume(
    start, train, knobs, tmp_path, monkeypatch
):
    knobs = knobs | {"train__max_steps": 4, "checkpoint__every": 2, "eval__every": 2}
    masked = start("masked", **knobs)
    monkeypatch.setattr(packed_attention, "MIN_HEAD", 1)
    monkeypatch.setattr(packed_attention, "MIN_POSITIONS", 2)
    run = start("run", **knobs)
    # They differ by rounding, since they were computed in another way.
    assert not same_weights(run, masked)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(run, name) == pytest.approx(column(masked, name), rel=1e-4)
    resumed = copy_at(run, 2, tmp_path / "resumed")
    train(resumed.path, resume=True, **knobs)
    assert same_weights(resumed, run)
    assert numbers(resumed) == numbers(run)


def test_validation_loss_is_that_of_assistant_tokens(start):
    run = start(train__max_steps=30, eval__every=15)
    logged = column(run, "val/loss")
    assert logged[30] < logged[0] - 0.5
    config = load_config(run.recipe)
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    with torch.no_grad():
        losses = example_losses(model, config, "validation")
    count = sum(tokens for _, tokens in losses)
    assert logged[30] == pytest.approx(sum(loss for loss, _ in losses) / count, abs=1e-5)
    manifest = load_prepared(config).manifest
    per_token = manifest.validation.bytes / manifest.validation.assistant_tokens
    assert column(run, "val/bits_per_byte")[30] == pytest.approx(
        logged[30] / 0.6931471805599453 / per_token
    )
    assert AutoTokenizer.from_pretrained(run.final).chat_template
