"""Save checkpoints in the background: each process copies its parts to CPU memory, and a thread
writes them.

A checkpoint is whole or absent. The processes that have parts write them into a hidden folder.
When all files are complete, the main process gives the folder its name: in its thread if no other
process writes, else between two steps.
"""

import dataclasses
import json
import logging
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor

from nanogpt_hf.checkpoint.reader import (
    CHECKSUMS,
    MODEL,
    OPTIMIZER,
    STATE,
    file_digest,
    file_names,
    recovery_advice,
)
from nanogpt_hf.distributed.full_state import FullState, Tensors, own_weights
from nanogpt_hf.errors import DivergedError, RunFolderError, Stopped
from nanogpt_hf.place import hidden, replaced_folder
from nanogpt_hf.runs.folder import VERSION, RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.runs.tensor_files import (
    Box,
    NotFiniteError,
    Part,
    layout_digest,
    layout_lines,
    write_tensors,
)

logger = logging.getLogger(__name__)
_POLL = 0.05  # seconds between two polls of the thread


@dataclasses.dataclass(frozen=True)
class _Save:
    """A checkpoint to write: the run state, and this process's parts of tensors by kind."""

    state: TrainState
    facts: dict[str, Any]  # the run state as values of JSON
    parts: dict[str, dict[str, Part]]
    writers: list[int]  # ranks that have parts


@dataclasses.dataclass
class _Report:
    """What a process has written: checksums by file, and `layout_lines` of its tensors."""

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: set[str] = dataclasses.field(default_factory=set)


