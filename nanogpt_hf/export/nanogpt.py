"""Import nanoGPT's ckpt.pt and meta.pkl as model and tokenizer, its train.bin and val.bin as
prepared data. Code in these pickles is never run.

nanoGPT uses GPT-2's layer names, but stores matrices in the layout of nn.Linear: (out, in).
"""

import contextlib
import errno
import hashlib
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nanogpt_hf.config.names import GPT2_VOCAB_SIZE
from nanogpt_hf.data.hf_tokenizer import bytes_of_tokens, save_tokenizer, vocabulary_hash
from nanogpt_hf.data.manifest import Manifest, SplitFacts, write_manifest
from nanogpt_hf.data.prepared import TOKENIZER
from nanogpt_hf.data.shards import Row, ShardWriter
from nanogpt_hf.data.tokenizer import Tokenizer, char_tokenizer, gpt2_tokenizer
from nanogpt_hf.errors import DataError, RunFolderError, UserError, one_line
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

PADDED_GPT2 = 50304  # rows of an embedding for GPT-2's vocabulary, as nanoGPT pads it
_MATRICES = tuple(f".{layer}.weight" for layer in GPT2_LAYOUT)
BINS = {"train": "train.bin", "validation": "val.bin"}
TOKENS_PER_READ = 2**22  # tokens read at once


@dataclass(frozen=True)
class NanoGPT:
    """An imported nanoGPT checkpoint."""

    config: GPTConfig
    weights: dict[str, torch.Tensor]  # our names
    tokenizer: Tokenizer


