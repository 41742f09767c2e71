"""Convert a model to plain safetensors, to GGUF for llama.cpp, or to an ONNX graph.

The written model is loaded again and evaluated on a fixed input; the difference to the original is printed.
"""

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import add_model_argument
from nanogpt_hf.commands.console import show
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.find import find_model

_DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_NEEDS = {"gguf": ("gguf",), "onnx": ("onnx", "onnxscript", "onnxruntime")}  # packages, of the extra of that name
_READERS = {"safetensors": "transformers", "gguf": "transformers", "onnx": "onnxruntime"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|KiB|MiB|GiB)", text):
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 5GB, got {text!r}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must be missing or empty")
    parser.add_argument("--format", choices=("safetensors", *_NEEDS), default="safetensors", help="default %(default)s")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights; default %(default)s")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, default="5GB", help="of a safetensors file; default %(default)s"
    )


def run(arguments: argparse.Namespace) -> None:
    kind = arguments.format
    if missing := [name for name in _NEEDS.get(kind, ()) if importlib.util.find_spec(name) is None]:
        raise UserError(f"--format {kind}: needs {', '.join(missing)}; run `pip install 'nanogpt_hf[{kind}]'`")
    if kind == "onnx" and arguments.dtype != "float32":
        raise UserError("--dtype: an ONNX graph is written in float32 only; convert it with ONNX's own tools")

    import torch
    from transformers.utils import logging

    from nanogpt_hf.data.tokenizer import load_tokenizer
    from nanogpt_hf.export.model_folder import export_gpt2, logits_of, new_folder
    from nanogpt_hf.model.architecture import architecture_of
    from nanogpt_hf.model.build import load_model

    logging.disable_progress_bar()
    source, out, dtype = find_model(arguments.model), Path(arguments.out), getattr(torch, _DTYPES[arguments.dtype])
    with new_folder(out) as folder:
        model: Any = load_model(source)
        has_tokenizer = not Path(source).is_dir() or any((Path(source) / name).is_file() for name in _TOKENIZER_FILES)
        tokenizer = load_tokenizer(source) if has_tokenizer else None
        card = Path(source) / "README.md"
        card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
        as_gelu_new = None
        if kind == "gguf":
            from nanogpt_hf.export.gguf import export_gguf

            difference, as_gelu_new = export_gguf(folder, model, tokenizer, dtype)
        elif kind == "onnx":
            from nanogpt_hf.export.onnx import export_onnx

            difference = export_onnx(folder, model, tokenizer)
        else:
            difference = export_gpt2(folder, model, tokenizer, card, dtype, arguments.max_shard_size)
        largest = logits_of(model).abs().max().item()
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf", ".onnx", ".data"))
        size = sum(path.stat().st_size for path in files)
    names = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    form = f"plain {architecture_of(model).title}" if kind == "safetensors" else kind.upper()
    show(f"{out}: {source} as {form}, {arguments.dtype}")
    show(f"  {names}, {size / 1e6:,.1f} MB")
    show(f"  opened again with {_READERS[kind]}: logits up to {largest:.3g} differ by at most {difference:.2g}")
    if as_gelu_new is not None:
        show(
            "  readers of GGUF compute the tanh form of GELU, this model has the exact one: "
            f"with theirs the logits differ by at most {as_gelu_new:.2g}"
        )
    if tokenizer is None:
        show(f"  no tokenizer: {source} has none")
