"""A loss of rows that is computed by slices equals the loss of all rows at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nanogpt_hf.config.schema import Config, DistillSection, RlSection
from nanogpt_hf.methods import slices
from nanogpt_hf.methods.distillation import freeze_teacher
from nanogpt_hf.methods.on_policy import taught_policy_objective
from nanogpt_hf.methods.policy_loss import (
    answer_weights,
    completion_log_probs,
    policy_objective,
)
from nanogpt_hf.methods.slices import rows_of_a_slice, sum_of_slices
from nanogpt_hf.methods.terms import text_objective
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk

VOCAB = 50
ROWS = 3
LENGTH = 16
LABELED = 10
# Logits of a chunk: all rows at once, and about seven rows.
WHOLE = 2**26
CHUNKS = 7 * VOCAB
OF_ANSWERS = RlSection(task="arithmetic", clip=0.2, updates=2, kl=0.1, loss="gspo")


def build(seed: int, width: int) -> Any:
    torch.manual_seed(seed)
    sizes: Any = {"vocab_size": VOCAB, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    config = GPTConfig(**sizes, n_layer=1, n_head=1, n_embd=width, dropout=0.0)
    return GPTForCausalLM(config)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return build(0, 16), build(1, 24)


def text_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1))
    labels = ids[:, 1:].clone()
    labels[0, :5] = loss_gpt.IGNORED
    return {"input_ids": ids[:, :-1], "shift_labels": labels}


def answer_batch() -> dict[str, torch.Tensor]:
    batch = text_batch()
    labels = batch["shift_labels"][:, -LABELED:].clone()
    # the second answer is short: some slices have no target
    labels[1, 2:] = loss_gpt.IGNORED
    sampled = torch.tensor([1.0, 1.0, 0.0])
    return batch | {"shift_labels": labels, "sampled": sampled, "advantages": sampled - 0.3}


def batch_of_whole_answers() -> dict[str, torch.Tensor]:
    batch = answer_batch()
    lengths = (batch["shift_labels"] != loss_gpt.IGNORED).sum(1)
    # The ratios of a policy that has not sampled are not 1.
    old = torch.full(batch["shift_labels"].shape, -4.0)
    batch |= {"old_log_probs": old, "reference_log_probs": old - 0.1}
    return batch | answer_weights(OF_ANSWERS, lengths)


def text_teacher(**knobs: Any):
    config = Config(distill=DistillSection(teacher="stated", temperature=2.0, **knobs))
    return lambda teacher: text_objective(config, taught(teacher, config)), text_batch


def answer_teacher(**knobs: Any):
    config = Config(
        distill=DistillSection(teacher="stated", **knobs), rl=RlSection(task="arithmetic")
    )
    return lambda teacher: taught_policy_objective(config, taught(teacher, config)), answer_batch


def answer_teacher_and_ratios():
    config = Config(distill=DistillSection(teacher="stated", weight=0.5), rl=OF_ANSWERS)
    objective = lambda teacher: taught_policy_objective(config, taught(teacher, config))  # noqa: E731
    return objective, batch_of_whole_answers


def taught(teacher: Any, config: Config) -> Any:
    freeze_teacher(teacher, config, "no")
    return SimpleNamespace(teacher=teacher)


LOSSES = {
    "a teacher of text": text_teacher(),
    "its reverse divergence": text_teacher(beta=1.0, weight=1.0),
    "its mixture": text_teacher(beta=0.5),
    "a teacher of answers": answer_teacher(),
    "a teacher of answers, and rewards": answer_teacher(weight=0.5, beta=0.5),
    "rewards": (lambda _: policy_objective(RlSection(clip=0.2)), answer_batch),
    "rewards and ratios of answers": (
        lambda _: policy_objective(OF_ANSWERS),
        batch_of_whole_answers,
    ),
    "a teacher and ratios of answers": answer_teacher_and_ratios(),
}


def computed(monkeypatch, models, loss: str, chunk: int, parts: int, scale: float, precision: str):
    """The loss, its metrics and the gradients of the weights, with this many slices per chunk."""
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", chunk)
    monkeypatch.setattr(slices, "SLICES_PER_CHUNK", parts)
    model, teacher = models
    model.zero_grad()
    objective, batch = LOSSES[loss]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        value, metrics = objective(teacher)(model, batch())
    (value * scale).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return value.detach(), metrics, gradients


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("chunk", "parts"), [(WHOLE, WHOLE // (4 * VOCAB)), (CHUNKS, 7)], ids=["whole", "chunks"]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_slices_equal_all_rows_at_once(monkeypatch, models, loss, chunk, parts, precision):
    """The gradients of each row are the same bits, but for a teacher's logits, which are a product
    of fewer rows. Sums of losses are rounded.
    """
    # a power of two, which changes no digits
    before, after = (
        computed(monkeypatch, models, loss, chunk, each, 0.25, precision) for each in (1, parts)
    )
    assert rows_of_a_slice(ROWS * LABELED, VOCAB, "cpu") < 7
    # Another CPU multiplies fewer rows in another order: a bf16 logit of the teacher may differ.
    close = 1e-4 if precision == "bf16" and loss != "rewards" else 3e-6
    torch.testing.assert_close(before[:2], after[:2], rtol=close, atol=close)
    rounding = {"fp32": 1e-5, "bf16": 1e-2}[precision] if loss != "rewards" else 0.0
    # of the largest gradient, since that of a key bias is rounding only
    bound = rounding * max(gradient.abs().max().item() for gradient in before[2].values())
    for name, gradient in before[2].items():
        torch.testing.assert_close(after[2][name], gradient, rtol=rounding, atol=bound)


class OtherHead(nn.Module):
    """A head that replaces ours, as an adapter's does: it computes logits and no loss."""

    def __init__(self, head: Any):
        super().__init__()
        self.weight = head.weight
        self.rows = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows += len(hidden)
        return hidden @ self.weight.T


