"""Results of a sweep: the table, its files, the plot, and the fitted scaling law."""

import csv
import json

import numpy as np
import pytest

from nanogpt_hf.reports.sweep import (
    Row,
    draw_sweep,
    fit_power_law,
    fit_scaling,
    result_rows,
    seed_means,
    sweep_table,
    write_sweep,
)

PLANNED = [Row(f"depth={n}", "planned", {"model.depth": n}, 100 * n, 10, 1000 * n, 6e5 * n**2) for n in (1, 2, 4)]


def events(row, share=1.0):
    """Metrics of a run that reached a share of its steps, on the law loss = 9 · FLOPs^-0.1 at its end."""
    steps = round(row.steps * share)
    rows = [{"step": 0, "tokens": 0, "seconds": 0.0, "val/loss": 5.0, "val/bits_per_byte": 7.0}]
    for step in range(1, steps + 1):
        position = {"step": step, "tokens": row.tokens * step // row.steps, "seconds": 1.5 * step}
        loss = 9 * row.flops**-0.1 + 0.1 * (row.steps - step)
        rows.append(position | {"train/loss": loss})
        rows.append(position | {"val/loss": loss, "val/bits_per_byte": loss * 1.4})
    return rows


@pytest.fixture
def sweep_dir(tmp_path):
    """A folder of three runs, of which the last is half done."""
    for row, share in zip(PLANNED, (1, 1, 0.5), strict=True):
        folder = tmp_path / "sizes" / row.run
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(row, share)))
    return tmp_path / "sizes"


def test_power_law_fit_finds_the_exponent():
    flops = np.array([1e6, 1e8, 1e9, 1e12])
    law = fit_power_law(flops, 7 * flops**-0.05)
    assert (law.coefficient, law.exponent) == (pytest.approx(7), pytest.approx(-0.05))
    assert law.standard_error == pytest.approx(0, abs=1e-9)
    noisy = fit_power_law(flops, 7 * flops**-0.05 * np.array([1.1, 0.9, 1.0, 1.05]))
    slope, covariance = np.polyfit(
        np.log(flops), np.log(7 * flops**-0.05 * np.array([1.1, 0.9, 1.0, 1.05])), 1, cov=True
    )
    assert noisy.exponent == pytest.approx(slope[0])
    assert noisy.standard_error == pytest.approx(covariance[0, 0] ** 0.5)


def test_scaling_fit_uses_best_finished_run_per_depth():
    metrics = {row.run: events(row) for row in PLANNED}
    done = {row.run: "done" for row in PLANNED}
    rows = result_rows(PLANNED, metrics, done)
    law = fit_scaling(rows)
    assert law.exponent == pytest.approx(-0.1)
    worse = [Row("worse", "done", {"model.depth": 2}, 1, 1, 1, rows[1].flops, rows[1].val_loss + 1)]
    assert fit_scaling([*worse, *rows]) == law
    assert fit_scaling(rows[:2]) is None  # two points determine a line exactly
    assert fit_scaling(result_rows(PLANNED, metrics, done | {"depth=4": "interrupted"})) is None
    assert fit_scaling([Row(str(n), "done", {"train.seed": n}, 1, 1, 1, 10.0**n, 1.0) for n in range(4)]) is None


def test_seed_means_average_finished_runs_of_equal_knobs():
    def row(rate: float, seed: int, loss: float, status: str = "done") -> Row:
        return Row(f"{rate}{seed}", status, {"optim.learning_rate": rate, "train.seed": seed}, 1, 1, 1, 1.0, loss)

    rows = [row(1e-3, 1, 2.0), row(1e-3, 2, 3.0), row(2e-3, 1, 5.0), row(2e-3, 2, 9.0, "interrupted")]
    (mean,) = seed_means(rows)
    assert (mean.values, mean.val_loss, mean.seeds) == ({"optim.learning_rate": 1e-3}, 2.5, 2)
    assert all(word in str(mean) for word in ("optim.learning_rate 0.001", "2.5000 ± 0.7071", "2 seeds"))
    assert [
        str(mean) for mean in seed_means([Row("a", "done", {"train.seed": n}, 1, 1, 1, 1.0, 1.5) for n in (1, 2)])
    ] == ["1.5000 ± 0.0000 over 2 seeds"]
    assert seed_means(PLANNED) == []


def test_table_csv_and_json_have_equal_figures(sweep_dir):
    text = write_sweep(PLANNED, {"depth=1": "done", "depth=2": "failed (2)"}, sweep_dir)
    with (sweep_dir / "sweep.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    tree = json.loads((sweep_dir / "sweep.json").read_text())
    assert tree["fit"] is None
    assert [row["status"] for row in table] == ["done", "failed (2)", "not started"]
    for row, entry, planned in zip(table, tree["runs"], PLANNED, strict=True):
        assert entry["values"] == planned.values
        assert row["model.depth"] == str(planned.values["model.depth"])
        for key in ("run", "steps", "tokens", "flops", "val_loss", "seconds"):
            assert row[key] == str(entry[key])
        line = next(line for line in text.splitlines() if line.startswith(planned.run))
        assert f"{entry['val_loss']:.4f}" in line
        assert f"{entry['tokens']:,}" in line
    half = tree["runs"][2]
    assert (half["steps"], half["tokens"]) == (5, 2000)
    assert half["flops"] == pytest.approx(PLANNED[2].flops / 2)


def test_sweep_plot_needs_losses(sweep_dir, tmp_path):
    text = write_sweep(PLANNED, {}, sweep_dir)
    assert (sweep_dir / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "plot: " in text
    empty = tmp_path / "empty"
    assert "plot: " not in write_sweep(PLANNED, {}, empty)
    assert not (empty / "sweep.png").exists()
    diverged = [events(PLANNED[0])[0], {"step": 10, "tokens": 1000, "train/loss": None}]
    rows = result_rows(PLANNED[:1], {"depth=1": diverged}, {})
    assert not draw_sweep(rows, {"depth=1": diverged}, None, "diverged", tmp_path / "none.png")
    assert "–" in sweep_table(result_rows(PLANNED, {row.run: [] for row in PLANNED}, {}))


@pytest.mark.parametrize("values", [{"train.seed": 3}, {"data.tokenizer": "gpt2"}, {"a.b": 1, "c.$d": "x$y_{"}])
def test_sweep_plot_of_any_values(tmp_path, values):
    rows = [
        Row(f"{n} $x_", "done", values | {"n": n}, 1, 10, 1000, 1e6, 1.0, 1.0)
        for n in range(40 if "a.b" in values else 3)
    ]
    assert draw_sweep(rows, {row.run: events(row) for row in rows}, None, "a $ title", tmp_path / "plot.png")
