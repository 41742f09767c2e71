"""Save checkpoints in the background: each process copies its parts to CPU memory, and a thread writes them.

A checkpoint is whole or absent. All processes write into a hidden folder and report their files and checksums to the
main process, through the launcher's key-value store, since a collective would wait for the training. When all files are
complete, the main process gives the folder its name.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.full_state import (
    full_optimizer_state,
    full_weights,
    held_optimizer_state,
    held_weights,
    owned_boxes,
    scaler_state,
)
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.rendezvous import connect_store, one_line_for_a_lost_process, wait_for_readers
from nanogpt_hf.distributed.signals import StopRequest
from nanogpt_hf.errors import DivergedError, LostProcess, RunFolderError, Stopped
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.replace import partial_of, replaced_folder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.runs.tensor_files import Box, NotFiniteError, Part, write_tensors
from nanogpt_hf.training.checkpoint import CHECKSUMS, MODEL, OPTIMIZER, STATE, file_digest, recovery_advice, tensor_file

logger = logging.getLogger(__name__)
_POLL = 0.05  # seconds between two polls of the store, or of the thread
_GRACE = 10.0  # seconds to wait for other processes after an error of this one
_numbers = itertools.count()  # of the saves of this process, the same on all


@dataclasses.dataclass(frozen=True)
class _Save:
    """A checkpoint to write: the run state, and this process's parts of tensors by kind."""

    state: TrainState
    facts: str  # the run state as JSON
    parts: dict[str, dict[str, Part]]
    writers: list[int]  # ranks that have parts
    key: str  # of its entries in the store


