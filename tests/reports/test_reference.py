"""Reference curves: making, finding and comparing; the shipped ones fit the shipped
recipes.
"""

from pathlib import Path

import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.errors import UserError
from nanogpt_hf.reports.reference import (
    SHIPPED,
    Reference,
    differences,
    experiment_of,
    find_reference,
    judge,
    make_reference,
    text_facts,
)
from nanogpt_hf.runs.metrics import column, read_metrics

ROOT = Path(__file__).parents[2]
REFERENCES = sorted(SHIPPED.glob("*.json"))


@pytest.fixture
def run_of(write_run):
    """Write the run of a seed without training."""
    return lambda seed, **knobs: write_run(f"run_{seed}", train__seed=seed, **knobs)


def test_make_reference(run_of, tmp_path):
    runs = [run_of(seed) for seed in range(5)]
    reference = make_reference(runs, "tiny")
    assert reference.seeds == [0, 1, 2, 3, 4]
    assert reference.curve["step"] == [0, 20, 40, 60]
    losses = np.array([column(read_metrics(run), "val/loss")[1] for run in runs])
    assert reference.curve["mean"] == pytest.approx(losses.mean(axis=0), abs=1e-4)
    reach = 5 * losses.std(axis=0, ddof=1)
    assert reference.curve["high"] == pytest.approx(losses.mean(axis=0) + reach, abs=1e-4)
    assert str(tmp_path) not in str(reference)  # local paths are private


def test_make_reference_refuses_unsuitable_runs(run_of):
    first = run_of(0)
    second = run_of(1)
    third = run_of(2)
    third.metrics.write_text(third.metrics.read_text().replace('"step": 20,', '"step": 21,'))
    for runs, value in (
        ([first, second], "three runs"),
        ([first, second, run_of(3, optim__learning_rate=5e-3)], "optim.learning_rate"),
        ([first, second, run_of(4, steps=59)], "not finished"),
        ([first, second, third], "not evaluated as"),
    ):
        assert value in refusal(make_reference, runs, "x", error=UserError)


def test_differences_separates_incomparable_from_shifting_knobs(run_of, tmp_path):
    reference = make_reference([run_of(seed) for seed in range(3)], "tiny")
    same = load_config(run_of(9, train__micro_batch_size=8, checkpoint__every=7).recipe)
    assert differences(reference, same, text_facts(same)) == ({}, {})
    other = load_config(
        run_of(10, model__n_layer=3, optim__learning_rate=0.5, train__tokens_per_step=256).recipe
    )
    incomparable, shifting = differences(reference, other, text_facts(other))
    assert list(incomparable) == ["model.n_layer"]
    assert "3 here, 2 " in incomparable["model.n_layer"]
    assert list(shifting) == ["optim.learning_rate", "train.tokens_per_step"]


def test_differences_compares_prepared_tokens(run_of, tmp_path, text_file):
    from nanogpt_hf.data.prepare import prepare

    config = load_config(run_of(0).recipe)
    prepare(config)
    reference = make_reference([run_of(seed) for seed in (1, 2, 3)], "tiny")
    assert reference.text["train_tokens"] > 1000
    copy = tmp_path / "copy.txt"
    copy.write_text(text_file.read_text())
    elsewhere = {"data__source": str(copy), "data__dir": str(tmp_path / "elsewhere")}
    config = load_config(run_of(4, **elsewhere).recipe)
    prepare(config)
    assert differences(reference, config, text_facts(config)) == (
        {},
        {},
    )  # equal text under another name
    copy.write_text(text_file.read_text() + "one line more\n" * 9)
    config = load_config(run_of(5, **elsewhere | {"data__dir": str(tmp_path / "more")}).recipe)
    prepare(config)
    incomparable, _ = differences(reference, config, text_facts(config))
    assert "text.train_tokens" in incomparable


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_shipped_references_fit_the_shipped_recipes(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the quickstart's text differs between versions of Python
    config = load_config(ROOT / "recipes" / f"{path.stem}.yaml")
    reference = find_reference(config)
    assert reference.name == path.stem
    assert differences(reference, config, text_facts(config)) == ({}, {})
    assert len(reference.seeds) >= 5 or reference.published


def test_fineweb_is_judged_by_the_published_loss():
    """At the end of its steps only: no curve of this architecture is published."""
    config = load_config(ROOT / "recipes/fineweb_124m.yaml")
    reference = find_reference(config)
    for step, loss, kind in ((3250, 3.9, "early"), (3500, 3.3, "normal"), (3500, 3.32, "above")):
        answer = judge(reference, config, [{"step": step, "val/loss": loss}])
        assert answer.kind == kind, answer.sentence
        assert "3.28 in 3,800 steps by its Muon baseline" in answer.sentence


# --- verdicts


@pytest.fixture
def config(write_recipe):
    return load_config(write_recipe())


@pytest.fixture
def reference(config):
    """A band of 0.1 around 4, 3, 2.5 and 2.2 at steps 0, 10, 20 and 30."""
    means = [4.0, 3.0, 2.5, 2.2]
    low = [m - 0.1 for m in means]
    high = [m + 0.1 for m in means]
    curve = {"step": [0, 10, 20, 30], "mean": means, "low": low, "high": high}
    return Reference("tiny", experiment_of(config), curve, seeds=[1, 2, 3])


def run(*losses: float | None) -> list[dict]:
    return [{"step": 10 * i, "val/loss": loss} for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "knobs", "kind", "facts"),
    [
        ((4.05, 3.05, 2.45), {}, "normal", "3 reference runs of t|2.450 at step 20|2.400 to 2.600"),
        ((4, 3.2, 2.5), {}, "normal", "from step 20 on"),
        ((4, 3), {"optim.weight_decay": 0.2}, "normal", "optim.weight_decay"),
        ((4, 3.2, 2.5, 2.9), {}, "above", "tiny from step 30|2.900 at step 30|2.100 to 2.300"),
        ((4, 3.2, 2.9, 2.9), {}, "above", "from step 10 on"),
        ((4, None, 2.5), {}, "above", "diverged|step 10"),
        ((4, 2.8, 2.3), {}, "below", "from step 10|validation text"),
        ((4,), {}, "early", "step 10"),
    ],
)
def test_judge_with_a_band(reference, config, losses, knobs, kind, facts):
    answer = judge(reference, replace_knobs(config, knobs), run(*losses))
    assert answer.kind == kind
    assert all(fact in answer.sentence for fact in facts.split("|"))
    assert len(answer.causes) == (3 if kind == "above" else 0)