class CheckpointWriter:
    """Saves the checkpoints of a run. A context: at its end the last checkpoint is complete.

    With several processes all of them call each method.
    """

    def __init__(self, accelerator: Accelerator, run: RunFolder, keep: int):
        self.accelerator, self.run, self.keep = accelerator, run, keep
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        # CPU memory, kept from one checkpoint to the next
        self.buffers: dict[str, torch.Tensor] = {}
        self._save: _Save | None = None  # the one that is not known to be complete
        self._thread = threading.Thread()
        self._report: _Report | Exception = _Report()  # of this process
        self._error: Exception | None = None

    def save(self, model: Any, optimizer: AcceleratedOptimizer, state: TrainState) -> None:
        """Copy the state to CPU memory, and start to write it; waits for the checkpoint before.

        Those before the `keep` newest are removed then. Raises RunFolderError if the one before
        could not be written, and DivergedError if it had a value that is not finite.
        """
        self.wait()
        model_state = FullState(self.accelerator, model, optimizer)
        owned, writers = model_state.owned_boxes()
        parts = {
            MODEL: self._copy(MODEL, own_weights(self.accelerator, model), owned),
            OPTIMIZER: self._copy(OPTIMIZER, model_state.own_optimizer_state(), owned),
        }
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)
        facts = {"version": VERSION, **dataclasses.asdict(state)}
        scaler = self.accelerator.scaler  # of fp16
        facts["scaler"] = scaler and scaler.state_dict()
        self._save = _Save(dataclasses.replace(state), facts, parts, writers)
        write = self._write_alone if writers == [0] else self._write
        self._thread = threading.Thread(target=write, args=(self._save,), name="checkpoint")
        self._thread.daemon = True
        if self._rank in writers:
            self._thread.start()

    def _copy(self, kind: str, tensors: Tensors, owned: dict[str, Box]) -> dict[str, Part]:
        """Copy the parts that this process saves to CPU memory, without waiting for the device."""
        parts, pin = {}, self.accelerator.device.type == "cuda"
        for name, tensor in tensors:
            if (box := owned.get(name)) is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self.buffers.get(f"{kind}.{name}")
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin)
                self.buffers[f"{kind}.{name}"] = buffer
            buffer.copy_(local, non_blocking=True)
            parts[name] = Part(tuple(tensor.shape), box, buffer)
        return parts

    def poll(self) -> None:
        """Complete the last checkpoint if all its files are written; raises what `save` does."""
        if self._save is not None and self._is_written():
            self._finish(self._save)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raises as `poll`.

        With several processes it polls by a collective, which fails if one of them is lost.
        """
        while self._save is not None:
            if self._thread.is_alive():
                self._thread.join(_POLL)
            self.poll()

    def _is_written(self) -> bool:
        """Whether the threads of all processes have ended; a collective."""
        if self._world_size == 1:
            return not self._thread.is_alive()
        if self._thread.is_alive():
            self.accelerator.set_trigger()
        return not self.accelerator.check_trigger()

    def _finish(self, save: _Save) -> None:
        self._save = None
        if save.writers != [0]:
            reports = gather_object([self._report])
            if self._rank == 0:
                self._complete(save, [reports[writer] for writer in save.writers])
        errors = [self._error]
        self._error = None
        if self._world_size > 1:
            broadcast_object_list(errors, from_process=0)
        if errors[0] is not None:
            raise errors[0]

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Stopped):
            self.wait()
        # KeyboardInterrupt: the second Ctrl-C; the next start removes the hidden folder
        elif self._thread.is_alive() and not isinstance(error, KeyboardInterrupt):
            self._thread.join()  # its own error is not raised: that of the run came first

    def _write_alone(self, save: _Save) -> None:
        """The thread if no other process writes."""
        self._write(save)
        self._complete(save, [self._report])

    def _write(self, save: _Save) -> None:
        """The thread: write this process's files into the hidden folder."""
        folder = hidden(self.run.checkpoint(save.state.step))
        number, count = save.writers.index(self._rank), len(save.writers)
        report = self._report = _Report()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind, parts in save.parts.items():
                file = file_names(kind, count)[number]
                report.checksums[file] = write_tensors(folder / file, parts)
                layout = {name: (part.shape, part.values.dtype) for name, part in parts.items()}
                report.tensors |= layout_lines(kind, layout)
        except OSError as error:
            where = f"process {self._rank} on {socket.gethostname()}: " if self._rank else ""
            self._report = OSError(f"{where}{error}")
        except NotFiniteError as error:
            self._report = error
        except Exception:  # a bug: raised on all processes, with this traceback
            self._report = RuntimeError(traceback.format_exc())

    def _complete(self, save: _Save, reports: list[_Report | Exception]) -> None:
        """Give the hidden folder its name; only the main process calls it."""
        target, step = self.run.checkpoint(save.state.step), save.state.step
        try:
            with replaced_folder(target, filled=True) as partial:
                whole = _Report()
                for report in reports:
                    if isinstance(report, Exception):
                        raise report
                    whole.checksums |= report.checksums
                    whole.tensors |= report.tensors
                facts = save.facts | {"tensors": layout_digest(whole.tensors)}
                write_state(partial, facts, whole.checksums)
            logger.debug(f"step {step:,}: saved {target}")
            self.run.checkpoint_written(step, save.state.last_finite_step, self.keep)
        except NotFiniteError as error:
            self._error = DivergedError(
                f"step {step:,}: {error} is not finite, so no checkpoint was written; lower "
                f"optim.learning_rate and {recovery_advice(self.run, save.state)}"
            )
        except OSError as error:
            self._error = RunFolderError(
                f"{target}: the checkpoint cannot be written, older ones are intact: {error}"
            )
        except Exception as error:
            self._error = error


def write_state(folder: Path, facts: dict[str, Any], checksums: dict[str, str]) -> None:
    """Write the run state, and the checksums of it and of the files with tensors."""
    (folder / STATE).write_text(f"{json.dumps(facts, indent=2)}\n", encoding="utf-8")
    checksums = checksums | {STATE: file_digest(folder / STATE)}
    text = json.dumps(checksums, indent=2, sort_keys=True)
    (folder / CHECKSUMS).write_text(f"{text}\n", encoding="utf-8")
