"""The command line in a fork of the test's process: a new process without the time to import
torch.

OpenMP's threads do not survive a fork, so a process with several threads starts Python again.
"""

import logging
import os
import signal
import sys
import time
import traceback
import warnings

import torch

COMMAND = "import sys; sys.argv[0] = 'cli.py'; import nanogpt_hf.__main__ as m; m.run_program()"


def _become_new_process(
    arguments: list[str], streams: dict[int, int | None], folder: str | None, terminal: str | None
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    if terminal:
        os.setsid()
        # the first terminal that a session opens becomes its controlling one
        opened = os.open(terminal, os.O_RDWR)
        streams = dict.fromkeys(range(3), opened)
    for descriptor, stream in streams.items():
        os.close(descriptor) if stream is None else os.dup2(stream, descriptor)
    os.closerange(3, 4096)  # such as the other end of a terminal
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout, sys.stderr = (
        None
        if streams.get(number, number) is None
        else os.fdopen(number, "w", 1 if os.isatty(number) else -1, closefd=False, encoding="utf-8")
        for number in (1, 2)
    )
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    sys.argv = ["cli.py", *arguments]
    if folder:
        os.chdir(folder)


class Forked:
    """A process that runs `cli.py` with these arguments. `terminal` is the path of its controlling
    terminal.

    `streams` are its descriptors, None for one that is closed.
    """

    def __init__(self, arguments: list, *, streams=None, folder=None, terminal: str | None = None):
        self.status = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _become_new_process(list(map(str, arguments)), streams or {}, folder, terminal)
                if torch.get_num_threads() > 1:
                    os.execv(sys.executable, [sys.executable, "-c", COMMAND, *sys.argv[1:]])
                # Not above: the program's first line changes what Ctrl-C does in this process.
                from nanogpt_hf.__main__ import run_program

                run_program()
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float) -> int:
        """The exit status; kills the process and fails if it takes longer than this."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"the command did not end within {seconds} s")
            time.sleep(0.02)
        return self.status
