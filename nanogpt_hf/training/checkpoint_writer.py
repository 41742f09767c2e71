"""Save checkpoints in the background: each process copies its parts to CPU memory, and a thread writes them.

A checkpoint is whole or absent. The processes that hold parts write into a hidden folder and report the checksums. When
all files are complete, the main process gives the folder its name.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor

from nanogpt_hf.distributed.accelerator import is_sharded
from nanogpt_hf.distributed.channel import Channel
from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.full_state import (
    held_optimizer_state,
    held_weights,
    owned_boxes,
    scaler_state,
)
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process
from nanogpt_hf.distributed.signals import StopRequest
from nanogpt_hf.errors import DivergedError, LostProcess, RunFolderError, Stopped
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.replace import partial_of, replaced_folder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.runs.tensor_files import Box, NotFiniteError, Part, write_tensors
from nanogpt_hf.training.checkpoint import CHECKSUMS, MODEL, OPTIMIZER, STATE, file_digest, recovery_advice, tensor_file

logger = logging.getLogger(__name__)
_POLL = 0.05  # seconds between two polls of the thread
_GRACE = 10.0  # seconds to wait for other processes after an error of this one
_numbers = itertools.count()  # of the saves of this process, the same on all


@dataclasses.dataclass(frozen=True)
class _Save:
    """A checkpoint to write: the run state, and this process's parts of tensors by kind."""

    state: TrainState
    facts: str  # the run state as JSON
    parts: dict[str, dict[str, Part]]
    writers: list[int]  # ranks that have parts
    key: str  # of its messages to other processes


def check_shared_folder(accelerator: Accelerator, run: RunFolder) -> None:
    """Raises RunFolderError on all processes if a sharded model's run folder is not seen by all of them."""
    if not is_sharded(accelerator):
        return  # the main process writes alone
    name: list[str] = [f".{secrets.token_hex(6)}.partial"]  # the name of leftovers that RunFolder.lock removes
    broadcast_object_list(name, from_process=0)
    probe, seen = run.path / name[0], False
    with contextlib.suppress(OSError):  # a full disk, which the first write reports; another host's file system
        if accelerator.is_main_process:
            probe.touch()
        accelerator.wait_for_everyone()
        seen = probe.exists()
    processes = gather_object([(socket.gethostname(), seen)])
    if accelerator.is_main_process:
        probe.unlink(missing_ok=True)
    without = sorted({host for host, sees in processes if not sees})
    if without and any(sees for _, sees in processes):  # none sees it on a full disk
        raise RunFolderError(
            f"{run.path}: {', '.join(without)} does not see this folder, into which all processes of a sharded model "
            "write: name one in a file system that all machines mount (NFS, Lustre, ...) by --run-dir, or use "
            "accelerate_configs/multi_node_ddp.yaml, which needs none"
        )