@pytest.mark.parametrize("loss", LOSSES)
def test_slices_of_a_head_that_replaces_ours(monkeypatch, models, loss):
    """Loss, metrics and gradients are the same, and each logit is computed twice; with ratios of
    answers once more.
    """
    student, teacher = models
    model = build(0, 16)
    model.set_output_embeddings(OtherHead(model.get_output_embeddings()))
    before = computed(monkeypatch, (student, teacher), loss, WHOLE, 1, 0.25, "fp32")
    after = computed(monkeypatch, (model, teacher), loss, CHUNKS, 7, 0.25, "fp32")
    batch = LOSSES[loss][1]
    rows = ROWS * (LENGTH if batch is text_batch else LABELED)
    assert rows_of_a_chunk(rows, VOCAB) < rows
    times = 3 if batch is batch_of_whole_answers else 2
    assert model.get_output_embeddings().rows == times * rows
    torch.testing.assert_close(before[:2], after[:2], rtol=3e-6, atol=3e-6)
    bound = 1e-5 * max(gradient.abs().max().item() for gradient in before[2].values())
    for name, gradient in before[2].items():
        torch.testing.assert_close(after[2][name], gradient, rtol=1e-5, atol=bound)


def test_a_divisor_scales_the_gradient_in_float32(monkeypatch):
    """In bf16 a third is too large by 0.1%, in every element."""
    monkeypatch.setattr(slices, "SLICES_PER_CHUNK", loss_gpt.LOGITS_PER_CHUNK // (4 * VOCAB))
    torch.manual_seed(3)
    logits = torch.randn(30, VOCAB).bfloat16().requires_grad_()

    def loss_of(rows: slice, part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert len(part) == len(targets) < 30
        return part.float().square().sum() / 2

    loss = sum_of_slices(loss_of, slice(None), logits, torch.zeros(30))
    (loss / 3).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, (logits.detach().float() * (1 / 3)).bfloat16())


def test_slices_without_a_gradient(monkeypatch, models):
    model, _ = models
    found = []
    for chunk in (WHOLE, CHUNKS):
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", chunk)
        found.append(completion_log_probs(model, answer_batch(), 1.0))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
