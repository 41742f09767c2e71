"""The steps of the runs of a sweep that find their number when they start: by train.epochs or
train.budget.
"""

import json
import logging
from dataclasses import replace

from nanogpt_hf.config.schema import Config, knob_values
from nanogpt_hf.config.stages import with_known_steps
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.training.epochs import count_steps, known_data
from nanogpt_hf.training.sweep_grid import GridRun, Sweep

logger = logging.getLogger(__name__)


def with_steps(sweep: Sweep) -> Sweep:
    """The sweep whose runs have their number of steps in their recipes, as far as it is known:
    of train.epochs if the data is prepared, of train.budget if the run has begun.

    The command of a run is as before. Raises UserError if a warm-up is longer than its run.
    """
    # By the data: reading the pairs of `align` takes as long as preparing them.
    sequences: dict[str, float | None] = {}
    runs: list[GridRun] = []
    for run in sweep.runs:
        try:
            config = _config_with_steps(sweep, run, sequences)
        except UserError as error:
            raise UserError(f"{run.name}: {error}; no run was started") from None
        runs.append(replace(run, config=config))
    return replace(sweep, runs=runs)


def _config_with_steps(sweep: Sweep, run: GridRun, sequences: dict[str, float | None]) -> Config:
    config = run.config
    folder = RunFolder(sweep.folder / run.name)
    if config.train.epochs is not None:
        key = _data_of(config)
        if key not in sequences:
            data = known_data(config)
            sequences[key] = data and data.train.samples_per_epoch
        counted = sequences[key]
        return config if counted is None else count_steps(config, counted)
    if config.train.budget is not None and folder.recipe.is_file() and not sweep.overwrite:
        steps = read_recipe(folder).train.max_steps
        logger.info(
            f"{run.name}: began before, so it keeps its train.max_steps {steps}: train.budget "
            "times a run when it begins"
        )
        return with_known_steps(config, steps)
    return config


def _data_of(config: Config) -> str:
    """What decides the blocks of a run: its method, and the knobs of its data."""
    knobs = knob_values(config).items()
    data = {key: value for key, value in knobs if key.startswith("data.")}
    return json.dumps([method_of(config).name, data], sort_keys=True)
