"""Observers of a run, which change none of its numbers: logs, monitoring, tasks, samples, report, checkpoints, push."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from nanogpt_hf.distributed.signals import StopRequest
from nanogpt_hf.evaluation.samples import TrainingSamples
from nanogpt_hf.evaluation.tasks import TrainingTasks
from nanogpt_hf.export.background_push import BackgroundPush
from nanogpt_hf.reports.live import LiveReports
from nanogpt_hf.training.checkpoint_writer import CheckpointWriter
from nanogpt_hf.training.layer_stats import LayerStats
from nanogpt_hf.training.monitor import Monitor
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.source_losses import SourceLosses
from nanogpt_hf.training.tracking import Tracking


@dataclass
class Observers:
    """The observers of one run, which the loop calls by name."""

    tracking: Tracking
    monitor: Monitor
    layers: LayerStats
    sources: SourceLosses
    tasks: TrainingTasks
    samples: TrainingSamples
    reports: LiveReports
    checkpoints: CheckpointWriter
    push: BackgroundPush


def observe(run: Run, tasks: TrainingTasks, samples: TrainingSamples) -> Observers:
    """Start logging, and build the other observers of a run that has started or resumed."""
    is_main, checkpoints = run.mesh.is_main, CheckpointWriter(run.accelerator, run.folder, run.config.checkpoint.keep)
    return Observers(
        tracking=Tracking(run),
        monitor=Monitor(run.accelerator, run.config, checkpoints),
        layers=LayerStats(run.accelerator, run.config, run.data.validation, run.batches.micro_batch_size),
        sources=SourceLosses(run),
        tasks=tasks,
        samples=samples,
        reports=LiveReports(run.folder, run.config, is_main=is_main),
        checkpoints=checkpoints,
        push=BackgroundPush(run.config.hub, run.folder, is_main=is_main),
    )


@contextlib.contextmanager
def finishing(observers: Observers, stop: StopRequest) -> Iterator[None]:
    """Context that completes the last checkpoint, draws the plot, writes the report, and ends trackers and push.

    Also if the run fails. A checkpoint that cannot be written requests `stop`.
    """
    done, observers.checkpoints.stop = False, stop
    try:
        with observers.tracking:
            try:
                with observers.checkpoints:
                    yield
            finally:
                observers.reports.finish(observers.tracking.events)
        done = True
    finally:
        observers.push.finish(done=done)
