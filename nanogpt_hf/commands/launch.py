"""Run a command in the processes that an accelerate config describes, and return its exit status.

nanogpt-hf launch [--config_file F] [other options of accelerate launch] COMMAND ...

Exit status: 0 done; 2 an error of the user; 75 stopped after saving (--auto-resume continues);
1 any other failure. SIGTERM, SIGINT, SIGUSR1 or SIGHUP, sent to this process or to all that it
started, stops a training run after its current step and saves, however long that takes. The path
of a script in place of COMMAND is launched unchanged.

accelerate 1.15 does not know these settings. They may be in the parallelism_config of the config,
or options, and this command passes them on as PARALLELISM_CONFIG_PP_SIZE and so on:

  parallelism_config_pp_size        number of pipeline stages
  parallelism_config_pp_schedule    1f1b or zero_bubble
  parallelism_config_ep_size        data-parallel processes that share one copy of the experts
  parallelism_config_ddp_comm_hook  bf16 or fp16, the type in which DDP sends gradients

It also passes on fsdp_activation_checkpointing, of the config's fsdp_config, without FSDP.
"""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from nanogpt_hf.config.aliases import suggestion
from nanogpt_hf.console import show, show_end
from nanogpt_hf.distributed.environment import (
    check_accelerate_config,
    check_environment,
    check_launch_options,
    read_accelerate_config,
)
from nanogpt_hf.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError, one_line
from nanogpt_hf.interrupts import EXIT_INTERRUPTED, end_interrupted, show_interrupted
from nanogpt_hf.program import LAUNCHER, as_started, program

_OUR_OPTIONS = [
    f"parallelism_config_{name}" for name in ("pp_size", "pp_schedule", "ep_size", "ddp_comm_hook")
]
# A setting of accelerate's, which accelerate passes on only with FSDP.
_PASSED_ON = [*_OUR_OPTIONS, "fsdp_activation_checkpointing"]


def run(words: list[str], commands: Collection[str]) -> int:
    """Launch a command; return its exit status.

    `words` are accelerate's options, the command and its arguments.
    """
    if words[:1] in (["--help"], ["-h"]):
        show(f"{as_started(__doc__)}\n`accelerate launch --help` lists accelerate's options.")
        return 0
    # These imports take seconds.
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = _parse(words, commands)
    check_environment()
    received = _pass_signals_on()
    # torch's launcher logs the end of the processes, which they or `_status` print already.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").addFilter(leave_out_threads)
    try:
        launch_command(arguments)
        return 0
    except subprocess.CalledProcessError as error:
        statuses = {0: error.returncode}
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except Exception as error:
        # Accelerate's checks of the config raise errors of any type, before anything is started.
        raise UserError(f"accelerate launch: {one_line(error)}") from error
    return _status(statuses, stopped=bool(received))


def leave_out_threads(record: logging.LogRecord) -> bool:
    """Leave the number of CPU threads out of accelerate's warning about options that were not
    given; False if the warning names no other option.

    Accelerate chooses it well by itself, and the run logs it.
    """
    lines = str(record.msg).splitlines()
    kept = [line for line in lines if "`--num_cpu_threads_per_process`" not in line]
    record.msg = "\n".join(kept)
    return kept == lines or any(line.lstrip().startswith("`--") for line in kept)


