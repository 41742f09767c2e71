"""Push the newest model to the Hub during training, in a separate process, so that a failed push stops no run."""

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import nanogpt_hf
from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.distributed.mesh import LAUNCHER_VARIABLES
from nanogpt_hf.export.staging import staging_folder
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)

FINAL_TIMEOUT = 600.0  # seconds that a finished run waits for its last push
STOPPED_TIMEOUT = 10.0  # seconds that a run stopped by a signal waits: launchers kill after 30


class BackgroundPush:
    """Runs `push FOLDER hub.repo` next to training, one push at a time. Does nothing unless the recipe asks for it."""

    def __init__(self, hub: HubSection, folder: RunFolder, *, is_main: bool = True):
        self.hub, self.active = hub, is_main and hub.push is not None
        self.folder = folder.best if hub.push == "best" else folder.final
        self.command = ["push", str(self.folder), str(hub.repo)]
        if hub.private:
            self.command.append("--private")
        self._push: tuple[subprocess.Popen, IO[str]] | None = None  # the running push and its output
        self._model_waits = False  # a newer model than the one that is being pushed
        self._logged: set[str] = set()
        self._finishing = False

    @property
    def is_pushing(self) -> bool:
        return self._push is not None

    def new_model(self, folder: Path) -> None:
        """Push `folder`, which training has just written. If a push is running, the newest model is the next."""
        if self.active and folder == self.folder:
            self._model_waits = True
            self.poll()

    def poll(self) -> None:
        """Report a finished push and start a waiting one. Does not block."""
        if self._push is not None and self._push[0].poll() is not None:
            self._report(*self._push)
        if self._model_waits and self._push is None:
            self._model_waits = False
            self._start()

    def finish(self, done: bool) -> None:
        """Wait for the running push, up to a limit; after that, log how to push by hand.

        A run that is `done` pushes once more. Weights that the Hub has are not sent again; metrics and loss plot are.
        """
        if not self.active:
            return
        self._finishing = True
        if done and self.folder.is_dir():
            self.new_model(self.folder)
        if self.is_pushing:
            logger.info(f"hub: pushing {self.folder} to {self.hub.repo}; Ctrl-C cancels the push")
        deadline = time.monotonic() + (FINAL_TIMEOUT if done else STOPPED_TIMEOUT)
        try:
            with _signals_interrupt():
                while self.is_pushing and time.monotonic() < deadline:
                    time.sleep(0.1)
                    self.poll()
        except KeyboardInterrupt:
            pass
        if self._push is not None:
            self._cancel(*self._push)

    def _start(self) -> None:
        package = str(Path(nanogpt_hf.__file__).parents[1])
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}  # the push is no rank
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed when it ends)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nanogpt_hf", *self.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # out of reach of a signal to the run's process group
        )
        self._push = (process, output)

    def _report(self, process: subprocess.Popen, output: IO[str]) -> None:
        output.seek(0)
        lines = [line for line in output.read().split("\n") if line.strip()]
        line = lines[-1] if lines else f"push ended with exit status {process.returncode}"
        output.close()
        self._push = None
        if process.returncode == 0:
            commit = line.partition(" (")[0]
            if commit not in self._logged:  # else nothing had changed
                logger.info(f"hub: {line}")
            self._logged = {commit}
        elif self._finishing:
            logger.warning(f"hub: {line}; {self._by_hand()}")
        elif line not in self._logged:  # the next model tries again; the same error is logged once
            self._logged.add(line)
            logger.warning(f"hub: {line}; training continues")

    def _by_hand(self) -> str:
        return f"by hand: python cli.py {shlex.join(self.command)}"

    def _cancel(self, process: subprocess.Popen, output: IO[str]) -> None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(staging_folder(self.folder, process.pid), ignore_errors=True)
        output.close()
        self._push = None
        logger.warning(f"hub: the last push was cancelled; {self._by_hand()}")


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt: the run is saved, so a signal can only stop the waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
