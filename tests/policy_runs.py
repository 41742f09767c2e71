"""Runs of `rl` in one folder, which differ by their knobs."""

from collections.abc import Callable
from pathlib import Path

from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder


def policy_words(folder: Path, start: list[str], knobs: dict) -> Callable[..., list[str]]:
    """A function to the words after `rl` for a run folder's name: those of `start`, and `knobs`,
    with other knobs (`rl__samples=4`).
    """

    def words(name: str, **others) -> list[str]:
        values = knobs | {key.replace("__", "."): value for key, value in others.items()}
        options = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        return [*start, "--task", "arithmetic", "--run-dir", str(folder / name), *options]

    return words


def policy_trainer(
    folder: Path, words: Callable[..., list[str]], forget: Callable[[], None]
) -> Callable[..., RunFolder]:
    """A function that trains with the words of a name, flags and knobs, and returns the run."""

    def train(name: str, *flags: str, **knobs) -> RunFolder:
        forget()
        assert main(["rl", *words(name, **knobs), *flags]) == 0
        forget()
        return RunFolder(folder / name)

    return train
