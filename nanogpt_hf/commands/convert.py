"""The commands that convert and share models: export, import-nanogpt and push."""

import importlib.util
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import add_flag, add_model_argument, add_option, found_model
from nanogpt_hf.config.checks import REPO_ID
from nanogpt_hf.config.values import stated
from nanogpt_hf.console import show
from nanogpt_hf.errors import RunFolderError, UserError
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.place import dead_link
from nanogpt_hf.program import program

# The type in which weights are read for each --dtype; q8_0 is rounded from float32.
_DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16", "q8_0": "float32"}
# The packages of a format; the extra that installs them has the format's name.
_NEEDS = {"gguf": ("gguf",), "onnx": ("onnx", "onnxscript", "onnxruntime")}
# The types of llama.cpp's quantizer.
_QUANTIZED = ("q2_k", "q3_k_m", "q4_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "q8_0")
# The library that opens the written files again.
_READERS = {"safetensors": "transformers", "gguf": "transformers", "onnx": "onnxruntime"}


def add_export_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_option(parser, "out OUT", "the folder to write, which must be missing or empty")
    formats = ("safetensors", *_NEEDS)
    add_option(parser, "--format", "format of the files", choices=formats, default="safetensors")
    add_option(
        parser,
        "--dtype",
        "type of the weights; q8_0 is for gguf only",
        choices=_DTYPES,
        default="float32",
    )
    kinds = "quantize the weights of a GGUF file by llama.cpp's llama-quantize"
    add_option(parser, "--quantize", kinds, choices=_QUANTIZED)


def run_export(arguments: Namespace) -> None:
    """Convert a model to plain safetensors, to GGUF for llama.cpp, or to an ONNX graph.

    The written model is loaded again and evaluated on a fixed input; the difference to the original
    is printed.
    """
    kind = arguments.format
    # Mistakes are reported before torch is imported, which takes seconds.
    if missing := [name for name in _NEEDS.get(kind, ()) if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"--format {kind}: needs {', '.join(missing)}; run `pip install 'nanogpt_hf[{kind}]'`"
        )
    if kind == "onnx" and arguments.dtype != "float32":
        raise UserError(
            "--dtype: an ONNX graph is written in float32 only; convert it with ONNX's own tools"
        )
    if kind == "safetensors" and arguments.dtype == "q8_0":
        raise UserError("--dtype q8_0: is of GGUF files; add --format gguf")
    if arguments.quantize and (kind != "gguf" or arguments.dtype != "float32"):
        raise UserError("--quantize: is of GGUF files; give --format gguf, and no --dtype")

    import torch
    from transformers.utils import logging

    from nanogpt_hf.data.hf_tokenizer import load_tokenizer
    from nanogpt_hf.export.model_folder import export_model_folder, logits_of, new_folder
    from nanogpt_hf.model.architecture import architecture_of
    from nanogpt_hf.model.load import load_model

    logging.disable_progress_bar()
    out = Path(arguments.out)
    dtype = getattr(torch, _DTYPES[arguments.dtype])
    with found_model(arguments.model, arguments.step) as found, new_folder(out) as folder:
        model: Any = load_model(found.folder)
        tokenizer = load_tokenizer(found.folder)
        card = _card(found.folder, model, library="transformers" if kind == "safetensors" else kind)
        lines = []
        if kind == "gguf":
            difference, lines = _write_gguf(folder, model, tokenizer, arguments)
        elif kind == "onnx":
            from nanogpt_hf.export.onnx import export_onnx

            difference = export_onnx(folder, model, tokenizer)
        else:
            difference = export_model_folder(folder, model, tokenizer, dtype)
        (folder / "README.md").write_text(card, encoding="utf-8")
        # A difference says something only next to the size of the logits.
        largest = logits_of(model).abs().max().item()
    form = f"plain {architecture_of(model).title}" if kind == "safetensors" else kind.upper()
    show(f"{out}: {found.name} as {form}, {arguments.quantize or arguments.dtype}")
    if difference is not None:
        show(
            f"  opened again with {_READERS[kind]}: logits up to {largest:.3g} differ by at most "
            f"{difference:.2g}"
        )
    for line in lines:
        show(line)
    show(f"next: {_use_of_export(kind, out)}")


def _write_gguf(
    folder: Path, model: Any, tokenizer: Any, arguments: Namespace
) -> tuple[float | None, list[str]]:
    """Write a GGUF file, by llama.cpp's converter if ours does not know the model or tokenizer.

    Returns the largest difference of the logits, None for a file of llama.cpp's converter, which
    transformers may not read, and lines on what llama.cpp's programs wrote.
    """
    from nanogpt_hf.export.gguf import FILE, export_gguf
    from nanogpt_hf.export.llama_cpp import (
        CONVERTER,
        QUANTIZER,
        convert,
        find_program,
        quantize,
        require_program,
    )

    if arguments.quantize:
        # Before the file is written, which may take minutes.
        require_program(QUANTIZER, f"--quantize {arguments.quantize}")
    file = folder / FILE
    difference = None
    lines = []
    try:
        difference = export_gguf(folder, model, tokenizer, arguments.dtype)
    except UserError as error:
        if find_program(CONVERTER) is None:
            raise UserError(
                f"{error}; llama.cpp's own converter may know it: put {CONVERTER} on PATH, or set "
                "LLAMA_CPP to its folder"
            ) from None
        for path in folder.iterdir():
            path.unlink()
        found = convert(file, model, tokenizer, arguments.dtype)
        lines.append(f"  written by {CONVERTER}: token embeddings differ by at most {found:.2g}")
    if arguments.quantize:
        share = quantize(file, arguments.quantize)
        size = file.stat().st_size
        lines.append(f"  quantized by {QUANTIZER}: {size:,} bytes, weights changed by {share:.2%}")
    return difference, lines


def _use_of_export(kind: str, out: Path) -> str:
    """A command that uses an exported model."""
    if kind == "gguf" and (out / "Modelfile").is_file():
        modelfile = shlex.quote(str(out / "Modelfile"))
        # A name of ollama's has these characters, and begins with one of the first two kinds.
        name = re.sub(r"[^a-z0-9._-]+", "-", out.resolve().name.lower()).strip("-._")
        return f"ollama create {name or 'model'} -f {modelfile}"
    if kind == "gguf":
        return f"llama-cli -m {shlex.quote(str(out / 'model.gguf'))}"
    if kind == "onnx":
        path = str(out / "model.onnx")
        return f'python -c "import onnxruntime; onnxruntime.InferenceSession({path!r})"'
    return f"{program()} sample {shlex.quote(str(out))}"


def _card(source: str, model: Any, library: str) -> str:
    """The card of an exported model: the model's own, with the new format, or a short one."""
    from nanogpt_hf.export.card import card_of_export, card_without_run

    path = Path(source) / "README.md"
    if path.is_file():
        return card_of_export(path.read_text(encoding="utf-8", errors="replace"), library)
    # A folder's path may tell a user's name, and a Hub id is public.
    name = Path(source).resolve().name if Path(source).exists() else source
    return card_without_run(model.config, f"exported from {name} with nanogpt_hf", library)


def add_import_nanogpt_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "source CKPT", "nanoGPT's ckpt.pt, or a folder with train.bin and val.bin")
    outputs = "the folder to write: a plain GPT-2, with --data a run folder, or prepared data"
    add_option(parser, "out OUT", outputs)
    data = "the checkpoint's prepared data: import its run, to continue it with `resume`"
    add_option(parser, "--data DIR", data)
    meta = "meta.pkl with the characters (default: GPT-2's vocabulary; of a folder, its own)"
    add_option(parser, "--meta FILE", meta)
    form = "gelu_new if nanoGPT made the checkpoint before June 2023, when it took nn.GELU"
    forms = ("gelu", "gelu_new")
    add_option(parser, "--activation-function", form, choices=forms, default="gelu")


