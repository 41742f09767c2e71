"""Tensors in safetensors files: whole or in parts, read by slices, checked."""

import hashlib
import itertools
import math
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nanogpt_hf.runs.tensor_files import Box, NotFiniteError, Part, TensorFiles, write_tensors

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "bytes": torch.arange(3, dtype=torch.uint8),  # not a multiple of four bytes
    "bf16": torch.randn(4, 3, dtype=torch.bfloat16),
    "count": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "step": torch.tensor([7], dtype=torch.int64),
}


def whole(tensor: torch.Tensor) -> Part:
    return Part(tuple(tensor.shape), Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)


def part(tensor: torch.Tensor, box: Box) -> Part:
    return Part(tuple(tensor.shape), box, cut(tensor, box).contiguous())


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))]


def cuts(size: int, count: int) -> list[tuple[int, int]]:
    """(offset, length) of random intervals that cover `size`."""
    ends = sorted([0, size, *random.choices(range(size + 1), k=count - 1)])
    return [(a, b - a) for a, b in itertools.pairwise(ends) if b > a]


def grid(shape: tuple[int, ...], count: int) -> list[Box]:
    intervals = itertools.product(*(cuts(size, count) for size in shape))
    return [Box(*map(tuple, zip(*one, strict=True))) for one in intervals]


def test_whole_tensors_are_a_plain_safetensors_file(tmp_path):
    path = tmp_path / "model.safetensors"
    written = write_tensors(path, {name: whole(tensor) for name, tensor in TENSORS.items()})
    assert written == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_file(path)
    files = TensorFiles([path])
    assert loaded.keys() == files.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(files[name], tensor)
        assert files.layout[name] == (tuple(tensor.shape), tensor.dtype)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_any_part_is_read_from_any_parts(tmp_path):
    random.seed(0)
    tensor = torch.randn(12, 9, 5)
    for trial in range(30):
        boxes = grid(tensor.shape, 3)
        paths = [tmp_path / f"{trial}-{number}" for number in range(len(boxes))]
        for path, box in zip(paths, boxes, strict=True):
            parts = {"a": part(tensor, box)}
            if path == paths[0]:
                parts["b"] = whole(TENSORS["matrix"])
            write_tensors(path, parts)
        files = TensorFiles(random.sample(paths, len(paths)))
        assert files.layout["a"] == ((12, 9, 5), torch.float32)
        assert torch.equal(files["a"], tensor)
        assert torch.equal(files["b"], TENSORS["matrix"])
        for box in grid(tensor.shape, 2):
            read = files.read("a", box)
            assert torch.equal(read, cut(tensor, box))
            assert read.is_contiguous()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_tensor_that_is_not_finite_is_not_written(tmp_path, value):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.zeros(300, 300, dtype=dtype)
        tensor[-1, -1] = value
        with pytest.raises(NotFiniteError, match=r"^odd$"):
            write_tensors(
                tmp_path / "file", {"even": whole(TENSORS["matrix"]), "odd": whole(tensor)}
            )
