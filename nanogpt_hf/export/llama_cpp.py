"""Export to GGUF by llama.cpp's own programs: architectures that export/gguf.py does not write, and
quantized files.

Both programs are part of llama.cpp, which is installed apart: its converter, a Python script, and
its quantizer.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from nanogpt_hf.errors import UserError
from nanogpt_hf.export.model_folder import export_model_folder

CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
# The folder of llama.cpp, where its programs are not on PATH.
VARIABLE = "LLAMA_CPP"
# The name of a type for users -> the converter's.
_OUTTYPES = {"float32": "f32", "fp16": "f16", "bf16": "bf16", "q8_0": "q8_0"}


def find_program(name: str) -> str | None:
    """Path of a program of llama.cpp: on PATH, or in the folder that LLAMA_CPP names, built there
    by cmake or not.
    """
    folder = os.environ.get(VARIABLE)
    places = [Path(folder), Path(folder, "build", "bin")] if folder else []
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    return shutil.which(name)


def require_program(name: str, why: str) -> str:
    """Path of a program of llama.cpp. Raises UserError, with what it is needed for, without it."""
    path = find_program(name)
    if path is None:
        raise UserError(
            f"{why} needs llama.cpp's {name}; install llama.cpp and put {name} on PATH, or set "
            f"{VARIABLE} to its folder"
        )
    return path


def convert(
    file: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    dtype: str,
) -> float:
    """Write `model` to a GGUF file by llama.cpp's converter, and read the file again.

    Returns the largest difference of the token embeddings, the only tensor that every converter
    writes under one name and in one order. Raises UserError if the converter fails.
    """
    program = require_program(CONVERTER, f"--format gguf of {model.config.model_type}")
    table: Any = model.get_input_embeddings()
    embeddings = table.weight.detach().float().numpy()
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".convert-") as folder:
        # The converter reads a plain model folder.
        export_model_folder(Path(folder), model, tokenizer, torch.float32)
        words = [sys.executable, program, folder, "--outfile", str(file)]
        _run([*words, "--outtype", _OUTTYPES[dtype]], CONVERTER)
    written = _tensors(file)
    if "token_embd.weight" not in written:
        raise UserError(f"{CONVERTER}: wrote a file without token embeddings")
    found = written["token_embd.weight"]
    # Some models pad their embeddings; the converter may drop rows without a token.
    rows = min(len(found), len(embeddings))
    return float(np.abs(found[:rows] - embeddings[:rows]).max())


def quantize(file: Path, kind: str) -> float:
    """Replace a GGUF file by a quantized one, by llama.cpp's quantizer.

    Returns the root mean square of the errors of all weights, relative to the weights' own. Raises
    UserError if the quantizer fails, as for matrices whose rows are no multiple of 32.
    """
    program = require_program(QUANTIZER, f"--quantize {kind}")
    before = _tensors(file)
    quantized = file.with_name(f".{file.name}.quantized")
    _run([program, str(file), str(quantized), kind.upper()], QUANTIZER)
    after = _tensors(quantized)
    if before.keys() != after.keys():
        raise UserError(f"{QUANTIZER}: wrote other tensors than it was given")
    error = sum(float(np.square(after[name] - before[name]).sum()) for name in before)
    size = sum(float(np.square(values).sum()) for values in before.values())
    quantized.replace(file)
    return float(np.sqrt(error / size))


def _tensors(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file, as float32 with their own shapes. Raises UserError without it."""
    if not file.is_file():
        raise UserError(f"{file.name}: llama.cpp's program ended well and wrote no file")
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(file).tensors
    }


def _run(words: list[str], name: str) -> None:
    """Run a program. Raises UserError with its last line if it fails."""
    # Converters may ask the Hub for tokenizers that they know by name; all is here already.
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(words, capture_output=True, text=True, env=environment)
    if completed.returncode:
        lines = [line for line in completed.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {completed.returncode}"
        if "No module named" in reason:
            reason += "; install it in this environment"
        raise UserError(f"{name}: {reason:.300}")
