"""Pushing as a run goes, in a process of its own: whatever the Hub and the network do, training goes on."""

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

import nanogpt_hf
from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.export.hub import staging_folder
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)

_PATIENCE = 600.0  # seconds that a run which is done waits for its last push
_PATIENCE_STOPPED = 10.0  # and one that was asked to stop: launchers kill after 30


class BackgroundPush:
    """Runs `push FOLDER hub.repo` beside training, one push at a time; does nothing unless the recipe asks for it."""

    def __init__(self, hub: HubSection, folder: RunFolder, *, is_main: bool = True):
        self.hub, self.active = hub, is_main and hub.push is not None
        self.folder = folder.best if hub.push == "best" else folder.final
        self.command = ["push", str(self.folder), str(hub.repo), *["--private"] * hub.private]
        self._process: subprocess.Popen | None = None
        self._output = None
        self._waiting = False  # something newer than what is being pushed
        self._said: set[str] = set()
        self._ending = False

    def new_model(self, folder: Path) -> None:
        """`folder` was written anew. A push that is under way ends first; the newest model is the next."""
        if self.active and folder == self.folder:
            self._waiting = True
            self.poll()

    def poll(self) -> None:
        """Report a push that has ended and start one that waits. Takes no time."""
        if self._process is not None and self._process.poll() is not None:
            self._report()
        if self._waiting and self._process is None:
            self._waiting = False
            self._start()

    def finish(self, done: bool) -> None:
        """Wait for what is under way, for a bounded time, and say how to push by hand where that was not enough.

        A run that is done pushes once more: weights that the Hub has do not travel again, metrics and curve do.
        """
        if not self.active:
            return
        self._ending = True
        if done and self.folder.is_dir():
            self.new_model(self.folder)
        if self._process is not None:
            logger.info(f"hub: pushing {self.folder} to {self.hub.repo}; Ctrl-C leaves it")
        deadline = time.monotonic() + (_PATIENCE if done else _PATIENCE_STOPPED)
        try:
            with _signals_interrupt():
                while self._process is not None and time.monotonic() < deadline:
                    time.sleep(0.1)
                    self.poll()
        except KeyboardInterrupt:
            pass
        if self._process is not None:
            self._give_up()

    def _start(self) -> None:
        # The launcher's number for this process is not its business, nor is a signal to the run's process group.
        package = str(Path(nanogpt_hf.__file__).parents[1])
        environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by _clear)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nanogpt_hf", *self.command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def _report(self) -> None:
        self._output.seek(0)
        lines = self._output.read().split("\n")
        line = next((line for line in reversed(lines) if line.strip()), f"ended with {self._process.returncode}")
        failed = self._process.returncode != 0
        self._clear()
        if not failed:
            commit = line.partition(" (")[0]
            if commit not in self._said:  # else nothing had changed
                logger.info(f"hub: {line}")
            self._said = {commit}
        elif self._ending:
            logger.warning(f"hub: {line}; {self._by_hand()}")
        elif line not in self._said:  # what fails is tried again with the next model, and said once
            self._said.add(line)
            logger.warning(f"hub: {line}; training goes on")

    def _by_hand(self) -> str:
        return f"by hand: python cli.py {shlex.join(self.command)}"

    def _give_up(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(staging_folder(self.folder, self._process.pid), ignore_errors=True)
        self._clear()
        logger.warning(f"hub: the last push was given up; {self._by_hand()}")

    def _clear(self) -> None:
        self._output.close()
        self._process = self._output = None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt: everything is saved, so there is nothing to stop but the waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
