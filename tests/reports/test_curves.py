"""The picture."""

import pytest
from matplotlib import image

from nanogpt_hf.reports.curves import draw_curves


def events(count: int) -> list[dict]:
    train = [{"step": i, "train/loss": 4 / (1 + i / 9), "train/learning_rate": 1e-3 * i} for i in range(1, count + 1)]
    return [{"step": 0, "val/loss": 4.2}, *train, {"step": count, "val/loss": 1.0}]


@pytest.mark.parametrize("count", [1, 5, 300])
def test_a_picture_with_something_in_it_is_drawn(tmp_path, count):
    draw_curves(events(count), "a run", tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (624, 960)
    assert pixels[..., :3].std() > 0.05  # not blank
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_no_picture_of_nothing(tmp_path):
    draw_curves([{"step": 0, "val/loss": 4.2}], "a run", tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())
