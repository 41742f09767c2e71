"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from nanogpt_hf import generate
from nanogpt_hf.commands import main
from nanogpt_hf.training import sweep


@pytest.fixture
def in_process(monkeypatch, forget_accelerate, empty_plots):
    """Train the runs of `sweep` in this process; return their folders' names, in order."""
    started = []

    def run(command, stop):
        arguments = command[command.index("nanogpt_hf") + 1 :]
        started.append(Path(arguments[arguments.index("--run-dir") + 1]).name)
        forget_accelerate()
        return main(arguments)

    monkeypatch.setattr(sweep, "run_process", run)
    return started


@pytest.fixture
def scripted(monkeypatch):
    """Replace the model's answers; return the list of (prompt ids, max_new_tokens) that it was
    called with.
    """
    calls = []

    def script(*answers):
        remaining = list(answers)

        def generate_tokens(model, ids, *, max_new_tokens, **options):
            calls.append((ids, max_new_tokens))
            answer = remaining.pop(0)
            for token in answer[:max_new_tokens]:
                if token is KeyboardInterrupt:
                    raise KeyboardInterrupt
                yield [token]

        monkeypatch.setattr(generate, "generate_tokens", generate_tokens)
        return calls

    return script
