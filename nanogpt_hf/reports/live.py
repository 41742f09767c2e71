"""The loss plot and report.html of a run that is training.

A failure here is a warning and never ends the run.
"""

import logging
import time
from pathlib import Path

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError
from nanogpt_hf.reports.curves import draw_run
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event

logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_PLOTS = 30.0  # the first takes about half a second


class LiveReports:
    """Draws loss.png every 30 seconds or more while a run trains, and both files at its end.

    Only the main process draws.
    """

    def __init__(self, folder: RunFolder, config: Config, *, is_main: bool):
        self.folder, self.config, self.is_main = folder, config, is_main
        self._last_plot = time.perf_counter()  # a short run has one plot

    def plot(self, events: list[Event]) -> None:
        """Draw the loss plot unless the last one is less than 30 seconds old."""
        if self.is_main and time.perf_counter() - self._last_plot >= _SECONDS_BETWEEN_PLOTS:
            self._last_plot = time.perf_counter()
            self._plot(events)

    def finish(self, events: list[Event]) -> None:
        """Draw the plot and write the report, as complete as the metrics."""
        # a folder that is gone is why the run ended
        if not self.is_main or not self.folder.path.is_dir():
            return
        self._plot(events)
        try:
            write_report(self.folder, self.folder.report, events)
        except Exception as error:
            _warn(self.folder.report, error)

    def _plot(self, events: list[Event]) -> None:
        try:
            draw_run(self.folder, self.config, events)
        except Exception as error:
            _warn(self.folder.loss_plot, error)


def _warn(path: Path, error: Exception) -> None:
    named = isinstance(error, UserError)  # its line begins with the file
    logger.warning(str(error) if named else f"{path}: cannot be written: {error}")