class CheckpointWriter:
    """Saves the checkpoints of a run. A context: at its end the last checkpoint is complete.

    With several processes all of them call each method.
    """

    def __init__(self, accelerator: Accelerator, run: RunFolder, keep: int):
        self.accelerator, self.run, self.keep = accelerator, run, keep
        self.stop: StopRequest | None = None  # requested if a checkpoint cannot be written
        self._rank, self._world_size = Mesh.from_environment().rank, Mesh.from_environment().world_size
        self.buffers: dict[str, torch.Tensor] = {}  # CPU memory, kept from one checkpoint to the next
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._channel = Channel()  # between the threads of the processes

    def save(self, model: torch.nn.Module, optimizer: AcceleratedOptimizer, state: TrainState) -> None:
        """Copy the state to CPU memory, and start to write it as a checkpoint; waits for the one before.

        The checkpoints before the `keep` newest are removed then. Raises RunFolderError if the one before could not be
        written, and DivergedError if it had a value that is not finite; older checkpoints are not changed.
        """
        self.wait()
        if self._world_size > 1:
            self._channel.connect("checkpoints")
        owned, writers = owned_boxes(self.accelerator, model, optimizer)
        parts = {
            MODEL: self._copy(MODEL, held_weights(self.accelerator, model), owned),
            OPTIMIZER: self._copy(OPTIMIZER, held_optimizer_state(self.accelerator, model, optimizer), owned),
        }
        if state.step > 0 and not (optimizer.state or is_zero(self.accelerator)) and optimizer.param_groups:
            raise RuntimeError("there is no optimizer state to save")
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)
        facts = dataclasses.asdict(state) | {"scaler": scaler_state(self.accelerator, optimizer)}
        key = f"{next(_numbers)}"
        save = _Save(dataclasses.replace(state), json.dumps(facts, indent=2) + "\n", parts, writers, key)
        self._thread = threading.Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _copy(self, kind: str, tensors: Iterable[tuple[str, torch.Tensor]], owned: dict[str, Box]) -> dict[str, Part]:
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

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises what `save` names if it could not be written.

        With several processes it polls by a collective, which fails if one of them is lost.
        """
        while self._thread is not None:
            self._thread.join(None if self._world_size == 1 else _POLL)
            if self._thread.is_alive():
                self.accelerator.set_trigger()
            if self._world_size == 1 or not self.accelerator.check_trigger():
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_after_error(self) -> None:
        """Wait for the last checkpoint, but only briefly for other processes, which may be lost."""
        failed_at = time.monotonic()
        while self._thread is not None and self._thread.is_alive() and not self._channel.abandoned:
            self._thread.join(_POLL)
            since = self._channel.waiting_since
            self._channel.abandoned = since is not None and time.monotonic() - max(since, failed_at) > _GRACE

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):  # the second Ctrl-C; the next start removes the hidden folder
            self._wait_after_error()  # the error of the run came first

    def _write(self, save: _Save) -> None:
        """The thread: write this process's files, and wait until the checkpoint is complete."""
        try:
            with one_line_for_a_lost_process():
                if self._rank == 0:
                    self._write_and_commit(save)
                else:
                    self._write_own_and_report(save)
        except BaseException as error:
            self._error = error
            if self.stop is not None:
                self.stop.reason = self.stop.reason or "a checkpoint could not be written"
        if not isinstance(self._error, LostProcess):
            self._channel.finish(f"{save.key}/read", self._world_size)

    def _write_and_commit(self, save: _Save) -> None:
        target = self.run.checkpoint(save.state.step)
        result: dict[str, str] = {}
        try:
            with replaced_folder(target) as partial:
                (partial / STATE).write_text(save.facts, encoding="utf-8")
                files = self._write_all(save, partial)
                checksums = {STATE: file_digest(partial / STATE)}
                for name, (digest, size) in sorted(files.items()):
                    if (partial / name).stat().st_size != size:
                        raise OSError(f"{name} is not complete")
                    checksums[name] = digest
                (partial / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
            logger.debug(f"step {save.state.step:,}: saved {target}")
            self.run.checkpoint_written(save.state.step, save.state.last_finite_step, self.keep)
        except NotFiniteError as error:
            result = {
                "DivergedError": (
                    f"step {save.state.step:,}: {error} is not finite, so no checkpoint was written; lower "
                    f"optim.learning_rate and {recovery_advice(self.run, save.state)}"
                )
            }
        except OSError as error:
            result = {"RunFolderError": f"{target}: the checkpoint cannot be written, older ones are intact: {error}"}
        except BaseException:
            self._channel.post(f"{save.key}/result", {"RuntimeError": traceback.format_exc()})
            raise
        self._channel.post(f"{save.key}/result", result)
        _raise_result(result)

    def _write_all(self, save: _Save, folder: Path) -> dict[str, tuple[str, int]]:
        """Write the files of all processes into `folder` of the main one; return their checksums and sizes."""
        others = [rank for rank in save.writers if rank]
        for rank in others:
            self._channel.post(f"{save.key}/begin/{rank}", {})
        reports = [self._write_own(save, folder)]
        reports += [self._channel.wait_for(f"{save.key}/{rank}", last_reader=True) for rank in others]
        files = [_reported_files(report) for report in reports]
        return {name: written for part in files for name, written in part.items()}

    def _files_of(self, rank: int, save: _Save) -> dict[str, str]:
        number, count = save.writers.index(rank) + 1, len(save.writers)
        return {kind: tensor_file(kind, number, count) for kind in save.parts}

    def _write_own_and_report(self, save: _Save) -> None:
        result = f"{save.key}/result"
        if self._rank in save.writers:
            begin = self._channel.wait_for(f"{save.key}/begin/{self._rank}", result)
            if begin:  # the main process has failed
                _raise_result(begin)
            report = self._write_own(save, partial_of(self.run.checkpoint(save.state.step)))
            self._channel.post(f"{save.key}/{self._rank}", report)
        _raise_result(self._channel.wait_for(result))

    def _write_own(self, save: _Save, folder: Path) -> dict[str, Any]:
        """Write this process's files; return their checksums and sizes, or what the error is."""
        files = {}
        try:
            for kind, name in self._files_of(self._rank, save).items():
                files[name] = write_tensors(folder / name, save.parts[kind])
        except NotFiniteError as error:
            return {"not finite": str(error)}
        except OSError as error:
            where = f"process {self._rank} on {socket.gethostname()}: " if self._rank else ""
            return {"error": f"{where}{error}"}
        except LostProcess:
            raise
        except Exception:  # a bug, which the main process raises with this traceback
            return {"fault": traceback.format_exc()}
        return {"files": files}


def _reported_files(report: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The files of a process's report; raises its error."""
    if "not finite" in report:
        raise NotFiniteError(report["not finite"])
    if "error" in report:
        raise OSError(report["error"])
    if "fault" in report:
        raise RuntimeError(report["fault"])
    return report["files"]


def _raise_result(result: dict[str, str]) -> None:
    """Raise the error that the main process posted, as an error of that class."""
    for kind, text in result.items():
        raise {"DivergedError": DivergedError, "RunFolderError": RunFolderError}.get(kind, RuntimeError)(text)
