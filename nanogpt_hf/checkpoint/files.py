"""Files of a checkpoint: their names and their checksums.

A checkpoint is a folder such as checkpoints/step_00001000, with four kinds of files:

    model.safetensors      the weights, in float32, by their names in the whole model
    optimizer.safetensors  the optimizer state, as `<parameter>.<key>`
    state.json             the run state, and a digest of all tensors' names, shapes and dtypes
    checksums.json         the sha256 of all other files

If several processes have parts of the tensors, each writes files of its own, such as
model-00002-of-00004.safetensors. The number of files says nothing about the processes that may
read them: runs/tensor_files.py finds every part of a tensor in whichever file has it.
"""

import json
from pathlib import Path
from typing import Any

from nanogpt_hf.own_files import file_sha256

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state.json"
CHECKSUMS = "checksums.json"


def file_names(kind: str, count: int) -> list[str]:
    """Name the files with tensors of a kind that `count` processes write, as the Hub does."""
    if count == 1:
        return [f"{kind}.safetensors"]
    return [f"{kind}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def files_of(kind: str, checksums: dict[str, str]) -> list[str]:
    """Find the files with tensors of a kind. Raises ValueError if one has no checksum."""
    parts = sorted(name for name in checksums if name.startswith(f"{kind}-"))
    # The name of one part states how many there are. If one is not in the list, the checkpoint is
    # damaged: its tensors would have a hole.
    names = file_names(kind, max(1, len(parts)))
    if missing := sorted(set(names) - checksums.keys()):
        raise ValueError(f"it has no {missing[0]}")
    return names


def write_state(folder: Path, facts: dict[str, Any], checksums: dict[str, str]) -> None:
    """Write the run state, and the checksums of it and of the files with tensors."""
    (folder / STATE).write_text(f"{json.dumps(facts, indent=2)}\n", encoding="utf-8")
    checksums = checksums | {STATE: file_sha256(folder / STATE)}
    text = json.dumps(checksums, indent=2, sort_keys=True)
    (folder / CHECKSUMS).write_text(f"{text}\n", encoding="utf-8")
