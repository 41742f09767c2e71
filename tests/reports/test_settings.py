"""Settings of a sweep: means and standard errors over seeds, as a table and a plot."""

import math

import pytest

from nanogpt_hf.reports.plot_file import is_own_plot
from nanogpt_hf.reports.settings import draw_settings, settings_of, settings_table
from nanogpt_hf.runs.metrics import Score

LOSS = Score("val/loss", "val loss", "validation loss")
REWARD = Score("val/reward", "reward", "mean reward")
RUNS = [
    ({"optim.learning_rate": 1e-3, "train.seed": 1}, 2.0),
    ({"optim.learning_rate": 1e-3, "train.seed": 2}, 2.2),
    ({"optim.learning_rate": 1e-3, "train.seed": 3}, 2.4),
    ({"optim.learning_rate": 1e-2, "train.seed": 1}, 1.5),
    ({"optim.learning_rate": 1e-2, "train.seed": 2}, 1.7),
    ({"optim.learning_rate": 1e-2, "train.seed": 3}, None),
    ({"optim.learning_rate": 1e-1, "train.seed": 1}, math.nan),
]


def test_runs_that_differ_in_their_seed_are_one_setting():
    best, second, last = settings_of(RUNS, LOSS)
    assert best["knobs"] == {"optim.learning_rate": 1e-2}
    assert (best["runs"], best["mean"]) == (2, pytest.approx(1.6))
    assert best["standard_error"] == pytest.approx(0.1)
    assert (second["runs"], second["mean"]) == (3, pytest.approx(2.2))
    # standard deviation 0.2, over the root of three runs
    assert second["standard_error"] == pytest.approx(0.2 / math.sqrt(3))
    assert last == {
        "knobs": {"optim.learning_rate": 1e-1},
        "runs": 0,
        "mean": None,
        "standard_error": None,
    }


def test_best_setting_of_a_reward_has_the_highest():
    means = [row["mean"] for row in settings_of(RUNS, REWARD)]
    assert means == [pytest.approx(2.2), pytest.approx(1.6), None]
    assert "reward" in settings_table(settings_of(RUNS, REWARD), REWARD).splitlines()[0]


def test_table_has_a_row_for_each_setting_with_the_knobs_it_reads():
    muon = [({"optim.name": "muon", "optim.muon_learning_rate": 0.02, "train.seed": 1}, 1.25)]
    adamw = [({"optim.name": "adamw", "train.seed": 1}, 1.5)]
    lines = settings_table(settings_of(adamw + muon, LOSS), LOSS).splitlines()
    assert lines[0].split() == [
        "optim.name",
        "optim.muon_learning_rate",
        "runs",
        "val",
        "loss",
        "±",
        "s.e.",
    ]
    assert lines[1].split() == ["muon", "0.02", "1", "1.2500", "–"]
    assert lines[2].split() == ["adamw", "–", "1", "1.5000", "–"]


def test_plot_is_of_knobs_with_several_numbers(tmp_path):
    path = tmp_path / "settings.png"
    assert draw_settings(settings_of(RUNS, LOSS), path, LOSS)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert is_own_plot(path)
    named = [({"optim.name": name}, 1.0) for name in ("adamw", "muon")]
    other = tmp_path / "other.png"
    assert not draw_settings(settings_of(named, LOSS), other, LOSS)
    assert not draw_settings(settings_of([({"model.n_head": 2}, None)], LOSS), other, LOSS)
    assert not other.exists()
