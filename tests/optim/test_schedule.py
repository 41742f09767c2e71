"""The learning rate: shapes, ends, and equality with nanoGPT's formula."""

import itertools
import math

import pytest

from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.optim.optimizer import learning_rate_at


def rates(schedule: str, max_steps: int = 100, warmup_steps: int = 10, **options) -> list[float]:
    optim = OptimSection(
        learning_rate=1.0,
        min_learning_rate=0.1,
        schedule=schedule,
        warmup_steps=warmup_steps,
        **options,
    )
    return [learning_rate_at(step, optim, max_steps) for step in range(max_steps + 1)]


def test_cosine_equals_nanogpt():
    def expected(step):
        if step < 10:
            return (step + 1) / 11
        return 0.1 + 0.5 * (1 + math.cos(math.pi * (step - 10) / 90)) * 0.9

    assert rates("cosine") == pytest.approx([expected(step) for step in range(101)])


# The rate after the last of 100 steps, for each schedule that there is.
LAST = {
    "cosine": 0.1,
    "linear": 0.1,
    "constant": 1.0,
    "wsd": 0.1,
    "inverse_sqrt": math.sqrt(11 / 101),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_to_the_peak_and_the_rate_never_rises_again(schedule):
    values = rates(schedule)
    assert [b - a for a, b in itertools.pairwise([0, *values[:11]])] == pytest.approx([1 / 11] * 11)
    assert values[10] == pytest.approx(1.0)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(values[10:]))
    assert values[-1] == pytest.approx(LAST[schedule])
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(1.0)
    assert len(rates(schedule, max_steps=10, warmup_steps=10)) == 11


def test_wsd_is_constant_then_linear():
    values = rates("wsd", decay_fraction=0.2)
    assert values[10:81] == pytest.approx([1.0] * 71)
    assert values[90] == pytest.approx(0.55)


def test_inverse_sqrt_equals_attention_is_all_you_need():
    # With their step s = ours + 1 and warm-up W + 1, and the factor that makes the peak 1.
    expected = [math.sqrt(11) * min(s**-0.5, s * 11**-1.5) for s in range(1, 102)]
    assert rates("inverse_sqrt") == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if not row.ends])
def test_rate_without_an_end_depends_on_neither_the_end_nor_the_lowest_rate(name):
    alone = rates(name)
    assert rates(name, max_steps=150)[:101] == alone
    optim = OptimSection(learning_rate=1.0, min_learning_rate=0.7, schedule=name, warmup_steps=10)
    assert [learning_rate_at(step, optim, 100) for step in range(101)] == alone


@pytest.mark.parametrize("schedule", [name for name, row in SCHEDULES.items() if row.ends])
def test_decay_may_end_before_or_after_the_run(schedule):
    alone = rates(schedule)
    assert rates(schedule, max_steps=150, decay_steps=100) == pytest.approx([*alone, *[0.1] * 50])
    assert rates(schedule, max_steps=60, decay_steps=100) == alone[:61]


def test_lowest_rate_is_a_tenth_of_the_peak_unless_it_is_stated():
    tenth = OptimSection(learning_rate=2.5e-4)
    assert learning_rate_at(600_000, tenth, 600_000) == 2.5e-5
    assert learning_rate_at(9, OptimSection(min_learning_rate=0.0, warmup_steps=0), 9) == 0


@pytest.mark.parametrize(("share", "steps"), [(0.1, 10), (0.25, 25), (0, 0), (0.004, 0)])
def test_warmup_below_one_is_a_share_of_the_steps(share, steps):
    assert rates("cosine", warmup_steps=share) == rates("cosine", warmup_steps=steps)
