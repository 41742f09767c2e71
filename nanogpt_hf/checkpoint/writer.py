"""Save checkpoints in the background: each process copies its parts to CPU memory, and a thread
writes them.

A checkpoint is whole or absent. Three steps write it, and only the first stops the training:

1. `save`: each process copies its own parts of weights and optimizer state to CPU memory. If
   several processes have the same part, one of them copies it.
2. `_write`: a thread of each process writes these parts into files in a hidden folder.
3. `_complete`: when all files are complete, the main process adds the run state and gives the
   folder its name, in one rename. If it alone writes, its thread does that. Else the main thread
   does it between two steps, since it needs a collective to know that the others are done.
"""

import dataclasses
import logging
import socket
import threading
import traceback
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor

from nanogpt_hf.checkpoint.files import MODEL, OPTIMIZER, file_names, write_state
from nanogpt_hf.checkpoint.reader import recovery_advice
from nanogpt_hf.distributed.full_state import FullState, Tensors, own_weights
from nanogpt_hf.errors import DivergedError, Stopped
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
# Seconds between two polls of the thread.
_POLL = 0.05


@dataclasses.dataclass(frozen=True)
class _Save:
    """A checkpoint to write: the run state, and this process's parts of tensors by kind."""

    state: TrainState
    # The run state as values of JSON.
    facts: dict[str, Any]
    parts: dict[str, dict[str, Part]]
    # The ranks that have parts.
    writers: list[int]


@dataclasses.dataclass
class _Report:
    """Records what a process has written: checksums by file, and `layout_lines` of its tensors."""

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: set[str] = dataclasses.field(default_factory=set)


class CheckpointWriter:
    """Saves the checkpoints of a run. A context: at its end the last checkpoint is complete.

    With several processes all of them call each method.
    """

    def __init__(self, accelerator: Accelerator, run: RunFolder, keep: int):
        self.accelerator = accelerator
        self.run = run
        self.keep = keep
        self._rank = accelerator.process_index
        self._world_size = accelerator.num_processes
        # CPU memory for the copies, kept from one checkpoint to the next: pinned memory is slow to
        # allocate
        self.buffers: dict[str, torch.Tensor] = {}
        # the checkpoint that is not known to be complete, if there is one
        self._save: _Save | None = None
        self._thread = threading.Thread()
        # what the thread of this process has written, or why it could not
        self._report: _Report | Exception = _Report()
        # why the last checkpoint could not be completed; only the main process has it
        self._error: Exception | None = None

    def save(self, model: Any, optimizer: AcceleratedOptimizer, state: TrainState) -> None:
        """Copy the state to CPU memory, and start to write it; waits for the checkpoint before.

        Those before the `keep` newest are removed then. Raises RunFolderError if the one before
        could not be written, and DivergedError if it had a value that is not finite.
        """
        self.wait()
        model_state = FullState(self.accelerator, model, optimizer)
        # The parts that this process saves, and the ranks that save any: under DDP rank 0 alone,
        # under FSDP2 all ranks, under HSDP the ranks of one copy.
        owned, writers = model_state.owned_boxes()
        parts = {
            MODEL: self._copy(MODEL, own_weights(self.accelerator, model), owned),
            OPTIMIZER: self._copy(OPTIMIZER, model_state.own_optimizer_state(), owned),
        }
        if self.accelerator.device.type != "cpu":
            # The copies run on the device's stream. The next step changes what they read.
            torch.accelerator.synchronize(self.accelerator.device)
        facts = {"version": VERSION, **dataclasses.asdict(state)}
        # Only fp16 has a scaler.
        scaler = self.accelerator.scaler
        facts["scaler"] = scaler and scaler.state_dict()
        self._save = _Save(dataclasses.replace(state), facts, parts, writers)
        write = self._write_alone if writers == [0] else self._write
        self._thread = threading.Thread(target=write, args=(self._save,), name="checkpoint")
        # Python does not wait for a daemon at its end: a second Ctrl-C ends the program at once.
        self._thread.daemon = True
        if self._rank in writers:
            self._thread.start()

    def _copy(self, kind: str, tensors: Tensors, owned: dict[str, Box]) -> dict[str, Part]:
        """Copy the parts that this process saves to CPU memory, without waiting for the device."""
        parts = {}
        # Only copies to pinned memory run while the host goes on.
        pin = self.accelerator.device.type == "cuda"
        # Every process walks over all tensors, also those that it does not save: ZeRO gathers
        # each of them by a collective.
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
        """Complete the last checkpoint if all its files are written; raises as `save` does."""
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
        # The trigger is a flag that one process sets and all see: here `not written yet`.
        if self._thread.is_alive():
            self.accelerator.set_trigger()
        return not self.accelerator.check_trigger()

    def _finish(self, save: _Save) -> None:
        # It is not tried again: the run ends with the error, or the next checkpoint is newer.
        self._save = None
        # If the main process writes alone, its thread has completed the checkpoint already.
        if save.writers != [0]:
            reports = gather_object([self._report])
            if self._rank == 0:
                self._complete(save, [reports[writer] for writer in save.writers])
        errors = [self._error]
        self._error = None
        # All processes raise the main one's error: a run must not go on without the others.
        if self._world_size > 1:
            broadcast_object_list(errors, from_process=0)
        if errors[0] is not None:
            raise errors[0]

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Stopped):
            self.wait()
        # A KeyboardInterrupt is the second Ctrl-C: the user does not want to wait.
        elif self._thread.is_alive() and not isinstance(error, KeyboardInterrupt):
            # Its own error is not raised: the error of the run came first.
            self._thread.join()

    def _write_alone(self, save: _Save) -> None:
        """Run as the thread if no other process writes."""
        self._write(save)
        self._complete(save, [self._report])

    def _write(self, save: _Save) -> None:
        """Run as the thread: write this process's files into the hidden folder."""
        # No reader takes a hidden folder for a checkpoint; the next start removes it.
        folder = hidden(self.run.checkpoint(save.state.step))
        number = save.writers.index(self._rank)
        report = _Report()
        self._report = report
        try:
            # Not its parents, as in `replaced_folder`.
            folder.mkdir(exist_ok=True)
            for kind, parts in save.parts.items():
                file = file_names(kind, len(save.writers))[number]
                report.checksums[file] = write_tensors(folder / file, parts)
                layout = {name: (part.shape, part.values.dtype) for name, part in parts.items()}
                report.tensors |= layout_lines(kind, layout)
        # Errors of a thread are raised where all processes meet: in `_finish`.
        except OSError as error:
            where = f"process {self._rank} on {socket.gethostname()}: " if self._rank else ""
            self._report = OSError(f"{where}{error}")
        except NotFiniteError as error:
            self._report = error
        except Exception:
            # A bug. An exception from another process has no traceback, so this is its text.
            self._report = RuntimeError(traceback.format_exc())

    def _complete(self, save: _Save, reports: list[_Report | Exception]) -> None:
        """Give the hidden folder its name; only the main process calls it."""
        step = save.state.step
        target = self.run.checkpoint(step)
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
            self._error = self.run.write_error(target, error)
        except Exception as error:
            self._error = error
