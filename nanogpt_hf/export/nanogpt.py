"""Import nanoGPT's ckpt.pt and meta.pkl as model and tokenizer, its train.bin and val.bin as
prepared data. Code in these pickles is never run.

nanoGPT uses GPT-2's layer names, but stores matrices in the layout of nn.Linear: (out, in).
"""

import hashlib
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nanogpt_hf.config.vocabulary import GPT2_VOCAB_SIZE
from nanogpt_hf.data.encode import Rows, ShardWriter
from nanogpt_hf.data.manifest import FORMAT, Manifest, SplitFacts, tool_versions, write_manifest
from nanogpt_hf.data.prepared import TOKENIZER
from nanogpt_hf.data.tokenizer import (
    Tokenizer,
    bytes_of_tokens,
    char_tokenizer,
    gpt2_tokenizer,
    save_tokenizer,
    vocabulary_hash,
)
from nanogpt_hf.errors import DataError, RunFolderError, UserError, one_line
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT, from_gpt2_state_dict, gpt2_state_dict
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
_GPT2_ROWS = (GPT2_VOCAB_SIZE, 50304)  # GPT-2's vocabulary, and as nanoGPT pads it
_MATRICES = tuple(f".{layer}.weight" for layer in GPT2_LAYOUT)
BINS = {"train": "train.bin", "validation": "val.bin"}
TOKENS_PER_READ = 2**22  # tokens read at once
MAX_ROW_TOKENS = 2**30  # tokens; arrow's offsets within a batch have 31 bits


@dataclass(frozen=True)
class NanoGPT:
    """An imported nanoGPT checkpoint."""

    config: GPTConfig
    weights: dict[str, torch.Tensor]  # our names
    tokenizer: Tokenizer
    facts: dict[str, str]  # about its training, for the card


def load_nanogpt(
    path: Path, meta: Path | None = None, activation_function: str = "gelu"
) -> NanoGPT:
    """Read a checkpoint of nanoGPT's train.py, compiled or not, with or without biases.

    Raises RunFolderError if it is no such checkpoint or has another vocabulary, DataError if
    `meta` is no vocabulary.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a foreign file before it raises
            # Memory-mapped, since two thirds of the file are optimizer state. torch < 1.6 wrote no
            # zip files.
            mmap = zipfile.is_zipfile(path)
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if missing := [name for name in _SIZES if name not in saved["model_args"]]:
            raise ValueError(f"its model_args have no {', '.join(missing)}")
        tokenizer = _tokenizer(path, saved, saved["model_args"]["vocab_size"], meta)
        config, state = _config(saved, tokenizer, activation_function), _clean_state(saved["model"])
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        _check_shapes(config, state)
    except UserError:
        raise
    except Exception as error:  # torch and pickle raise many types for a damaged or foreign file
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (
            f"it contains {code[1]}, which was not loaded"
            if code
            else one_line(error if isinstance(error, ValueError) else repr(error))
        )
        raise RunFolderError(f"{path}: not a checkpoint of nanoGPT: {reason}") from None
    transposed = {n: weight.T if n.endswith(_MATRICES) else weight for n, weight in state.items()}
    return NanoGPT(config, from_gpt2_state_dict(transposed), tokenizer, _facts(saved))


def _config(saved: dict[str, Any], tokenizer: Tokenizer, activation_function: str) -> GPTConfig:
    sizes, end_of_text_id = saved["model_args"], tokenizer.end_of_text_id
    head, embedding = (
        next((w for name, w in saved["model"].items() if name.endswith(end)), None)
        for end in ("lm_head.weight", "transformer.wte.weight")
    )
    rows = sizes["vocab_size"]
    return GPTConfig(
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=rows if rows > tokenizer.vocab_size else None,
        n_positions=sizes["block_size"],
        n_embd=sizes["n_embd"],
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        activation_function=activation_function,
        bias=sizes.get("bias", True),
        dropout=sizes.get("dropout", 0.0),
        tie_word_embeddings=head is None or embedding is None or torch.equal(head, embedding),
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
    )


def _clean_state(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in float32 by nanoGPT's names, without torch.compile's prefix and causal masks."""
    state = {
        name.removeprefix("_orig_mod."): weight.float()
        for name, weight in model.items()
        if not name.endswith(".attn.bias")
    }
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity: the run that wrote it diverged")
    return state


