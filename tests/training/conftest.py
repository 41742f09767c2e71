"""Fixtures of the tests of training: train the tiny recipe in this process."""

from pathlib import Path
from typing import NamedTuple

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run


class Ended(NamedTuple):
    """What a command left: exit status, output, and its run."""

    status: int
    out: str
    err: str
    run: RunFolder

    @property
    def line(self) -> str:
        """The last line of stderr."""
        return self.err.splitlines()[-1]


@pytest.fixture(scope="session")
def train(make_recipe, forget_accelerate):
    """Train the tiny recipe with overrides into a run folder, which is returned."""

    def train(path: Path, *, resume: bool = False, **overrides) -> RunFolder:
        config = load_config(make_recipe(path.parent / "tiny.yaml", **overrides))
        forget_accelerate()
        return loop.train(prepare_run(config, path, resume=resume, overwrite=not resume))

    return train


@pytest.fixture
def knobs() -> dict:
    """Overrides of all runs of a module; modules replace it."""
    return {}


@pytest.fixture
def start(train, knobs, tmp_path):
    """`train` into the folder `name` of the test."""
    return lambda name="run", **options: train(tmp_path / name, **knobs | options)


@pytest.fixture
def pretrain(capsys, tmp_path, write_recipe, knobs, forget_accelerate):
    """Run `pretrain` on the tiny recipe with options and overrides into the folder `name`."""

    def pretrain(*options: object, name: str = "run", **overrides) -> Ended:
        forget_accelerate()
        capsys.readouterr()
        recipe = write_recipe(**knobs | overrides)
        folder = tmp_path / name
        status = main(["pretrain", str(recipe), "--run-dir", str(folder), *map(str, options)])
        return Ended(status, *capsys.readouterr(), RunFolder(folder))

    return pretrain


@pytest.fixture(scope="module")
def honest(train, tmp_path_factory) -> RunFolder:
    """A run of eight steps with all its checkpoints, which no test may change."""
    options = {"train__max_steps": 8, "checkpoint__keep": 9, "eval__every": 4}
    folder = tmp_path_factory.mktemp("honest")
    return train(folder / "run", model__dropout=0.1, **options)
