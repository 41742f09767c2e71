"""Observers of a run, which change none of its numbers: logging, monitoring, tasks, samples, plots, report, pushes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from nanogpt_hf.evaluation.samples import TrainingSamples
from nanogpt_hf.evaluation.tasks import TrainingTasks
from nanogpt_hf.export.background_push import BackgroundPush
from nanogpt_hf.reports.live import LiveReports
from nanogpt_hf.training.layer_stats import LayerStats
from nanogpt_hf.training.monitor import Monitor
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.tracking import Tracking


@dataclass
class Observers:
    """The observers of one run, which the loop calls by name."""

    tracking: Tracking
    monitor: Monitor
    layers: LayerStats
    tasks: TrainingTasks
    samples: TrainingSamples
    reports: LiveReports
    push: BackgroundPush


def observe(run: Run, tasks: TrainingTasks, samples: TrainingSamples) -> Observers:
    """Start logging, and build the other observers of a run that has started or resumed."""
    is_main = run.mesh.is_main
    return Observers(
        tracking=Tracking(run),
        monitor=Monitor(run.accelerator, run.config, run.folder),
        layers=LayerStats(run.accelerator, run.config, run.data.validation, run.batches.micro_batch_size),
        tasks=tasks,
        samples=samples,
        reports=LiveReports(run.folder, run.config, is_main=is_main),
        push=BackgroundPush(run.config.hub, run.folder, is_main=is_main),
    )


@contextlib.contextmanager
def finishing(observers: Observers) -> Iterator[None]:
    """Context that draws the plot, writes the report, and ends trackers and push when the run ends or fails."""
    done = False
    try:
        with observers.tracking:
            try:
                yield
            finally:
                observers.reports.finish(observers.tracking.events)
        done = True
    finally:
        observers.push.finish(done=done)
