"""Writes files as nanoGPT does: weights, meta.pkl, train.bin and val.bin."""

import pickle
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

CHARACTERS = "\n !abcdeé"


def make_state(bias: bool, block_size: int, **sizes) -> dict[str, torch.Tensor]:
    """Random weights with nanoGPT's names, whose matrices are (out, in)."""
    del sizes["dropout"]
    state = GPT2LMHeadModel(GPT2Config(n_positions=block_size, **sizes)).state_dict()
    draw = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn((weight.T if is_matrix(name) else weight).shape, generator=draw)
        for name, weight in state.items()
        if bias or not name.endswith(".bias")
    }
    return random | {"lm_head.weight": random["transformer.wte.weight"]}


def is_matrix(name: str) -> bool:
    """Whether GPT-2 stores the weight in the other layout."""
    return ".h." in name and ".ln_" not in name and name.endswith(".weight")


def make_meta(path: Path, characters: str = CHARACTERS, **changes) -> Path:
    itos = dict(enumerate(characters))
    stoi = {character: i for i, character in itos.items()}
    meta = {"vocab_size": len(characters), "itos": itos, "stoi": stoi}
    path.write_bytes(pickle.dumps(meta | changes))
    return path


def write_bins(folder, train, validation):
    folder.mkdir()
    for name, ids in (("train", train), ("val", validation)):
        np.asarray(ids, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder
