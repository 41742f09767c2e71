"""Loss plots."""

import pytest
from matplotlib import image

from nanogpt_hf.errors import UserError
from nanogpt_hf.reports.curves import draw_comparison, draw_curves
from nanogpt_hf.reports.reference import Curve, Reference


def events(count: int) -> list[dict]:
    train = [
        {"step": i, "train/loss": 4 / (1 + i / 9), "train/learning_rate": 1e-3 * i}
        for i in range(1, count + 1)
    ]
    return [{"step": 0, "val/loss": 4.2}, *train, {"step": count, "val/loss": 1.0}]


@pytest.mark.parametrize("count", [1, 5, 300])
def test_draw_curves_is_not_blank(tmp_path, count):
    draw_curves(events(count), "a run", tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (624, 960)
    assert pixels[..., :3].std() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_draw_curves_without_training_loss_draws_nothing(tmp_path):
    draw_curves([{"step": 0, "val/loss": 4.2}], "a run", tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_draw_curves_shows_the_reference_band(tmp_path):
    band = Curve([0, 150, 300], [4.0, 2.0, 1.0], [3.9, 1.9, 0.9], [4.1, 2.1, 1.1])
    reference = Reference("a", {}, seeds=[1, 2, 3], curve=band)
    draw_curves(events(300), "a run", tmp_path / "without.png")
    draw_curves(events(300), "a run", tmp_path / "with.png", reference)
    pixels = [image.imread(tmp_path / f"{name}.png") for name in ("without", "with")]
    assert pixels[0].shape == pixels[1].shape
    assert (pixels[0] != pixels[1]).any(axis=-1).sum() > 1000


def test_draw_comparison_of_many_runs_with_long_names(tmp_path):
    runs = {f"run $_{number}^ {'x' * 40}": events(60) for number in range(8)}
    assert draw_comparison(runs, "val/loss", "step", tmp_path / "compare.png")
    assert image.imread(tmp_path / "compare.png").shape[:2] == (624, 960)
    assert not draw_comparison({"none": []}, "val/loss", "step", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_draw_curves_to_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves(events(5), "a run", tmp_path / "no" / "loss.png")


def test_draw_curves_of_rewards_is_not_blank(tmp_path):
    train = [{"step": i, "train/reward": i / 30, "train/entropy": 1 - i / 40} for i in range(1, 31)]
    passed = [
        {"step": step, "val/pass@1": step / 40, "val/pass@4": step / 31} for step in (0, 15, 30)
    ]
    draw_curves(train + passed, "a run", tmp_path / "loss.png")
    draw_curves(train, "a run", tmp_path / "alone.png")
    pixels = [image.imread(tmp_path / f"{name}.png") for name in ("loss", "alone")]
    assert pixels[0].shape[:2] == (624, 960)
    assert (pixels[0] != pixels[1]).any(axis=-1).sum() > 1000
    draw_curves(passed, "a run", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