def run_import_nanogpt(arguments: Namespace) -> None:
    """Convert nanoGPT's checkpoint to a model folder or to a run to continue, or its train.bin and
    val.bin to data.

    No code in the files is run: checkpoints are read with weights_only, meta.pkl by a reader of
    plain containers.
    """
    source = Path(arguments.source)
    out = Path(arguments.out)
    meta = arguments.meta and Path(arguments.meta)
    if not source.exists():
        raise RunFolderError(
            f"{source}: no such file or folder; give nanoGPT's ckpt.pt, or a folder with train.bin"
        )
    if arguments.data:
        if source.is_dir():
            raise UserError(f"--data: is for a ckpt.pt, and {source} is a folder; leave it out")
        if meta:
            raise UserError("--meta: the prepared data of --data has the vocabulary; leave it out")
        import_run(source, out, Path(arguments.data), arguments.activation_function)
    # nanoGPT keeps a model in one file and data in a folder.
    elif source.is_dir():
        import_data(source, out, meta)
    else:
        import_model(source, out, meta, arguments.activation_function)


def import_model(source: Path, out: Path, meta: Path | None, activation_function: str) -> None:
    """Convert a checkpoint to a model folder, and print its size."""
    from transformers.utils import logging

    from nanogpt_hf.export.card import card_without_run
    from nanogpt_hf.export.model_folder import new_folder, write_model_folder
    from nanogpt_hf.export.nanogpt import load_nanogpt
    from nanogpt_hf.model.architecture import count_parameters

    logging.disable_progress_bar()
    with new_folder(out) as folder:
        found = load_nanogpt(source, meta, activation_function)
        config = found.config
        origin = "trained by nanoGPT and imported with nanogpt_hf"
        card = card_without_run(config, origin, "transformers")
        write_model_folder(folder, config, found.weights, found.tokenizer.hf, card)
    show(f"{out}: a GPT-2 with {count_parameters(config):,} parameters")
    show(f"next: {program()} sample {shlex.quote(str(out))}")


