"""Reference curves: making, reading, finding and comparing; the shipped ones fit the shipped recipes."""

import json
from pathlib import Path

import numpy as np
import pytest

from assertions import refusal
from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.errors import UserError
from nanogpt_hf.reports.reference import (
    SHIPPED,
    band_of,
    differences,
    experiment_of,
    find_reference,
    make_reference,
    read_reference,
    window_means,
    write_reference,
)
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import column, read_metrics

ROOT = Path(__file__).parents[2]
REFERENCES = sorted(SHIPPED.glob("*.json"))


@pytest.fixture
def write_run(tmp_path, make_recipe):
    """Write a run folder without training: a recipe, and falling losses that vary a little with the seed."""

    def write_run(seed: int, last: int = 60, shift: float = 0.0, **overrides) -> RunFolder:
        overrides = {"train__max_steps": 60, "eval__every": 20, **overrides}
        config = load_config(make_recipe(tmp_path / "tiny.yaml", train__seed=seed, **overrides))
        run = RunFolder(tmp_path / f"run_{seed}_{shift:g}")
        run.path.mkdir()
        run.recipe.write_text(config_to_yaml(config))
        draw = np.random.default_rng(seed)
        with run.metrics.open("w") as file:
            for step in range(last + 1):
                loss = 1 + 3 / (1 + step / 10) + 0.01 * draw.normal() + shift
                kind = "val/loss" if step % 20 == 0 else "train/loss"
                file.write(json.dumps({"step": step, "tokens": 128 * step, "seconds": step, kind: loss}) + "\n")
        return run

    return write_run


def test_make_reference_round_trip(write_run, tmp_path):
    runs = [write_run(seed) for seed in range(5)]
    reference = make_reference(runs, "tiny")
    path = tmp_path / "tiny.json"
    write_reference(reference, path)
    assert read_reference(path) == reference
    assert reference.seeds == [0, 1, 2, 3, 4]
    assert reference.curves["val/loss"].step == [0, 20, 40, 60]
    assert len(reference.curves["train/loss"].step) == 39  # of 40 windows; one has only an evaluation
    losses = np.array([column(read_metrics(run), "val/loss")[1] for run in runs])
    assert reference.curves["val/loss"].mean == pytest.approx(losses.mean(axis=0), abs=1e-4)
    assert str(tmp_path) not in path.read_text()  # local paths are private
    assert find_reference(load_config(runs[0].recipe), tmp_path) == reference
    assert [file.name for file in tmp_path.glob("*tiny.json*")] == ["tiny.json"]


def test_band_of_is_the_prediction_interval():
    # equal steps, so that the mean of neighbouring variances is the variance
    losses = np.tile(np.array([[1.0], [2.0], [3.0], [4.0], [5.0]]), 7)
    curve = band_of(np.arange(7), losses)
    reach = 4.604 * np.sqrt(2.5) * np.sqrt(1.2)
    assert curve.mean == [3.0] * 7
    assert curve.low == pytest.approx([3 - reach] * 7, abs=1e-4)
    assert curve.high == pytest.approx([3 + reach] * 7, abs=1e-4)


def test_band_of_covers_another_seed():
    draw, inside = np.random.default_rng(0), []
    for _ in range(400):
        losses = draw.normal(size=(6, 11))
        curve = band_of(np.arange(11), losses[:5])
        inside.append((losses[5] >= curve.low) & (losses[5] <= curve.high))
    # 99 % for the variance of one step; the independent neighbours here widen the coverage
    assert 0.985 < np.mean(inside) < 1


def test_make_reference_refuses_unsuitable_runs(write_run):
    first, second, third = write_run(0), write_run(1), write_run(2)
    third.metrics.write_text(third.metrics.read_text().replace('"step": 20,', '"step": 21,'))
    for runs, value in (
        ([first, second], "three runs"),
        ([first, second, first], "three runs"),
        ([first, second, write_run(3, optim__learning_rate=5e-3)], "optim.learning_rate"),
        ([first, second, write_run(4, last=59)], "step 40 of 60"),
        ([first, second, third], "different steps"),
    ):
        assert value in refusal(make_reference, runs, "x", error=UserError)