def _check_shapes(config: GPTConfig, state: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        expected = gpt2_state_dict(config, GPTForCausalLM(config).state_dict())
    shapes = {name: tuple(weight.shape) for name, weight in expected.items()}
    for name in shapes.keys() & {"transformer.wte.weight", "lm_head.weight"}:
        shapes[name] = (config.padded_vocab_size or config.vocab_size, config.n_embd)
    for name in sorted(shapes.keys() | state.keys()):
        shape = shapes.get(name)
        if shape and name.endswith(_MATRICES):
            shape = shape[::-1]
        if not config.bias and name.endswith(".bias"):  # GPT-2's layout has zeros instead
            shape = None
        found = tuple(state[name].shape) if name in state else None
        if found != shape:
            raise ValueError(f"{name} is {found}, its model_args require {shape}")


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
                f"--meta: {meta} has {tokenizer.vocab_size:,} characters, the model in {path} "
                f"{rows:,} tokens; use the meta.pkl of its training data"
            )
        return tokenizer
    if rows in _GPT2_ROWS:
        return gpt2_tokenizer()
    usual_path = f"data/{_dataset(saved) or 'DATASET'}/meta.pkl in nanoGPT's folder"
    raise RunFolderError(
        f"{path}: its vocabulary of {rows:,} tokens is not GPT-2's; name its meta.pkl with --meta "
        f"({usual_path})"
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers. Any class or function in the file is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it contains {module}.{name}, which is not a plain container, and was not loaded"
        )


def load_meta(path: Path) -> Tokenizer:
    """The character tokenizer of nanoGPT's meta.pkl, with the same ids.

    Raises DataError if it is no such file.
    """
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
        is_valid = (
            ids == meta["stoi"]
            and meta["vocab_size"] == len(ids) > 0
            and all(len(c) == 1 for c in characters)
        )
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DataError(
            f"{path}: not a meta.pkl of nanoGPT: itos, stoi and vocab_size do not "
            "describe characters"
        )
    return char_tokenizer(characters)


def import_bins(source: Path, folder: Path, meta: Path | None = None) -> Manifest:
    """Write the tokens in `source` to `folder` as prepared data, one row per document if there are
    end-of-text tokens.

    The vocabulary is that of `meta`, else of the meta.pkl in `source`, else GPT-2's, as in
    nanoGPT. The files are read in pieces. Raises DataError if they are no such files, or have
    tokens beyond the vocabulary.
    """
    if meta is None and (source / "meta.pkl").is_file():
        meta = source / "meta.pkl"
    tokenizer = load_meta(meta) if meta else gpt2_tokenizer()
    end, digest, bins = tokenizer.end_of_text_id, hashlib.sha256(), {}
    for split, name in BINS.items():  # check everything before anything is written
        try:
            tokens = np.memmap(source / name, dtype=np.uint16, mode="r")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{source / name}: cannot be read: {reason}; give train.bin and val.bin"
            ) from None
        bins[split] = tokens, _row_ends(tokens, source / name, tokenizer, digest)
    sizes = bytes_of_tokens(tokenizer)
    facts = {
        split: _write_rows(tokens, ends, sizes, folder / split)
        for split, (tokens, ends) in bins.items()
    }
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    has_end = any(tokens[ends[0] - 1] == end for tokens, ends in bins.values())
    manifest = Manifest(
        format=FORMAT,
        recipe={"source": str(source), "format": "text", "tokenizer": tokenizer.name},
        revision=f"sha256:{digest.hexdigest()}",
        file_state=None,  # there is no text whose changes could be noticed
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end if has_end else None,
        train=facts["train"],
        validation=facts["validation"],
        versions=tool_versions(),
    )
    write_manifest(folder, manifest)
    return manifest


def _row_ends(tokens: np.ndarray, path: Path, tokenizer: Tokenizer, digest) -> np.ndarray:
    """Where the rows end: after each end-of-text token, and at the end. Updates `digest` with the
    bytes. Raises DataError for a token beyond the vocabulary.
    """
    limit = MAX_ROW_TOKENS if tokenizer.end_of_text_id is None else len(tokens)
    ends = [np.arange(limit, len(tokens), limit)]
    for start in tqdm(range(0, len(tokens), TOKENS_PER_READ), path.name, disable=None):
        piece = tokens[start : start + TOKENS_PER_READ]
        digest.update(piece)
        if piece.max() >= tokenizer.vocab_size:
            position = int(np.argmax(piece >= tokenizer.vocab_size))
            raise DataError(
                f"{path}: token {piece[position]} at {start + position:,} is beyond the "
                f"vocabulary ({tokenizer.name}, {tokenizer.vocab_size:,} tokens); name the "
                "matching meta.pkl with --meta"
            )
        if tokenizer.end_of_text_id is not None:
            ends.append(np.flatnonzero(piece == tokenizer.end_of_text_id) + start + 1)
    return np.unique(np.concatenate([*ends, [len(tokens)]]))


def _write_rows(
    tokens: np.ndarray, ends: np.ndarray, sizes: np.ndarray, folder: Path
) -> SplitFacts:
    """Write rows; `sizes` are the bytes of each token of the vocabulary."""
    writer, row, start = ShardWriter(folder), 0, 0
    while row < len(ends):
        last = max(row + 1, int(np.searchsorted(ends, start + TOKENS_PER_READ, "right")))
        ids, lengths = (
            np.array(tokens[start : ends[last - 1]]),
            np.diff(ends[row:last], prepend=start),
        )
        no_mask, text_bytes = np.zeros(0, np.uint8), sizes[ids].sum(keepdims=True)
        writer.write(Rows(ids, no_mask, lengths, np.arange(row, last), text_bytes))
        start, row = int(ends[last - 1]), last
    return writer.close()
