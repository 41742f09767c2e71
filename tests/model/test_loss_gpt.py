"""The chunked loss against the plain one: value, gradients, matrix products, exceptions to
chunks.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F

from nanogpt_hf.model import head_gpt, loss_gpt
from nanogpt_hf.model.head_gpt import Head, compile_loss
from nanogpt_hf.model.loss_gpt import chunk_loss, rows_of_a_chunk

ROWS = 40
WIDTH = 16
VOCAB = 61
PADDED = 64
CHUNKS = 5


@pytest.fixture(autouse=True)
def chunks_of_eight_rows(monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 8 * VOCAB)


def build(
    hidden_requires_grad=True, head_requires_grad=True
) -> tuple[Head, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = Head(WIDTH, PADDED, bias=False).requires_grad_(head_requires_grad)
    hidden = torch.randn(ROWS, WIDTH).requires_grad_(hidden_requires_grad)
    targets = torch.randint(VOCAB, (ROWS,))
    targets[5:9] = -100
    return head, hidden, targets


def plain(head, hidden, targets, vocab_size=VOCAB):
    return F.cross_entropy(head(hidden)[:, :vocab_size].float(), targets, reduction="sum")


def gradients(loss_of, head, hidden, targets) -> tuple[torch.Tensor, ...]:
    """The loss, and the gradients of a third of it, as for a mean over tokens."""
    head.weight.grad = hidden.grad = None
    loss = loss_of(head, hidden, targets, VOCAB)
    (loss / 3).backward()
    return tuple(x for x in (loss.detach(), hidden.grad, head.weight.grad) if x is not None)


@pytest.mark.parametrize(
    ("hidden_requires_grad", "head_requires_grad"), [(True, True), (True, False), (False, True)]
)
def test_chunked_loss_and_gradients_equal_plain(hidden_requires_grad, head_requires_grad):
    case = build(hidden_requires_grad=hidden_requires_grad, head_requires_grad=head_requires_grad)
    ours = gradients(Head.__call__, *case)
    assert len(ours) == 1 + hidden_requires_grad + head_requires_grad
    for actual, expected in zip(ours, gradients(plain, *case), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_chunked_loss_without_gradients_equals_plain():
    head, hidden, targets = build()
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, targets, VOCAB), plain(head, hidden, targets))


def test_head_gradient_is_summed_in_float32_under_bf16():
    head, hidden, targets = build()
    _, _, exact = gradients(plain, head, hidden, targets)
    in_bf16 = [torch.zeros_like(exact, dtype=torch.bfloat16)]
    for rows, row_targets in zip(hidden.detach().split(8), targets.split(8), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            (gradient,) = torch.autograd.grad(plain(head, rows, row_targets) / 3, head.weight)
        in_bf16.append(in_bf16[-1] + gradient.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        _, _, ours = gradients(Head.__call__, head, hidden, targets)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < (in_bf16[-1].float() - exact).norm()


def test_bf16_weights_get_exactly_scaled_gradients():
    head, hidden, targets = build()
    head = head.bfloat16()
    hidden = hidden.detach().bfloat16().requires_grad_()
    _, *ours = gradients(Head.__call__, head, hidden, targets)
    _, *exact = gradients(
        plain, copy.deepcopy(head).float(), hidden.detach().float().requires_grad_(), targets
    )
    for actual, expected in zip(ours, exact, strict=True):
        assert actual.dtype == torch.bfloat16
        scale = (actual.float() * expected).sum() / expected.square().sum()
        # 1/3 rounded to bf16 is too large by 0.002 of its value
        assert scale.item() == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("head_requires_grad", [True, False])
def test_chunks_need_no_extra_matrix_products(head_requires_grad, counted):
    case = build(head_requires_grad=head_requires_grad)

    def products(loss_of) -> int:
        count = counted(lambda: gradients(loss_of, *case))
        return count["mm"] + count["addmm"] + count["addmm_"]

    assert products(plain) == 2 + head_requires_grad
    assert products(Head.__call__) == CHUNKS * products(plain)


def test_other_head_class_recomputes_logits():
    class Doubled(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return 2 * super().forward(x)

    _, hidden, targets = build()
    head = Doubled(WIDTH, PADDED)
    ours = gradients(loss_gpt.recomputed_loss, head, hidden, targets)
    assert head.calls == 2 * CHUNKS
    for actual, expected in zip(ours, gradients(plain, head, hidden, targets), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_hooks_of_the_head_are_called_once():
    head, hidden, targets = build()
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    head(hidden, targets, VOCAB)
    assert len(calls) == 1  # FSDP2 and ZeRO-3 gather and free the weight in hooks


def test_backward_in_two_parts_equals_one():
    # as a zero-bubble pipeline does it: the gradient of the inputs, which keeps the graph, then
    # that of the weights
    head, hidden, targets = build()
    _, *expected = gradients(Head.__call__, head, hidden, targets)
    head.weight.grad = hidden.grad = None
    loss = head(hidden, targets, VOCAB) / 3
    dinputs, groups = stage_backward_input([loss], None, [hidden], head.parameters())
    assert head.weight.grad is None
    stage_backward_weight(head.parameters(), groups)
    assert torch.equal(dinputs[0], expected[0])
    assert torch.equal(head.weight.grad, expected[1])


@pytest.mark.parametrize(
    ("rows", "max_rows", "expected"),
    [
        (8, 8, 8),  # all at once
        (40, 8, 8),
        (40, 9, 8),  # five equal chunks instead of four and a remainder
        (41, 8, 8),  # prime: a short last one
        (12 * 1024, 1335, 1024),  # GPT-2's vocabulary
        (7, 0, 1),
    ],
)
def test_chunk_sizes_are_large_and_equal(monkeypatch, rows, max_rows, expected):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", max_rows * VOCAB)
    assert rows_of_a_chunk(rows, VOCAB) == expected


def test_chunks_are_larger_on_a_gpu_and_larger_still_if_compiled(monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 2**26)
    sizes = [
        rows_of_a_chunk(10**6, 50304),
        rows_of_a_chunk(10**6, 50304, "cuda"),
        rows_of_a_chunk(10**6, 50304, "cuda", is_compiled=True),
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    # The micro-batch of nanoGPT's GPT-2 recipe is one chunk.
    assert rows_of_a_chunk(12 * 1024, 50304, "cuda", is_compiled=True) == 12 * 1024


def test_evaluation_of_a_compiled_head_takes_the_chunks_of_one_that_is_not(monkeypatch):
    """It does not call the compiled loss, and holds logits in float32."""
    asked = []
    head = Head(WIDTH, PADDED, bias=False)
    head.chunk_loss = lambda *arguments, **options: chunk_loss(*arguments, **options)
    rows = loss_gpt.rows_of_a_chunk

    def noted(*arguments, is_compiled=False):
        asked.append(is_compiled)
        return rows(*arguments, is_compiled=is_compiled)

    for module in (head_gpt, loss_gpt):
        monkeypatch.setattr(module, "rows_of_a_chunk", noted)
    hidden = torch.randn(ROWS, WIDTH)
    targets = torch.randint(VOCAB, (ROWS,))
    trained = head(hidden, targets, VOCAB)
    with torch.no_grad():
        evaluated = head(hidden, targets, VOCAB)
    assert asked[0]
    assert not any(asked[1:])
    torch.testing.assert_close(trained, evaluated)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_compiled_loss_is_one_graph_and_equal(chunks, softcap, monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", ROWS // chunks * VOCAB)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    case = build()
    case[0].softcap = softcap
    expected = gradients(Head.__call__, *case)
    compile_loss(case[0], backend="aot_eager", fullgraph=True)
    for actual, eager in zip(gradients(Head.__call__, *case), expected, strict=True):
        assert torch.equal(actual, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