class CheckpointWriter:
    """Saves the checkpoints of a run. A context: at its end the last checkpoint is complete.

    With several processes all of them call each method.
    """

    def __init__(self, accelerator: Accelerator, run: RunFolder, keep: int):
        self.accelerator, self.run, self.keep = accelerator, run, keep
        self.stop: StopRequest | None = None  # requested if a checkpoint cannot be written
        self._rank, self._world_size = Mesh.from_environment().rank, Mesh.from_environment().world_size
        self._buffers: dict[str, torch.Tensor] = {}  # CPU memory, kept from one checkpoint to the next
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waiting_since: float | None = None  # since when the thread has waited for another process
        self._abandoned = False  # the thread should wait no longer
        self._store: Store | None = None
        self._shares_folder: bool | None = None  # None until the first save that asks

    def save(self, model: torch.nn.Module, optimizer: AcceleratedOptimizer, state: TrainState) -> None:
        """Copy the state to CPU memory, and start to write it as a checkpoint; waits for the one before.

        The checkpoints before the `keep` newest are removed then. Raises RunFolderError if the one before could not be
        written, and DivergedError if it had a value that is not finite; older checkpoints are not changed.
        """
        self.wait()
        if self._world_size > 1 and self._store is None:
            self._store = connect_store("checkpoints")
        accelerator = self.accelerator
        owned, writers = owned_boxes(accelerator, model)
        if is_zero(accelerator) or (len(writers) > 1 and not self._folder_is_shared()):
            writers = [0]
            weights = full_weights(accelerator, model).items()
            optimizer_state = full_optimizer_state(accelerator, model, optimizer).items()
            owned = {name: Box((0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in weights}
        else:
            weights = held_weights(accelerator, model)
            optimizer_state = held_optimizer_state(accelerator, model, optimizer)
        parts = {MODEL: self._copy(MODEL, weights, owned), OPTIMIZER: self._copy(OPTIMIZER, optimizer_state, owned)}
        if self._rank == 0 and state.step > 0 and not parts[OPTIMIZER]:
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
            box = owned.get(name if kind == MODEL else name.rpartition(".")[0])
            if box is not None and not tensor.dim():  # a step count belongs to the parameter's first part
                box = None if any(box.offset) else Box((), ())
            if box is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(f"{kind}.{name}")
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pin)
                self._buffers[f"{kind}.{name}"] = buffer
            buffer.copy_(local, non_blocking=True)
            parts[name] = Part(tuple(tensor.shape), box, buffer)
        return parts

    def _folder_is_shared(self) -> bool:
        """Whether all processes see the main one's run folder; tried once."""
        if self._shares_folder is not None:
            return self._shares_folder
        name = [f".{secrets.token_hex(6)}.partial"]  # of leftovers that RunFolder.lock removes
        broadcast_object_list(name, from_process=0)
        probe = self.run.path / name[0]
        if self._rank == 0:
            probe.touch()
        self.accelerator.wait_for_everyone()
        self._shares_folder = all(gather_object([probe.exists()]))
        if self._rank == 0:
            probe.unlink()
        return self._shares_folder

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
        while self._thread is not None and self._thread.is_alive() and not self._abandoned:
            self._thread.join(_POLL)
            since = self._waiting_since
            self._abandoned = since is not None and time.monotonic() - max(since, failed_at) > _GRACE

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
        if self._store is not None and not isinstance(self._error, LostProcess):
            with self._asking_others() as store:
                wait_for_readers(store, f"{save.key}/read", self._world_size)

    def _write_and_commit(self, save: _Save) -> None:
        target = self.run.checkpoint(save.state.step)
        result: dict[str, str] = {}
        try:
            with replaced_folder(target) as partial:
                (partial / STATE).write_text(save.facts, encoding="utf-8")
                self._post(f"{save.key}/begin", {})
                reports = [self._write_own(save, partial)]
                reports += [self._await(f"{save.key}/{rank}") for rank in save.writers if rank]
                for report in reports:
                    _raise_reported(report)
                checksums = {STATE: file_digest(partial / STATE)}
                for name, (digest, size) in sorted(item for report in reports for item in report["files"].items()):
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
            self._post(f"{save.key}/result", {"RuntimeError": traceback.format_exc()})
            raise
        self._post(f"{save.key}/result", result)
        _raise_result(result)

    def _write_own_and_report(self, save: _Save) -> None:
        if self._rank in save.writers:
            begin = self._await(f"{save.key}/begin", f"{save.key}/result")
            if begin:  # the main process has failed
                _raise_result(begin)
            self._post(
                f"{save.key}/{self._rank}", self._write_own(save, partial_of(self.run.checkpoint(save.state.step)))
            )
        _raise_result(self._await(f"{save.key}/result"))

    def _write_own(self, save: _Save, folder: Path) -> dict[str, Any]:
        """Write this process's files; return their checksums and sizes, or what the error is."""
        number, files = save.writers.index(self._rank) + 1, {}
        try:
            for kind, parts in save.parts.items():
                name = tensor_file(kind, number, len(save.writers))
                files[name] = write_tensors(folder / name, parts)
        except NotFiniteError as error:
            return {"not finite": str(error)}
        except OSError as error:
            where = f"process {self._rank} on {socket.gethostname()}: " if self._rank else ""
            return {"error": f"{where}{error}"}
        except Exception:  # a bug, which the main process raises with this traceback
            return {"fault": traceback.format_exc()}
        return {"files": files}

    @contextlib.contextmanager
    def _asking_others(self) -> Iterator[Store]:
        """Context for the use of the store, which blocks if its connection is lost."""
        assert self._store is not None, "one process waits for no other"
        self._waiting_since = time.monotonic()
        try:
            yield self._store
        finally:
            self._waiting_since = None

    def _post(self, key: str, value: dict[str, Any]) -> None:
        if self._store is not None:
            with self._asking_others() as store:
                store.set(key, json.dumps(value))

    def _await(self, *keys: str) -> dict[str, Any]:
        """The value of the first of `keys` that a process has posted."""
        with self._asking_others() as store:
            while not (posted := [key for key in keys if store.check([key])]):
                if self._abandoned:
                    raise LostProcess("lost another process")
                time.sleep(_POLL)
            value = json.loads(store.get(posted[0]))
            if self._rank == 0:  # the only reader of reports
                store.delete_key(posted[0])
        return value


def _raise_reported(report: dict[str, Any]) -> None:
    """Raise the error of a process's report."""
    if "not finite" in report:
        raise NotFiniteError(report["not finite"])
    if "error" in report:
        raise OSError(report["error"])
    if "fault" in report:
        raise RuntimeError(report["fault"])


def _raise_result(result: dict[str, str]) -> None:
    """Raise the error that the main process posted, as an error of that class."""
    for kind, text in result.items():
        raise {"DivergedError": DivergedError, "RunFolderError": RunFolderError}.get(kind, RuntimeError)(text)
