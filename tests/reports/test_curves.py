"""Loss plots."""

import numpy as np
import pytest
from matplotlib import image

from nanogpt_hf.errors import UserError
from nanogpt_hf.reports.curves import draw_curves
from nanogpt_hf.reports.reference import Reference
from nanogpt_hf.reports.settings import draw_settings, settings_of
from nanogpt_hf.runs.metrics import Score


def events(count: int) -> list[dict]:
    train = [
        {"step": i, "train/loss": 4 / (1 + i / 9), "train/learning_rate": 1e-3 * i}
        for i in range(1, count + 1)
    ]
    return [{"step": 0, "val/loss": 4.2}, *train, {"step": count, "val/loss": 1.0}]


@pytest.mark.parametrize("count", [1, 5, 300])
def test_draw_curves_is_not_blank(tmp_path, count):
    draw_curves({"a run": events(count)}, tmp_path / "loss.png")
    assert pixels(tmp_path / "loss.png").shape[:2] == (624, 960)
    assert pixels(tmp_path / "loss.png").std() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def pixels(path) -> np.ndarray:
    return image.imread(path)[..., :3]


def test_draw_curves_shows_the_reference_band(tmp_path):
    band = {"step": [0, 300], "mean": [4, 1], "low": [3.9, 0.9], "high": [4.1, 1.1]}
    reference = Reference("a", {}, band, seeds=[1, 2, 3])
    draw_curves({"a": events(300)}, tmp_path / "without.png")
    draw_curves({"a": events(300)}, tmp_path / "with.png", reference=reference)
    differing = pixels(tmp_path / "without.png") != pixels(tmp_path / "with.png")
    assert differing.any(axis=-1).sum() > 1000


def test_draw_curves_of_many_runs_with_long_names(tmp_path):
    runs = {f"run $_{number}^ {'x' * 40}": events(60) for number in range(8)}
    assert draw_curves(runs, tmp_path / "compare.png")
    assert pixels(tmp_path / "compare.png").shape[:2] == (624, 960)
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves(runs, tmp_path / "no" / "loss.png")


LOSS = Score("val/loss", "val loss", "validation loss")


def settings(name):
    runs = [({"train.seed": 1, "optim.beta1": beta, "data.source": name}, 1.0) for beta in (0, 1)]
    return settings_of(runs, LOSS)


@pytest.mark.parametrize(
    "draw",
    [
        lambda name, path: draw_curves({name: events(20)}, path),
        lambda name, path: draw_curves({name: events(20), "other": events(20)}, path),
        lambda name, path: draw_settings(settings(name), path, LOSS),
    ],
    ids=["one run", "runs", "settings"],
)
@pytest.mark.parametrize("name", [r"a$\frac$", "$", r"\$x\$", "日本 😀", "a\tb\nc", "x" * 255])
def test_any_name_is_drawn_as_it_is(tmp_path, draw, name):
    """Without mathematics, and without a warning, which fails a test."""
    assert draw(name, tmp_path / "plot.png")


def test_plot_has_the_cross_entropy_of_a_loss_with_other_parts(tmp_path):
    """A stage begins to distil: its training loss is no cross-entropy, but one of its parts is."""
    alone = events(30)
    taught = [
        event | {"train/loss": 99.0, "train/cross_entropy": event["train/loss"]}
        if event["step"] > 20 and "train/loss" in event
        else event
        for event in alone
    ]
    for number in (1, 2):
        for name, drawn in {"alone": alone, "taught": taught}.items():
            runs = {f"run {i}": drawn for i in range(number)}
            draw_curves(runs, tmp_path / f"{name} {number}.png")
    differing = pixels(tmp_path / "alone 1.png") != pixels(tmp_path / "taught 1.png")
    # The legend alone: it names the cross-entropy, at the upper right.
    assert 0 < differing.any(axis=-1).sum() < 3000
    assert not differing[200:].any()
    assert (pixels(tmp_path / "alone 2.png") == pixels(tmp_path / "taught 2.png")).all()


def test_draw_curves_of_rewards_shows_pass_rates(tmp_path):
    train = [{"step": i, "train/reward": i / 30, "train/entropy": 1 - i / 40} for i in range(1, 31)]
    passed = [{"step": step, "val/pass@1": step / 40} for step in (0, 15, 30)]
    assert draw_curves({"a": train + passed}, tmp_path / "loss.png", "val/pass@1")
    assert draw_curves({"a": train}, tmp_path / "alone.png", "val/pass@1")
    differing = pixels(tmp_path / "loss.png") != pixels(tmp_path / "alone.png")
    assert differing.any(axis=-1).sum() > 1000
    assert not draw_curves({"a": []}, tmp_path / "none.png", "val/pass@1")
    assert not (tmp_path / "none.png").exists()
