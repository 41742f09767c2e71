"""Run a user's Python code: with a time limit, and without a trace in this process's settings."""

import inspect
import os
import runpy
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch

from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.time_limit import TimeUpError, time_limit

_IMPORT_SECONDS = 300.0  # the limit for importing a user's file, which may load a model
# Settings of the whole process that reward models change, and on which the numbers of training
# depend: a getter and a setter each.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    # A stated device, even the CPU, is a mode that every call of torch passes.
    (torch.get_default_device, lambda _: torch.set_default_device(None)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
]


class UserCodeError(Exception):
    """A user's code has failed; the message continues a sentence about it: `raises ...`."""


def is_deferred(function: Callable[..., Any]) -> bool:
    """Whether a call of a function, or of an object like one, returns no result but a coroutine or
    a generator.
    """
    kinds = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    called = (function, type(function).__call__)
    return any(kind(part) for kind in kinds for part in called)


@contextmanager
def user_code(seconds: float) -> Iterator[None]:
    """Context for a user's code: its errors and a time limit raise UserCodeError.

    The end of the context restores the current folder, and torch's settings.
    """
    before = [get() for get, _ in _SETTINGS]
    try:
        with time_limit(seconds), chdir(os.curdir), torch.enable_grad():
            yield
    except KeyboardInterrupt:
        raise
    except TimeUpError:
        raise UserCodeError(f"takes more than {seconds:g} seconds") from None
    except BaseException as error:
        # Also sys.exit(). Not str(error), which is the user's code, too, and may raise.
        what = traceback.format_exception_only(error)[-1]
        raise UserCodeError(f"raises {one_line(what, 150)}") from None
    finally:
        for (get, set_again), value in zip(_SETTINGS, before, strict=True):
            # Setting a device again, even the same one, would slow down every call of torch.
            if get() != value:
                set_again(value)


def run_file(knob: str, path: Path) -> dict[str, Any]:
    """Run a Python file of the user's, and return its names. Raises UserError if it fails."""
    # Path.is_file raises an error for a name that is too long.
    if not os.path.isfile(path):
        raise UserError(f"{knob}: {path!s:.200}: no such file")
    try:
        with user_code(_IMPORT_SECONDS):
            return runpy.run_path(str(path))
    except UserCodeError as error:
        raise UserError(f"{knob}: {path} cannot be imported: it {error}") from None