def test_judge_above_the_band_lists_the_likeliest_causes_first(reference, config):
    events = run(4, 3.2)
    changed = replace_knobs(config, {"optim.learning_rate": 0.5, "train.tokens_per_step": 64})
    rate, tokens, precision = judge(reference, changed, events).causes
    assert "optim.learning_rate is 0.5 here, 0.01" in rate
    assert "train.tokens_per_step is 64 here, 128" in tokens
    assert precision.startswith("the precision: ")


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"model.n_layer": 6}, "quickstart, cannot be compared: model.n_layer is 6 here, 4 in the"),
        ({"data.vocab_size": 512, "data.block_size": 64}, "data.block_size is 64 here, 128 in"),
        ({"model.n_layer": 2, "model.n_head": 2, "model.n_embd": 64}, "none ships for this exper"),
    ],
)
def test_judge_without_a_reference_says_what_the_nearest_differs_in(knobs, reason, tmp_path):
    recipe = load_config(ROOT / "recipes/quickstart.yaml", {"data.dir": str(tmp_path)} | knobs)
    assert find_reference(recipe) is None
    answer = judge(None, recipe, run(4, 3))
    assert answer.kind == "none"
    assert reason in answer.sentence
    assert "--make-reference" in answer.sentence


@pytest.mark.parametrize(
    ("losses", "kind", "facts"),
    [
        ((9, 3.3), "early", ["a page", "step 20"]),
        ((9, 2.86, 2.9), "normal", ["2.860 at step 20", "a page"]),  # the lowest so far
        ((9, 3.1, 2.89), "above", ["2.890"]),
    ],
)
def test_judge_a_published_loss(config, losses, kind, facts):
    curve = {"step": [20], "mean": [2.85], "low": [0], "high": [2.88]}
    reference = Reference("big", experiment_of(config), curve, published="theirs: a page")
    answer = judge(reference, config, run(*losses))
    assert answer.kind == kind
    assert all(fact in answer.sentence for fact in facts)


MUON = {"optim.name": "muon"}
RATE = "optim.muon_learning_rate"
SCALED = MUON | {"optim.muon_scale": "match_rms_adamw"}


@pytest.mark.parametrize(
    ("here", "there", "line"),
    [
        (MUON, MUON | {RATE: 0.037}, "is 0.02 here, 0.037 in the reference"),
        (MUON | {RATE: 0.037}, MUON, "is 0.037 here, 0.02 in the reference"),
        ({}, MUON | {RATE: 0.037}, "is None here, 0.037 in the reference"),
        # Earlier versions recorded it for AdamW, too.
        ({RATE: 0.02}, {}, None),
        (SCALED, SCALED | {RATE: 0.02}, "is 0.01 here, 0.02 in the reference"),
        (SCALED, SCALED, None),
        (SCALED, SCALED | {RATE: 0.01}, None),
        (MUON, MUON | {RATE: 0.02}, None),
    ],
)
def test_rates_of_muon_are_compared_as_numbers(write_recipe, here, there, line):
    """A default follows from other knobs, and an experiment does not list it."""
    recipe = write_recipe()
    reference = Reference("tiny", experiment_of(load_config(recipe, there)), {}, seeds=[1, 2, 3])
    shifting = differences(reference, load_config(recipe, here), None)[1]
    assert shifting.get(RATE) == (f"{RATE} {line}" if line else None)
