"""Tensors in safetensors files: written in chunks, read by slices, whole or split over several files by ranks.

A file that holds a part of a tensor states the tensor's shape and the part's offset in the file's metadata, as JSON
under `slices`. All other tensors are whole, so files of one process are plain safetensors.
"""

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open

_CHUNK = 2**22  # bytes written at a time
_SERIAL = 2**15  # values per operation: torch starts no threads below that, which would compete with the training
_SLICES = "slices"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


class Part(NamedTuple):
    """A part of a tensor of `shape`, on the CPU; the whole tensor if the shapes are equal."""

    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


class NotFiniteError(ValueError):
    """A tensor has an infinite or NaN value; the message is its name."""


class WrittenFile(NamedTuple):
    sha256: str
    size: int


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU has no infinite and no NaN value, computed in the calling thread only."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return True
    return all(bool(chunk.isfinite().all()) for chunk in tensor.reshape(-1).split(_SERIAL))


def write_tensors(path: Path, parts: Mapping[str, Part]) -> WrittenFile:
    """Write parts of tensors as a safetensors file and flush it to the disk; return its checksum and size.

    Holds Python's global lock only briefly, so that it does not delay another thread. Raises NotFiniteError before it
    writes a tensor with an infinite or NaN value.
    """
    parts = dict(sorted(parts.items(), key=lambda item: (-item[1].values.element_size(), item[0])))  # keeps alignment
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    slices = {
        n: {"shape": part.shape, "offset": part.box.offset} for n, part in parts.items() if part.box.shape != part.shape
    }
    if slices:
        header["__metadata__"][_SLICES] = json.dumps(slices)
    end = 0
    for name, part in parts.items():
        start, end = end, end + part.values.nbytes
        header[name] = {"dtype": _CODES[part.values.dtype], "shape": part.box.shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for data in _contents(len(head).to_bytes(8, "little") + head, parts):
            digest.update(data)
            size += len(data)
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    return WrittenFile(digest.hexdigest(), size)


def _contents(head: bytes, parts: Mapping[str, Part]) -> Iterator[memoryview]:
    yield from _chunks(memoryview(head))
    for name, part in parts.items():
        if not is_finite(part.values):
            raise NotFiniteError(name)
        yield from _chunks(memoryview(cast(Any, part.values.reshape(-1).view(torch.uint8).numpy())))


def _chunks(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def _cover(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether boxes cover a tensor of `shape`, each of its values once."""
    ranges = [[(at, at + n) for at, n in zip(*box, strict=True)] for box in boxes]
    edges = [sorted({0, size, *(edge for box in ranges for edge in box[axis])}) for axis, size in enumerate(shape)]
    times = torch.zeros([len(one) - 1 for one in edges], dtype=torch.int64)  # one value per cell between the edges
    for box in ranges:
        cells = ((bisect_left(one, edge) for edge in ends) for one, ends in zip(edges, box, strict=True))
        times[tuple(slice(*ends) for ends in cells)] += 1
    return bool((times == 1).all())


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of one or several files by name; each is read when it is asked for.

    Raises ValueError, OSError or SafetensorError if a file is damaged or parts of a tensor are missing.
    """

    def __init__(self, paths: list[Path]):
        self.layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._parts: dict[str, dict[Box, Any]] = {}
        for path in paths:
            file: Any = safe_open(path, "pt")
            slices = json.loads((file.metadata() or {}).get(_SLICES, "{}"))
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                self._add(name, file, slices.get(name))
        for name, (shape, _) in self.layout.items():
            if not _cover(shape, self._parts[name]):
                raise ValueError(f"parts of {name} are missing or overlap")
        self.layout = dict(sorted(self.layout.items()))

    def _add(self, name: str, file: Any, place: Any) -> None:
        saved = file.get_slice(name)
        size, dtype = tuple(saved.get_shape()), _DTYPES.get(saved.get_dtype())
        if dtype is None:
            raise ValueError(f"{name} has the dtype {saved.get_dtype()}")
        shape, offset = (size, (0,) * len(size)) if place is None else (tuple(place["shape"]), tuple(place["offset"]))
        if not (len(shape) == len(offset) == len(size)) or not all(
            type(n) is int and type(at) is int and 0 <= at <= at + part <= n
            for n, at, part in zip(shape, offset, size, strict=True)
        ):
            raise ValueError(f"{name} is no part of a tensor of its shape")
        if self.layout.setdefault(name, (shape, dtype)) != (shape, dtype):
            raise ValueError(f"parts of {name} differ in shape or dtype")
        self._parts.setdefault(name, {})[Box(offset, size)] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, _ = self.layout[name]
        return self.read(name, Box((0,) * len(shape), shape))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, from the files that hold it."""
        if file := self._parts[name].get(box):
            return file.get_tensor(name)
        values = torch.empty(box.shape, dtype=self.layout[name][1])
        for saved, file in self._parts[name].items():
            starts = [max(a, b) for a, b in zip(saved.offset, box.offset, strict=True)]
            ends = [
                min(a + m, b + n) for a, m, b, n in zip(saved.offset, saved.shape, box.offset, box.shape, strict=True)
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                source, target = (
                    tuple(slice(s - at, e - at) for s, e, at in zip(starts, ends, part.offset, strict=True))
                    for part in (saved, box)
                )
                values[target] = file.get_slice(name)[source]
        return values
