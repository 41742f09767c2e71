"""Each verdict on a loss, and its causes."""

import pytest

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.reports import verdict
from nanogpt_hf.reports.reference import Curve, Point, Reference, experiment_of
from nanogpt_hf.reports.verdict import judge


@pytest.fixture
def config(write_recipe):
    return load_config(write_recipe())


@pytest.fixture
def reference(config):
    """A band of 0.1 around 4, 3, 2.5 and 2.2 at steps 0, 10, 20 and 30."""
    means = [4.0, 3.0, 2.5, 2.2]
    curve = Curve([0, 10, 20, 30], means, [m - 0.1 for m in means], [m + 0.1 for m in means])
    return Reference("tiny", experiment_of(config), seeds=[1, 2, 3], curves={"val/loss": curve})


def run(*losses: float | None) -> list[dict]:
    return [{"step": 10 * i, "val/loss": loss} for i, loss in enumerate(losses)]


def names(sentence: str, *facts: str) -> bool:
    return all(fact in sentence for fact in facts)


def test_judge_inside_the_band_is_normal(reference, config):
    answer = judge(reference, config, run(4.05, 3.05, 2.45))
    assert answer.kind == "normal"
    assert names(answer.sentence, "2.450 at step 20", "2.400 to 2.600", "3 reference runs of tiny")
    assert answer.causes == ()


def test_judge_names_steps_outside_the_band(reference, config):
    assert judge(reference, config, run(4, 3.2, 2.5)).sentence.endswith("at step 10")


def test_judge_above_the_band_lists_differences_first(reference, config):
    config = replace_knobs(config, {"optim.learning_rate": 0.5, "train.tokens_per_step": 64})
    answer = judge(reference, config, run(4, 3.2, 2.5, 2.9))
    assert answer.kind == "above"
    assert names(answer.sentence, "tiny from step 30", "2.900 at step 30", "2.100 to 2.300")
    rate, tokens, precision = answer.causes[:3]
    assert names(rate, "optim.learning_rate is 0.5 here, 0.01")
    assert names(tokens, "train.tokens_per_step is 64 here, 128")
    assert names(precision, "the precision: ")
    assert "from step 10 on" in judge(reference, config, run(4, 3.2, 2.9, 2.9)).sentence


def test_judge_above_the_band_with_an_equal_recipe_lists_other_causes(reference, config):
    causes = judge(reference, config, run(4, 3.2)).causes
    assert len(causes) == 3
    events = [*run(4, 3.2), {"step": 5, "train/skipped_steps": 3}, {"step": 6, "train/skipped_steps": 1}]
    assert judge(reference, config, events).causes[0].startswith("4 steps ")


def test_judge_lists_a_missing_text_as_a_cause(reference, config, monkeypatch):
    monkeypatch.setattr(verdict, "text_facts", lambda config: None)
    other_text = Reference(**{**vars(reference), "text": {"train_tokens": 1}})
    assert names(judge(other_text, config, run(4, 3.2)).causes[0], "the text: ", "data.dir")


def test_judge_a_loss_that_is_not_finite(reference, config):
    answer = judge(reference, config, run(4, None, 2.5))
    assert answer.kind == "above"
    assert names(answer.sentence, "diverged", "step 10")


def test_judge_below_the_band_warns_of_leakage(reference, config):
    answer = judge(reference, config, run(4, 2.8, 2.3))
    assert answer.kind == "below"
    assert names(answer.sentence, "from step 10", "validation text")


def test_judge_too_early(reference, config):
    for events in ([], run(4), [{"step": 5, "train/loss": 3}]):
        answer = judge(reference, config, events)
        assert answer.kind == "early"
        assert "step 10" in answer.sentence
    elsewhere = [{"step": step, "val/loss": 3} for step in (0, 7, 14)]
    assert "`--eval.every 10`" in judge(reference, config, elsewhere).sentence


def test_judge_another_experiment(reference, config):
    config = replace_knobs(config, {"model.n_layer": 6, "data.block_size": 8})
    answer = judge(reference, config, run(4, 3, 2.5))
    assert answer.kind == "other"
    assert names(answer.sentence, "tiny", "model.n_layer is 6 here, 2", "data.block_size is 8 here, 16")


def test_judge_without_a_reference(config):
    answer = judge(None, config, run(4, 3))
    assert answer.kind == "none"
    assert "--make-reference" in answer.sentence


def test_judge_normal_names_knobs_that_differ(reference, config):
    config = replace_knobs(config, {"optim.weight_decay": 0.2})
    assert "optim.weight_decay" in judge(reference, config, run(4, 3)).sentence


@pytest.mark.parametrize(
    ("losses", "kind", "facts"),
    [
        ((), "early", ["3.12 (theirs)", "2.85 at step 30 (ours)"]),
        ((9, 3.3), "early", ["3.300 at step 10 of 10"]),
        ((9, 3.3, 3.0), "early", ["at step 20 of 20", "below 3.12 since step 20"]),
        ((9, 3.1, 2.9, 2.86), "normal", ["2.860 at step 30 of 30", "below 3.12 since step 10"]),
        ((9, 3.1, 2.8, 2.9), "normal", ["below 2.85 since step 20"]),
        ((9, 3.1, 2.9, 2.89), "above", ["2.890"]),
    ],
)
def test_judge_published_losses(config, losses, kind, facts):
    points = [Point(3.12, "theirs", "a page"), Point(2.85, "ours", "a page", step=30, tolerance=0.03)]
    answer = judge(Reference("big", experiment_of(config), points=points), config, run(*losses))
    assert answer.kind == kind
    assert names(answer.sentence, *facts)
