"""report.html: written by training and by the `report` command."""

import shutil

import pytest

from arguments import argv
from nanogpt_hf.commands import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_recipe, loss_plots):
    folder = tmp_path_factory.mktemp("trained")
    recipe = make_recipe(folder / "tiny.yaml", eval__samples=["A cat "], eval__sample_tokens=5)
    with loss_plots():
        assert main(argv("pretrain {} --run-dir {}", recipe, folder / "run")) == 0
    return folder / "run"


@pytest.mark.long
def test_training_writes_it_and_the_command_writes_it_again_or_elsewhere(trained, tmp_path, capsys):
    assert "done: 6 steps" in (trained / "report.html").read_text()
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "report.html").unlink()
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "Samples during training" in (run / "report.html").read_text()
    assert main(argv("report {} --output {}", run, tmp_path / "other.html")) == 0
    assert (tmp_path / "other.html").stat().st_size > 10_000


def test_report_of_an_unfinished_run(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    for name in ("best", "final", "checkpoints"):
        shutil.rmtree(run / name)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:5]) + '\n{"step": 4, "tra')
    assert main(["report", str(run)]) == 0
    assert "of 6, not finished" in (run / "report.html").read_text()
