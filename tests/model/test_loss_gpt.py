"""The loss of a large vocabulary against the plain one: value, gradients, matrix products, and when it gives way."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.loss_gpt import Head, loss_and_gradient, rows_of_a_chunk, summed_loss

ROWS, WIDTH, VOCAB, PADDED = 40, 16, 61, 64
CHUNKS = 5


@pytest.fixture(autouse=True)
def chunks_of_eight_rows(monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 8 * VOCAB)


def build(hidden_trains=True, head_trains=True) -> tuple[Head, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = Head(WIDTH, PADDED, bias=False).requires_grad_(head_trains)
    hidden = torch.randn(ROWS, WIDTH).requires_grad_(hidden_trains)
    targets = torch.randint(VOCAB, (ROWS,))
    targets[5:9] = -100
    return head, hidden, targets


def plain(head, hidden, targets, vocab_size=VOCAB):
    return F.cross_entropy(head(hidden)[:, :vocab_size].float(), targets, reduction="sum")


def gradients(loss_of, head, hidden, targets) -> tuple[torch.Tensor, ...]:
    """The loss and what it gives a third of, as a mean over tokens would, to whatever trains."""
    head.weight.grad = hidden.grad = None
    loss = loss_of(head, hidden, targets, VOCAB)
    (loss / 3).backward()
    return tuple(x for x in (loss.detach(), hidden.grad, head.weight.grad) if x is not None)


@pytest.mark.parametrize(("hidden_trains", "head_trains"), [(True, True), (True, False), (False, True)])
def test_chunks_give_the_plain_loss_and_gradients_to_what_trains(hidden_trains, head_trains):
    case = build(hidden_trains=hidden_trains, head_trains=head_trains)
    ours = gradients(summed_loss, *case)
    assert len(ours) == 1 + hidden_trains + head_trains
    for got, expected in zip(ours, gradients(plain, *case), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_without_gradients_chunks_add_up_to_the_same_loss():
    head, hidden, targets = build()
    with torch.no_grad():
        torch.testing.assert_close(summed_loss(head, hidden, targets, VOCAB), plain(head, hidden, targets))


def test_in_bf16_the_head_s_gradient_is_added_up_in_float32():
    head, hidden, targets = build()
    _, _, exact = gradients(plain, head, hidden, targets)
    in_bf16 = [torch.zeros_like(exact, dtype=torch.bfloat16)]
    for rows, row_targets in zip(hidden.detach().split(8), targets.split(8), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            (gradient,) = torch.autograd.grad(plain(head, rows, row_targets) / 3, head.weight)
        in_bf16.append(in_bf16[-1] + gradient.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        _, _, ours = gradients(summed_loss, head, hidden, targets)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < (in_bf16[-1].float() - exact).norm()


def test_weights_in_bf16_get_gradients_in_bf16_that_are_not_scaled_by_a_rounded_number():
    head, hidden, targets = build()
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    _, *ours = gradients(summed_loss, head, hidden, targets)
    _, *exact = gradients(plain, copy.deepcopy(head).float(), hidden.detach().float().requires_grad_(), targets)
    for got, expected in zip(ours, exact, strict=True):
        assert got.dtype == torch.bfloat16
        scale = (got.float() * expected).sum() / expected.square().sum()
        assert scale.item() == pytest.approx(1, abs=5e-4)  # a third in bf16 is 0.002 more than a third


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[str(function.overloadpacket).removeprefix("aten.").rstrip("_")] += 1
        return function(*args, **(kwargs or {}))

    @property
    def of_matrices(self) -> int:
        return self.count["mm"] + self.count["addmm"]


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_chunk_costs_as_many_matrix_products_as_all_logits_at_once(head_trains):
    case = build(head_trains=head_trains)
    with Products() as ours:
        gradients(summed_loss, *case)
    with Products() as plainly:
        gradients(plain, *case)
    assert plainly.of_matrices == 2 + head_trains
    assert ours.of_matrices == CHUNKS * plainly.of_matrices


def test_a_head_of_another_kind_gives_logits_only_and_they_are_computed_again():
    class Doubled(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return 2 * super().forward(x)

    _, hidden, targets = build()
    head = Doubled(WIDTH, PADDED)
    ours = gradients(summed_loss, head, hidden, targets)
    assert head.calls == 2 * CHUNKS
    for got, expected in zip(ours, gradients(plain, head, hidden, targets), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_hooks_around_the_head_see_one_call():
    head, hidden, targets = build()
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    summed_loss(head, hidden, targets, VOCAB)
    assert len(calls) == 1  # FSDP2 and ZeRO-3 gather and give back the weight in hooks


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient():
    head, hidden, targets = build()
    loss = summed_loss(head, hidden, targets, VOCAB)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (8, 8, 8),  # all at once
        (40, 8, 8),
        (40, 9, 8),  # five equal chunks rather than four and a rest
        (41, 8, 8),  # prime: a short last one
        (12 * 1024, 1335, 1024),  # GPT-2's vocabulary
        (7, 0, 1),
    ],
)
def test_chunks_are_as_large_as_allowed_and_of_one_size_where_they_can_be(monkeypatch, rows, most, expected):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", most * VOCAB)
    assert rows_of_a_chunk(rows, VOCAB) == expected


def test_a_compiled_loss_is_one_graph_and_the_same():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    case = build()
    expected = gradients(summed_loss, *case)
    case[0].loss_and_gradient = torch.compile(loss_and_gradient, backend="aot_eager", fullgraph=True)
    for got, eager in zip(gradients(summed_loss, *case), expected, strict=True):
        assert torch.equal(got, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
