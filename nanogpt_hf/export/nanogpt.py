"""Import nanoGPT's ckpt.pt and meta.pkl as model and tokenizer. Both are pickles; code in them is never run.

nanoGPT uses GPT-2's layer names, but stores matrices in the layout of nn.Linear: (out, in).
"""

import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_hf.config.vocabulary import GPT2_VOCAB_SIZE
from nanogpt_hf.data.tokenizer import Tokenizer, char_tokenizer, gpt2_tokenizer
from nanogpt_hf.errors import DataError, RunFolderError, one_line
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT, from_gpt2_state_dict, gpt2_state_dict
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
_GPT2_ROWS = (GPT2_VOCAB_SIZE, 50304)  # GPT-2's vocabulary, and as nanoGPT pads it
_MATRICES = tuple(f".{layer}.weight" for layer in GPT2_LAYOUT)


@dataclass(frozen=True)
class NanoGPT:
    """An imported nanoGPT checkpoint."""

    config: GPTConfig
    weights: dict[str, torch.Tensor]  # our names
    tokenizer: Tokenizer
    facts: dict[str, str]  # about its training, for the card


def load_nanogpt(path: Path, meta: Path | None = None, activation_function: str = "gelu") -> NanoGPT:
    """Read a checkpoint of nanoGPT's train.py, compiled or not, with or without biases.

    Raises RunFolderError if it is no such checkpoint or has another vocabulary, DataError if `meta` is no vocabulary.
    """
    saved = _load_checkpoint(path)
    sizes = _sizes(path, saved)
    tokenizer = _tokenizer(path, saved, sizes["vocab_size"], meta)
    dropout, bias = (saved["model_args"].get(name, default) for name, default in (("dropout", 0.0), ("bias", True)))
    end_of_text_id = tokenizer.end_of_text_id
    state = _clean_state(path, saved["model"])
    head, embedding = (state.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
    tied = head is None or embedding is None or torch.equal(head, embedding)
    try:
        config = GPTConfig(
            vocab_size=tokenizer.vocab_size,
            padded_vocab_size=sizes["vocab_size"] if sizes["vocab_size"] > tokenizer.vocab_size else None,
            n_positions=sizes["block_size"],
            n_embd=sizes["n_embd"],
            n_layer=sizes["n_layer"],
            n_head=sizes["n_head"],
            activation_function=activation_function,
            bias=bias,
            dropout=dropout,
            tie_word_embeddings=tied,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
        )
    except Exception as error:  # huggingface_hub's validation raises several types
        raise _not_a_checkpoint(path, str(error)) from None
    if tied:
        state.pop("lm_head.weight", None)
    _check_shapes(path, config, state)
    transposed = {name: weight.T if name.endswith(_MATRICES) else weight for name, weight in state.items()}
    return NanoGPT(config, from_gpt2_state_dict(transposed), tokenizer, _facts(saved))


def _not_a_checkpoint(path: Path, reason: str) -> RunFolderError:
    # the reason may contain names from the file, which can be long or have line breaks
    return RunFolderError(f"{path}: not a checkpoint of nanoGPT: {one_line(reason)}")


def _load_checkpoint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RunFolderError(f"{path}: no such file; a checkpoint of nanoGPT is its out_dir's ckpt.pt")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a foreign file before it raises
            # Memory-mapped, since two thirds of the file are optimizer state. torch < 1.6 wrote no zip files.
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many types for a damaged or foreign file
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if code:
            reason = f"it contains {code[1]}, which is not a tensor or plain value, and was not loaded"
        else:
            reason = "damaged, incomplete, or no PyTorch file"
        raise _not_a_checkpoint(path, reason) from None
    for name in ("model", "model_args"):
        if not isinstance(saved, dict) or not isinstance(saved.get(name), dict):
            raise _not_a_checkpoint(path, f"it has no {name!r}")
    return saved


def _sizes(path: Path, saved: dict[str, Any]) -> dict[str, int]:
    arguments = saved["model_args"]
    if missing := [name for name in _SIZES if name not in arguments]:
        raise _not_a_checkpoint(path, f"its model_args have no {', '.join(missing)}")
    for name in _SIZES:
        value = arguments[name]
        if type(value) is not int or not 0 < value < 2**31:
            raise _not_a_checkpoint(path, f"its model_args have {name}={str(value)[:40]!r}")
    if arguments["n_layer"] > len(saved["model"]):
        raise _not_a_checkpoint(path, f"{arguments['n_layer']} layers, but only {len(saved['model'])} tensors")
    return {name: arguments[name] for name in _SIZES}


def _clean_state(path: Path, model: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights in float32 by nanoGPT's names, without torch.compile's prefix and without causal masks."""
    state = {str(name).removeprefix("_orig_mod."): weight for name, weight in model.items()}
    for name, weight in state.items():
        dense = isinstance(weight, torch.Tensor) and weight.layout == torch.strided and weight.device.type == "cpu"
        if not dense or not weight.is_floating_point():
            raise _not_a_checkpoint(path, f"{name} is not a floating-point tensor")
        if not weight.float().isfinite().all():
            raise _not_a_checkpoint(path, f"{name} has NaN or infinity: the run that wrote it diverged")
    return {name: weight.float() for name, weight in state.items() if not name.endswith(".attn.bias")}


def _check_shapes(path: Path, config: GPTConfig, state: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        shell = GPTForCausalLM(config)
        rows = config.padded_vocab_size or config.vocab_size
        expected = {name: weight.shape for name, weight in gpt2_state_dict(config, shell.state_dict()).items()}
    for name in expected.keys() & {"transformer.wte.weight", "lm_head.weight"}:
        expected[name] = torch.Size((rows, config.n_embd))
    if not config.bias:  # GPT-2's layout has zeros instead
        expected = {name: shape for name, shape in expected.items() if not name.endswith(".bias")}
    for kind, names in (("has no", expected.keys() - state.keys()), ("has", state.keys() - expected.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            unknown = ", which a GPT of its model_args does not" if kind == "has" else ""
            raise _not_a_checkpoint(path, f"it {kind} {min(names)[:80]}{more}{unknown}")
    for name, weight in state.items():
        shape = expected[name][::-1] if name.endswith(_MATRICES) else expected[name]
        if weight.shape != shape:
            raise _not_a_checkpoint(path, f"{name} is {tuple(weight.shape)}, its model_args require {tuple(shape)}")


def _facts(saved: dict[str, Any]) -> dict[str, str]:
    """What train.py recorded about the training; values of another type are ignored."""
    facts = {"trained with": "nanoGPT"}
    steps, loss = saved.get("iter_num"), saved.get("best_val_loss")
    if type(steps) is int:
        facts["steps"] = f"{steps:,}"
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.item()
    if type(loss) is float:
        facts["best sampled validation loss"] = f"{loss:.4f}"
    if dataset := _dataset(saved):
        facts["data"] = dataset
    return facts


def _dataset(saved: dict[str, Any]) -> str | None:
    config = saved.get("config")
    dataset = config.get("dataset") if isinstance(config, dict) else None
    return dataset if isinstance(dataset, str) and re.fullmatch(r"[\w-]{1,80}", dataset) else None


def _tokenizer(path: Path, saved: dict[str, Any], rows: int, meta: Path | None) -> Tokenizer:
    """The characters of `meta`, or GPT-2's tokenizer if the number of embedding rows fits."""
    if meta is not None:
        tokenizer = load_meta(meta)
        if tokenizer.vocab_size != rows:
            raise RunFolderError(
                f"--meta: {meta} has {tokenizer.vocab_size:,} characters, the model in {path} {rows:,} tokens; "
                "use the meta.pkl of its training data"
            )
        return tokenizer
    if rows in _GPT2_ROWS:
        return gpt2_tokenizer()
    usual_path = f"data/{_dataset(saved) or 'DATASET'}/meta.pkl in nanoGPT's folder"
    raise RunFolderError(
        f"{path}: its vocabulary of {rows:,} tokens is not GPT-2's; name its meta.pkl with --meta ({usual_path})"
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers. Any class or function in the file is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a plain container, and was not loaded")


def load_meta(path: Path) -> Tokenizer:
    """The character tokenizer of nanoGPT's meta.pkl, with the same ids. Raises DataError if it is no such file."""
    try:
        with path.open("rb") as file:
            meta = _PlainUnpickler(file).load()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # damaged pickles raise almost anything
        reason = str(error) if "plain container" in str(error) else "damaged, or no pickle"
        raise DataError(f"{path}: not a meta.pkl of nanoGPT: {reason}") from None
    characters = []
    try:
        characters = [meta["itos"][i] for i in range(len(meta["itos"]))]
        ids = {character: i for i, character in enumerate(characters)}
        "".join(characters).encode()  # fails on half a surrogate pair
        is_valid = ids == meta["stoi"] and meta["vocab_size"] == len(ids) > 0 and all(len(c) == 1 for c in characters)
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DataError(f"{path}: not a meta.pkl of nanoGPT: itos, stoi and vocab_size do not describe characters")
    return char_tokenizer(characters)
