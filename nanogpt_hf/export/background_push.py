"""Push the newest model to the Hub while training continues; a failed push stops no run."""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.errors import one_line
from nanogpt_hf.export.hub import push
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)

FINAL_TIMEOUT = 600.0  # seconds that a finished run waits for its last push
STOPPED_TIMEOUT = 10.0  # seconds that a run stopped by a signal waits: launchers kill after 30


class BackgroundPush:
    """Pushes to hub.repo in a thread, one model at a time, on the main process only.

    Does nothing unless the recipe asks for it. The thread is a daemon, so that a push that hangs
    cannot keep the process; huggingface_hub's `run_as_future` would be waited for.
    """

    def __init__(self, hub: HubSection, folder: RunFolder, *, is_main: bool = True):
        self.hub, self.active = hub, is_main and hub.push is not None
        self.folder = folder.best if hub.push == "best" else folder.final
        self._models: queue.Queue[Path] = queue.Queue(maxsize=1)
        self._last_line = ""
        self._finishing = False
        if self.active:
            disable_progress_bars()
            threading.Thread(target=self._push_models, daemon=True).start()

    def new_model(self, folder: Path) -> None:
        """Push `folder`, which training has just written, after the push that is running."""
        if self.active and folder == self.folder:
            with contextlib.suppress(queue.Full):  # the one that waits will push the newest
                self._models.put_nowait(folder)

    def finish(self, done: bool) -> None:
        """Wait for the running push, up to a limit; after that, log how to push by hand.

        A run that is `done` pushes once more. Weights that the Hub has are not sent again; metrics
        and loss plot are.
        """
        if not self.active:
            return
        self._finishing = True
        if done and self.folder.is_dir():
            self.new_model(self.folder)
        if self._models.unfinished_tasks:
            logger.info(f"hub: pushing {self.folder} to {self.hub.repo}; Ctrl-C cancels the push")
        deadline = time.monotonic() + (FINAL_TIMEOUT if done else STOPPED_TIMEOUT)
        with contextlib.suppress(KeyboardInterrupt), _signals_interrupt():
            while self._models.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.1)
        if self._models.unfinished_tasks:
            logger.warning(f"hub: the last push was canceled; {self._by_hand()}")

    def _by_hand(self) -> str:
        private = " --private" if self.hub.private else ""
        return f"by hand: python cli.py push {self.folder} {self.hub.repo}{private}"

    def _push_models(self) -> None:
        while True:
            self._models.get()
            level, end = logging.INFO, ""
            try:
                pushed = push(self.folder, str(self.hub.repo), private=self.hub.private)
                line = f"{self.folder} -> {pushed.url}"
            except Exception as error:
                level, line = logging.WARNING, one_line(error)
                end = f"; {self._by_hand() if self._finishing else 'training continues'}"
            # the next model tries again; the same error is logged once
            if line != self._last_line or (end and self._finishing):
                logger.log(level, f"hub: {line}{end}")
            self._last_line = line
            self._models.task_done()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt: the run is saved, only the wait ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
