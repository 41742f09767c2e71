"""Tensors in safetensors files: read by slices, whole or split over several files by ranks.

A file that holds a part of a tensor states the tensor's shape and the part's offset in the
file's metadata, as JSON under `slices`. All other tensors are whole, so files of one process are
plain safetensors.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanogpt_hf.own_files import file_sha256
from nanogpt_hf.place import flush

# Values per operation. Below that torch starts no threads, which would compete with the training.
_SERIAL = 2**15
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
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype


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
    values: Tensor


class NotFiniteError(ValueError):
    """A tensor has an infinite or NaN value; the message is its name."""


def write_tensors(path: Path, parts: Mapping[str, Part]) -> str:
    """Write parts of tensors as a safetensors file and flush it to the disk; return its checksum.

    Raises OSError if it cannot be written, and NotFiniteError before it writes a tensor with an
    infinite or NaN value.
    """
    # Before anything is written: a checkpoint with NaN would be resumed from.
    for name, part in parts.items():
        values = part.values.reshape(-1)
        is_float = values.is_floating_point() and values.element_size() > 1
        if is_float and not all(bool(chunk.isfinite().all()) for chunk in values.split(_SERIAL)):
            raise NotFiniteError(name)
    cut = {name: part for name, part in parts.items() if part.box.shape != part.shape}
    slices = {name: {"shape": part.shape, "offset": part.box.offset} for name, part in cut.items()}
    # One entry, since safetensors writes several in random order, and the bytes would differ.
    metadata = {_SLICES: json.dumps(slices)} if cut else {"format": "pt"}
    # safetensors makes the file readable by its owner alone; a new file shows the usual mode.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: part.values for name, part in parts.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
    flush(path)
    return file_sha256(path)


def layout_lines(kind: str, layout: Layout) -> set[str]:
    """A line per tensor of a kind with its name, shape and dtype."""
    return {f"{kind} {name} {tuple(shape)} {dtype}" for name, (shape, dtype) in layout.items()}


def layout_digest(lines: Iterable[str]) -> str:
    """Return the sha256 of `layout_lines`, in any order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _check_parts(name: str, shape: tuple[int, ...], parts: list[Box]) -> None:
    """Raises ValueError unless the parts of a tensor cover each of its values once."""
    # As many values as the tensor has, inside of it, and no two parts overlap: then no hole is
    # left.
    complete = sum(math.prod(part.shape) for part in parts) == math.prod(shape)
    # Sorted by offset, so that a part is compared only with those that reach beyond its offset in
    # the first dimension.
    begun: list[Box] = []
    for part in sorted(parts):
        spans = list(zip(part.offset, part.shape, shape, strict=True))
        complete &= all(start >= 0 and start + size <= full for start, size, full in spans)
        if not complete:
            break
        if len(parts) > 1:
            begun = [one for one in begun if one.offset[0] + one.shape[0] > part.offset[0]]
            complete &= not any(_overlap(one, part) for one in begun)
            begun.append(part)
    if not complete:
        raise ValueError(f"the parts of {name} leave a hole in it or overlap")


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


class TensorFiles(Mapping[str, Tensor]):
    """Tensors of one or several files by name; each is read when it is asked for.

    Raises ValueError if the parts of a tensor in the files do not make the whole of it.
    """

    def __init__(self, paths: list[Path]):
        self.layout: Layout = {}
        # The open file that has a part of a tensor.
        self._parts: dict[str, dict[Box, Any]] = {}
        parts: dict[str, list[Box]] = {}
        for path in paths:
            file: Any = safe_open(path, "pt")
            slices = json.loads((file.metadata() or {}).get(_SLICES, "{}"))
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                saved = file.get_slice(name)
                size = tuple(saved.get_shape())
                place = slices.get(name, {"shape": size, "offset": (0,) * len(size)})
                shape, offset = (tuple(map(int, place[key])) for key in ("shape", "offset"))
                facts = shape, _DTYPES[saved.get_dtype()]
                # Ranks write parts of the same tensor, so shape and dtype must agree.
                if self.layout.setdefault(name, facts) != facts:
                    raise ValueError(f"the parts of {name} have several shapes or dtypes")
                self._parts.setdefault(name, {})[Box(offset, size)] = file
                parts.setdefault(name, []).append(Box(offset, size))
        for name, boxes in parts.items():
            _check_parts(name, self.layout[name][0], boxes)
        self.layout = dict(sorted(self.layout.items()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, name: str) -> Tensor:
        shape, _ = self.layout[name]
        return self.read(name, Box((0,) * len(shape), shape))

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, from the files that have it."""
        if file := self._parts[name].get(box):
            return file.get_tensor(name)
        values = torch.empty(box.shape, dtype=self.layout[name][1])
        for saved, file in self._parts[name].items():
            # In each dimension the file has [a, a + m) and [b, b + n) is wanted. Their overlap is
            # a slice of the file's part, and a slice of the values.
            source = []
            target = []
            for a, m, b, n in zip(saved.offset, saved.shape, box.offset, box.shape, strict=True):
                start = max(a, b)
                end = min(a + m, b + n)
                source.append(slice(start - a, max(start, end) - a))
                target.append(slice(start - b, max(start, end) - b))
            if all(part.start < part.stop for part in source):
                values[tuple(target)] = file.get_slice(name)[tuple(source)]
        return values
