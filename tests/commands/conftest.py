"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.training import sweep


@pytest.fixture
def in_process(monkeypatch, forget_accelerate):
    """Train the runs of `sweep` in this process; return their folders' names, in order."""
    started = []

    def run(command, stop):
        arguments = command[command.index("nanogpt_hf") + 1 :]
        started.append(Path(arguments[arguments.index("--run-dir") + 1]).name)
        forget_accelerate()
        return main(arguments)

    monkeypatch.setattr(sweep, "run_process", run)
    return started