def import_run(source: Path, out: Path, data: Path, activation_function: str) -> None:
    """Convert a checkpoint to a run folder on prepared data, and print how to continue it."""
    from transformers.utils import logging

    from nanogpt_hf.checkpoint.nanogpt import load_nanogpt_run, write_nanogpt_run
    from nanogpt_hf.export.model_folder import new_folder
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.training.early_checks import check_folders

    logging.disable_progress_bar()
    with new_folder(out) as folder:
        run = load_nanogpt_run(source, data, out.resolve().name, activation_function)
        check_folders(run.config, RunFolder(out))
        write_nanogpt_run(folder, run)
    step = run.state.step
    last = run.config.train.max_steps
    show(
        f"{out}: step {step:,} of {last:,}, with AdamW's state; nanoGPT measured a validation loss "
        f"of {run.loss:.4f}"
    )
    # Most checkpoints are of finished runs: then more steps are what there is to continue.
    more = f" --train.max_steps {2 * step}" if step >= last else ""
    show(f"next: {program()} resume {shlex.quote(str(out))}{more}")


def import_data(source: Path, out: Path, meta: Path | None) -> None:
    """A folder with train.bin and val.bin -> prepared data, and say how to train on it."""
    from nanogpt_hf.export.model_folder import new_folder
    from nanogpt_hf.export.nanogpt import import_bins

    with new_folder(out) as folder:
        manifest = import_bins(source, folder, meta)
    show(f"{out}: {manifest.train.tokens:,} tokens, {manifest.validation.tokens:,} to validate")
    knobs = {"dir": out, "source": source, "tokenizer": manifest.recipe["tokenizer"]}
    options = " ".join(f"--data.{knob} {shlex.quote(str(value))}" for knob, value in knobs.items())
    show(f"next: {program()} pretrain RECIPE {options}")


def _repo_id(text: str) -> str:
    if not REPO_ID.fullmatch(text):
        raise ArgumentTypeError(f"expected user/name, got {text!r}")
    return text


def add_push_arguments(parser: ArgumentParser) -> None:
    folder = "a run folder (its best model), its best/ or final/, a model or adapter folder"
    add_model_argument(parser, folder)
    add_option(parser, "repo_id REPO_ID", "user/name; created if it does not exist", type=_repo_id)
    add_flag(parser, "--private", "create a private repository")
    branch = "a branch to push to, created if it does not exist"
    add_option(parser, "--revision BRANCH", branch, type=stated)
    add_option(parser, "--message", "the message of the commit", type=stated)
    figures = "show the figures of FILE, which `evaluate --json` has written, on the model's page"
    add_option(parser, "--results FILE", figures)


def run_push(arguments: Namespace) -> None:
    """Push a model to the Hub in one commit: weights, tokenizer, generation config and model card.

    A run folder's resolved recipe, metrics and loss plot are pushed too. The token is the one that
    `hf auth login` stored, or HF_TOKEN. Nothing in the repository is ever deleted.
    """
    if problem := dead_link(Path(arguments.model)):
        raise UserError(f"{problem}, or name another folder")
    if not Path(arguments.model).is_dir():
        raise UserError(
            f"{arguments.model}: no such folder; push takes a run, model or adapter folder"
        )

    from huggingface_hub.utils import disable_progress_bars

    from nanogpt_hf.export.hub import push

    # huggingface_hub would show its bars in the log of a job, too.
    if not shows_bars():
        disable_progress_bars()
    # A run folder stands for its best model.
    with found_model(arguments.model, arguments.step) as found:
        url = push(
            Path(found.folder),
            arguments.repo_id,
            private=arguments.private,
            revision=arguments.revision,
            message=arguments.message,
            results=arguments.results and Path(arguments.results),
            run=found.run,
        )
    show(f"{found.name} -> {url}")
