"""Run test files in several processes that are forks of one, which has collected the tests.

Each process of pytest-xdist imports all packages and collects all tests itself, ten seconds of
work. `--forks 3` does so once. A process takes one file at a time: the tests of a file share its
fixtures.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, metavar="N", help="run N files at a time, in forks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, if that is asked for and the collection has found no error."""
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed:
        return None  # then pytest's own loop follows
    files: dict[Path, deque[int]] = {}
    for number, item in enumerate(session.items):
        files.setdefault(item.path, deque()).append(number)
    _Parent(session, deque(files.values())).run(option.forks)
    return True


class _Parent:
    """Gives files to the processes and reports their tests."""

    def __init__(self, session: pytest.Session, files: deque[deque[int]]):
        self.session, self.config = session, session.config
        self.files = files  # numbers of their tests
        self.folder = self.config._tmp_path_factory.getbasetemp()
        self.started = 0
        # connection -> process, and the tests that it has been given and has not ended
        self.processes: dict[Connection, tuple[int, deque[int]]] = {}

    def run(self, count: int) -> None:
        try:
            for _ in range(min(count, len(self.files))):
                self.start()
            while self.processes:
                for connection in wait(list(self.processes)):
                    self.listen(connection)
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            # A process that ignores the signal, or is in a callback, finds its connection closed.
            for connection, (pid, _) in self.processes.items():
                connection.close()
                os.kill(pid, signal.SIGINT)
            for pid, _ in self.processes.values():
                os.waitpid(pid, 0)

    def start(self) -> None:
        self.started += 1
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for connection in [ours, *self.processes]:
                connection.close()
            _Child(self.session, theirs, self.folder / f"process{self.started}").run()
        theirs.close()
        self.processes[ours] = pid, deque()

    def listen(self, connection: Connection) -> None:
        """Give a file to a process that asks for one, or report the test that it has ended."""
        pid, tests = self.processes[connection]
        try:
            reports = connection.recv()
        except (EOFError, ConnectionResetError):
            del self.processes[connection]
            connection.close()
            self.ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tests)
            return
        if reports is None:
            file = self.files.popleft() if self.files else deque()
            tests.extend(file)
            connection.send(file)
        else:
            self.report(tests.popleft(), reports)

    def report(self, number: int, reports: list[tuple[str, dict]]) -> None:
        """Call pytest's hooks as a process that runs the test itself does."""
        item, hook = self.session.items[number], self.config.hook
        place = {"nodeid": item.nodeid, "location": item.location}
        hook.pytest_runtest_logstart(**place)
        for name, data in reports:
            if name == "pytest_runtest_logreport":
                read = hook.pytest_report_from_serializable
                hook.pytest_runtest_logreport(report=read(config=self.config, data=data))
            else:
                hook.pytest_warning_recorded.call_historic(kwargs=data)
        hook.pytest_runtest_logfinish(**place)

    def ended(self, status: int, tests: deque[int]) -> None:
        """Report the test in which a process died; another process runs the tests that are left."""
        if status == 0:
            return
        assert tests, f"a process ended with status {status} after its last test"
        item = self.session.items[number := tests.popleft()]
        message = f"the process that ran this test ended with status {status}"
        died = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        self.report(number, [_sent(self.config, died)])
        if tests:
            self.files.appendleft(tests)
        if self.files:
            self.start()


class _Child:
    """Runs the files that it is given."""

    def __init__(self, session: pytest.Session, connection: Connection, folder: Path):
        self.session, self.config = session, session.config
        self.connection, self.folder = connection, folder
        self.reports: list[tuple[str, dict]] = []  # of the test that runs

    def run(self) -> NoReturn:
        status = 1
        try:
            self.share_nothing()
            tests = self.tests()
            item = next(tests)
            while item:
                # Fixtures that the next test needs, too, are kept. So it is asked for before.
                following = next(tests, None)
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                self.connection.send(self.reports)
                self.reports, item = [], following
            status = 0
        except (KeyboardInterrupt, EOFError, ConnectionError):
            self.session._setupstate.teardown_exact(None)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(status)

    def share_nothing(self) -> None:
        """Have files of its own for what tests print, and a folder of its own; print nothing."""
        plugins = self.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        self.reports.clear()  # which had the warnings that other processes have sent
        self.folder.mkdir(mode=0o700)
        self.config._tmp_path_factory._basetemp = self.folder

    def tests(self) -> Iterator[pytest.Item]:
        """Ask for files until there are none."""
        while True:
            self.connection.send(None)
            file = self.connection.recv()
            if not file:
                return
            for number in file:
                yield self.session.items[number]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(_sent(self.config, report))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        # as text, since its arguments may be of any kind
        warning_message.message, warning_message.source = str(warning_message.message), None
        data = {"warning_message": warning_message, "when": when, "nodeid": nodeid}
        self.reports.append(("pytest_warning_recorded", data | {"location": location}))


def _sent(config: pytest.Config, report: pytest.TestReport) -> tuple[str, dict]:
    """A report as it is sent: the name of its hook, and data."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return "pytest_runtest_logreport", data