def test_read_reference_refuses_other_files(tmp_path):
    assert str(tmp_path / "none.json") in refusal(read_reference, tmp_path / "none.json", error=UserError)
    for text in ("", "[]", '{"name": "x"}', '{"name": "x", "experiment": {}, "curves": {"val/loss": {"a": 1}}}'):
        (tmp_path / "bad.json").write_text(text)
        assert str(tmp_path / "bad.json") in refusal(read_reference, tmp_path / "bad.json", error=UserError)


def test_differences_separates_incomparable_from_shifting_knobs(write_run, tmp_path):
    reference = make_reference([write_run(seed) for seed in range(3)], "tiny")
    same = load_config(write_run(9, train__micro_batch_size=8, checkpoint__every=7).recipe)
    assert differences(reference, same) == ({}, {})
    other = load_config(write_run(10, model__n_layer=3, optim__learning_rate=0.5, train__tokens_per_step=256).recipe)
    incomparable, shifting = differences(reference, other)
    assert list(incomparable) == ["model.n_layer"]
    assert "3 here, 2 " in incomparable["model.n_layer"]
    assert list(shifting) == ["optim.learning_rate", "train.tokens_per_step"]


def test_differences_compares_prepared_tokens(write_run, tmp_path, text_file):
    from nanogpt_hf.data.prepare import prepare

    config = load_config(write_run(0).recipe)
    prepare(config)
    reference = make_reference([write_run(seed) for seed in (1, 2, 3)], "tiny")
    assert reference.text["train_tokens"] > 1000
    copy = tmp_path / "copy.txt"
    copy.write_text(text_file.read_text())
    elsewhere = {"data__source": str(copy), "data__dir": str(tmp_path / "elsewhere")}
    config = load_config(write_run(4, **elsewhere).recipe)
    prepare(config)
    assert differences(reference, config) == ({}, {})  # equal text under another name
    copy.write_text(text_file.read_text() + "one line more\n" * 9)
    config = load_config(write_run(5, **elsewhere | {"data__dir": str(tmp_path / "more")}).recipe)
    prepare(config)
    incomparable, _ = differences(reference, config)
    assert list(incomparable) == ["text"]
    assert "tokens" in incomparable["text"]


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_shipped_references_fit_the_shipped_recipes(path):
    reference = read_reference(path)
    config = load_config(ROOT / "recipes" / f"{path.stem}.yaml")
    expected = experiment_of(config)
    if reference.text:  # made from a local copy of the text
        expected["data.source"] = reference.experiment["data.source"]
    assert reference.name == path.stem
    assert reference.experiment == expected
    assert find_reference(config).name == path.stem
    assert len(reference.seeds) >= 5 if reference.curves else reference.points
    assert all(point.source for point in reference.points)


def test_shipped_points_are_the_losses_of_nanogpts_readme():
    points = {path.stem: [p.loss for p in read_reference(path).points] for path in REFERENCES}
    published = {name: losses for name, losses in points.items() if losses}
    assert published == {
        "gpt2_124m": [3.12, 2.85],
        "gpt2_350m": [2.84],
        "gpt2_774m": [2.67],
        "gpt2_1558m": [2.54],
        "shakespeare_char": [1.4697],
    }


def test_window_means_average_the_reports_of_a_window(write_run):
    run = write_run(0)
    ends, means = window_means(run, 3)
    steps, losses = column(read_metrics(run), "train/loss")
    assert ends.tolist() == [1, 2, 3]
    assert means.tolist() == pytest.approx(losses[:3].tolist())
    ends, means = window_means(run, 60)
    in_window = (steps > 58) & (steps <= 60)
    assert means[-1] == pytest.approx(losses[in_window].mean())