@contextlib.contextmanager
def reading_checkpoint(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a checkpoint of nanoGPT's train.py.

    Raises RunFolderError for any error of the block but UserError: damaged and foreign files raise
    many types.
    """
    try:
        # Memory-mapped, since most of the file is optimizer state, which is not always read.
        yield torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UserError:
        raise
    except Exception as error:
        reason = one_line(error) or repr(error)
        # The memory-mapping of a file that is cut fails with EINVAL. Other error numbers are those
        # of a disk, or of a file that cannot be opened.
        of_disk = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if not of_disk and not zipfile.is_zipfile(path):
            reason = "no file that torch.save has written, or a part of one"
        if isinstance(error, KeyError):
            reason = f"it has no {error.args[0]!r}"
        if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it contains {code[1]}, which was not loaded"
        raise RunFolderError(f"{path}: not a checkpoint of nanoGPT: {reason}") from None


def load_nanogpt(
    path: Path,
    meta: Path | None = None,
    activation_function: str = "gelu",
    tokenizer: Tokenizer | None = None,
) -> NanoGPT:
    """Read a checkpoint of nanoGPT's train.py, compiled or not, with or without biases.

    Its vocabulary is that of `tokenizer`, else of `meta`, else GPT-2's. Raises RunFolderError if it
    is no such checkpoint or has another vocabulary, DataError if `meta` is no vocabulary.
    """
    with reading_checkpoint(path) as saved:
        arguments = saved["model_args"]
        # First the sizes, which tell other files from nanoGPT's.
        sizes = {name: arguments[name] for name in ("vocab_size", "n_embd", "n_layer", "n_head")}
        sizes["n_positions"] = arguments["block_size"]
        tokenizer = tokenizer or _tokenizer(path, sizes["vocab_size"], meta)
        weights = plain_names(saved["model"])
        embedding = weights["transformer.wte.weight"]
        config = GPTConfig(
            activation_function=activation_function,
            **sizes,
            bias=arguments.get("bias", True),
            dropout=arguments.get("dropout", 0.0),
            tie_word_embeddings=torch.equal(weights.get("lm_head.weight", embedding), embedding),
            bos_token_id=tokenizer.end_of_text_id,
            eos_token_id=tokenizer.end_of_text_id,
        )
        model = model_with(weights, config)
    if config.vocab_size > tokenizer.vocab_size:
        # nanoGPT pads GPT-2's vocabulary to 50,304 rows, for faster products.
        config.padded_vocab_size = config.vocab_size
        config.vocab_size = tokenizer.vocab_size
    return NanoGPT(config, model.float().state_dict(), tokenizer)


def plain_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of nanoGPT's parameters, in the order of nanoGPT's model."""
    return {
        # torch.compile puts a prefix before every name.
        name.removeprefix("_orig_mod."): weight
        for name, weight in weights.items()
        # Causal masks are stored too; our attention needs none.
        if not name.endswith(".attn.bias")
    }


def model_with(tensors: dict[str, torch.Tensor], config: GPTConfig) -> GPTForCausalLM:
    """Model of `config` whose parameters are tensors of nanoGPT, by nanoGPT's names: its weights,
    or averages of their gradients. Raises an error if they do not fit.
    """
    # Matrices are (out, in) here, and `load_state_dict` expects GPT-2's (in, out).
    state = {
        name: tensor.t() if name.endswith(_MATRICES) else tensor for name, tensor in tensors.items()
    }
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    # Without memory for initial values: the tensors become the model's own.
    with torch.device("meta"):
        model = GPTForCausalLM(config)
    model.load_state_dict(state, assign=True)
    return model


def _tokenizer(path: Path, rows: int, meta: Path | None) -> Tokenizer:
    """Characters of `meta`, or GPT-2's tokenizer if the number of embedding rows fits."""
    tokenizer = gpt2_tokenizer() if meta is None else load_meta(meta)
    # GPT-2's vocabulary may be padded, characters are not.
    if rows not in ((GPT2_VOCAB_SIZE, PADDED_GPT2) if meta is None else (tokenizer.vocab_size,)):
        raise RunFolderError(
            f"{path}: has {rows:,} tokens, {meta or 'the vocabulary of GPT-2'} "
            f"{tokenizer.vocab_size:,}; name the meta.pkl of its training data with --meta "
            "(data/DATASET/meta.pkl in nanoGPT's folder)"
        )
    return tokenizer


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers. Any class or function in the file is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which was not loaded")


def load_meta(path: Path) -> Tokenizer:
    """Character tokenizer of nanoGPT's meta.pkl, with the same ids.

    Raises DataError if it is no such file.
    """
    try:
        with path.open("rb") as file:
            meta = _PlainUnpickler(file).load()
        # itos: id -> character, stoi: character -> id. Each has to be the other's inverse.
        characters = [meta["itos"][i] for i in range(meta["vocab_size"])]
        ids = [meta["stoi"][character] for character in characters]
        if ids != [*range(len(ids))] or set(map(len, characters)) != {1}:
            raise ValueError("its itos, stoi and vocab_size do not describe characters")
    except Exception as error:  # damaged pickles raise almost anything
        reason = one_line(error) or repr(error)
        raise DataError(f"{path}: not a meta.pkl of nanoGPT: {reason}") from None
    return char_tokenizer(characters)


def import_bins(source: Path, folder: Path, meta: Path | None = None) -> Manifest:
    """Write the tokens in `source` to `folder` as prepared data, one row per document if there are
    end-of-text tokens.

    The vocabulary is from `meta`, else from the meta.pkl in `source`, else GPT-2's, as in nanoGPT.
    Raises DataError if they are no such files, or have tokens beyond the vocabulary.
    """
    if meta is None and (source / "meta.pkl").is_file():
        meta = source / "meta.pkl"
    tokenizer = load_meta(meta) if meta else gpt2_tokenizer()
    digest = hashlib.sha256()
    splits = {
        split: _write_rows(source / name, folder / split, tokenizer, digest)
        for split, name in BINS.items()
    }
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    manifest = Manifest(
        recipe={"source": str(source), "format": "text", "tokenizer": tokenizer.name},
        revision=f"sha256:{digest.hexdigest()}",
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id if any(e for _, e in splits.values()) else None,
        train=splits["train"][0],
        validation=splits["validation"][0],
    )
    write_manifest(folder, manifest)
    return manifest


def _write_rows(
    path: Path, folder: Path, tokenizer: Tokenizer, digest: Any
) -> tuple[SplitFacts, bool]:
    """Write the documents in `path` as rows, and update `digest` with its bytes.

    Also returns whether documents end with the end-of-text token. The file is read in pieces.
    """
    try:
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except ValueError as error:
        # The file is empty, or ends within a token.
        raise DataError(f"{path}: cannot be read as tokens: {error}") from None
    writer = ShardWriter(folder)
    sizes = bytes_of_tokens(tokenizer.hf, tokenizer.name)
    end = tokenizer.end_of_text_id
    # The first token and the number of the first document that is not written yet: the last
    # document of a piece may go on in the next one.
    begin = 0
    row = 0
    for start in tqdm(range(0, len(tokens), TOKENS_PER_READ), path.name, disable=None):
        # A memory map: only this piece of the file is read.
        piece = tokens[start : start + TOKENS_PER_READ]
        digest.update(piece)
        if piece.max() >= tokenizer.vocab_size:
            raise DataError(
                f"{path}: token {piece.max()} is beyond the vocabulary ({tokenizer.name}, "
                f"{tokenizer.vocab_size:,} tokens); name the matching meta.pkl with --meta"
            )
        # Documents end after an end-of-text token, the last one with the file.
        ends = np.flatnonzero(piece == end) + start + 1
        last = start + len(piece)
        if last == len(tokens):
            ends = np.union1d(ends, [last])
        if len(ends):
            documents = np.split(tokens[begin : ends[-1]], ends[:-1] - begin)
            writer.write(
                [Row(n, ids, int(sizes[ids].sum())) for n, ids in enumerate(documents, row)]
            )
            begin = int(ends[-1])
            row += len(ends)
    return writer.close(), end is not None and (row > 1 or int(tokens[-1]) == end)