def _parse(words: list[str], commands: Collection[str]) -> argparse.Namespace:
    """Parse the arguments of `accelerate launch`. Ours, which it does not know, go to the
    environment.

    Raises UserError for an unknown option or command, or a wrong config.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    # argparse prints the usage of all 80 options before its error.
    parser.error = _refuse
    for name in _OUR_OPTIONS:
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args(words)
    # A shell does not expand the ~ of --config_file=~/x.
    for name in ("config_file", "training_script"):
        if value := getattr(arguments, name):
            setattr(arguments, name, os.path.expanduser(value))
    # Like accelerate: without --config_file, the config that `accelerate config` has written.
    default = default_config_file if os.path.isfile(default_config_file) else None
    file = arguments.config_file or default
    settings = _read_config(file, vars(arguments)) if file else {}
    # An option on the command line wins over the config, as for accelerate's own.
    given = getattr(arguments, "nondefault", ())
    check_launch_options({name: getattr(arguments, name, None) for name in given})
    stated = (settings.get("parallelism_config") or {}) | (settings.get("fsdp_config") or {})
    for name in _PASSED_ON:
        value = vars(arguments)[name] if name in given else stated.get(name)
        if value is not None:
            os.environ[name.upper()] = str(value)
    # GPUs are not looked at for a run on CPUs.
    if not (arguments.cpu or settings.get("use_cpu")):
        where = "" if arguments.gpu_ids else f"--config_file {file}: "
        _check_gpu_ids(arguments.gpu_ids or settings.get("gpu_ids"), where)
    command = arguments.training_script
    if command == "launch":
        raise UserError(f"{program()} launch: launch: starts a command; give another COMMAND")
    if command in commands:
        # Start the processes as this one was started: by cli.py, or as the installed package.
        as_script = Path(sys.argv[0]).name == "cli.py"
        arguments.module = not as_script
        arguments.training_script = sys.argv[0] if as_script else "nanogpt_hf"
        os.environ[LAUNCHER] = program()
        arguments.training_script_args = [command, *arguments.training_script_args]
    elif not os.path.exists(command):
        near = suggestion(command, commands)
        raise UserError(
            f"{program()} launch: {command}: no such command{near}; see {program()} --help"
        )
    return arguments


def _check_gpu_ids(ids: str | None, where: str) -> None:
    """Raises UserError for the number of a GPU that is not here."""
    # CUDA ignores such a number, and a single process would train on the CPU without a word.
    if ids in (None, "all") or os.environ.get("CUDA_VISIBLE_DEVICES"):
        return
    import torch

    count = torch.accelerator.device_count()
    for word in map(str.strip, ids.split(",")):
        if word.isdecimal() and int(word) >= count:
            raise UserError(
                f"{program()} launch: {where}gpu_ids {ids}: no GPU {word} here; "
                f"this machine has {count}"
            )


def _pass_signals_on() -> list[int]:
    """Pass signals that stop a run on to the processes started; return those received."""
    import psutil

    received = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        children = psutil.Process().children()
        if not children:
            # Nothing was started yet. Not by an exception, since something may be imported.
            if number == signal.SIGINT:
                end_interrupted()
            os._exit(EXIT_STOPPED)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Ctrl-C reaches the children of this session itself, but not those that torch's
                # launcher starts.
                reached = number == signal.SIGINT and os.getsid(child.pid) == os.getsid(0)
                child.send_signal(signal.SIGTERM if reached else number)

    # torch's launcher would kill its processes 30 seconds after one of these signals, which is too
    # early for a large checkpoint. So it is told to handle another signal.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        # Under nohup a closed terminal is to be ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    return received


def _read_config(file: str, options: Collection[str]) -> dict[str, Any]:
    """Read the settings of an accelerate config. Raises UserError if it has none, or wrong ones."""
    settings = read_accelerate_config(file)
    check_accelerate_config(file, settings, options)
    return settings


def _status(statuses: dict[int, int], stopped: bool) -> int:
    """Make one exit status of the processes' statuses."""
    # A mistake of the user or a stop is common to all processes, though the launcher may have ended
    # some of them by a signal first.
    if EXIT_USER_ERROR in statuses.values():
        return EXIT_USER_ERROR
    if stopped or EXIT_STOPPED in statuses.values():
        # Also if a process was killed while it saved: the newest complete checkpoint remains.
        if not {EXIT_STOPPED, EXIT_INTERRUPTED} & set(statuses.values()):
            show_interrupted()
        return EXIT_STOPPED
    for rank, status in statuses.items():
        # SIGTERM is how the launcher ends the others when one has failed.
        if status < 0 and -status != signal.SIGTERM:
            show_end(f"process {rank} was killed by {signal.Signals(-status).name}", sys.stderr)
    # A single process keeps its own status, such as doctor's 1, unless a signal ended it.
    return max(1, statuses[0]) if len(statuses) == 1 and 0 in statuses else 1


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{program()} launch: {message}; see accelerate launch --help")
