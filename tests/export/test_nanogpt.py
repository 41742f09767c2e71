"""Import of nanoGPT checkpoints: equal logits, and refusal of damaged, foreign or hostile files."""

import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from assertions import refusal
from nanogpt_hf.errors import UserError
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.export.nanogpt import load_meta, load_nanogpt

refused = partial(refusal, error=UserError)
CHARACTERS = "\n !abcdeé"
SMALL = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 12,
    "vocab_size": len(CHARACTERS),
    "dropout": 0.1,
}


def nanogpt_logits(state: dict[str, torch.Tensor], n_head: int, ids: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass: ids (B, T) -> logits (B, T, V)."""

    def norm(x, name):
        return F.layer_norm(
            x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5
        )

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    length = ids.shape[1]
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][:length]
    future = torch.ones(length, length).triu(1).bool()
    for block in range(1000):
        at = f"transformer.h.{block}"
        if f"{at}.ln_1.weight" not in state:
            break
        heads = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").unflatten(-1, (3, n_head, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        x = x + linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{at}.attn.c_proj")
        hidden = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2  # exact GELU
        x = x + linear(hidden, f"{at}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f"), "lm_head")


def make_state(
    bias: bool, n_layer: int, n_embd: int, block_size: int, vocab_size: int, **_
) -> dict[str, torch.Tensor]:
    """Random weights with nanoGPT's names, also biases and LayerNorms, so that any mix-up
    changes the logits.
    """
    shapes = {
        "transformer.wte.weight": (vocab_size, n_embd),
        "transformer.wpe.weight": (block_size, n_embd),
    }
    for at in (f"transformer.h.{i}" for i in range(n_layer)):
        sizes = {
            "attn.c_attn": (3, 1),
            "attn.c_proj": (1, 1),
            "mlp.c_fc": (4, 1),
            "mlp.c_proj": (1, 4),
        }
        shapes |= {
            f"{at}.{name}.weight": (out * n_embd, into * n_embd)
            for name, (out, into) in sizes.items()
        }
        shapes |= {f"{at}.{name}.bias": (out * n_embd,) for name, (out, _) in sizes.items()}
        shapes |= {f"{at}.ln_{i}.{kind}": (n_embd,) for i in (1, 2) for kind in ("weight", "bias")}
    shapes |= {f"transformer.ln_f.{kind}": (n_embd,) for kind in ("weight", "bias")}
    draw = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=draw) * 0.4 for name, shape in shapes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return {name: weight for name, weight in state.items() if bias or not name.endswith(".bias")}


def make_checkpoint(
    path: Path, *, bias: bool = True, compiled: bool = False, **changes
) -> dict[str, torch.Tensor]:
    arguments = SMALL | {"bias": bias} | changes
    state = make_state(**arguments)
    saved = {
        "model": {"_orig_mod." * compiled + name: weight for name, weight in state.items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": arguments,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.8857),
        "config": {"dataset": "letters", "device": "cpu"},
    }
    torch.save(saved, path)
    return state


def make_meta(path: Path, characters: str = CHARACTERS, **changes) -> Path:
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    meta["stoi"] = {character: i for i, character in meta["itos"].items()}
    path.write_bytes(pickle.dumps(meta | changes))
    return path


def opened(folder: Path, imported):
    """The imported model and tokenizer, loaded with transformers alone."""
    write_model_folder(folder, imported.config, imported.weights, imported.tokenizer.hf, "")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_load_nanogpt_keeps_the_logits(tmp_path, bias, compiled):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=bias, compiled=compiled)
    imported_model = load_nanogpt(tmp_path / "ckpt.pt", make_meta(tmp_path / "meta.pkl"))
    assert imported_model.config.bias is bias
    assert imported_model.facts == {
        "trained with": "nanoGPT",
        "steps": "2,000",
        "best sampled validation loss": "1.8857",
        "data": "letters",
    }
    model, tokenizer = opened(tmp_path / "out", imported_model)
    ids = torch.tensor([tokenizer("decade éa!\nb")["input_ids"]])
    assert ids[0].tolist() == [CHARACTERS.index(character) for character in "decade éa!\nb"]
    expected = nanogpt_logits(state, 2, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_rows_of_gpt2s_vocabulary_are_dropped(tmp_path):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=False, vocab_size=50304, n_layer=1, n_embd=8)
    model, tokenizer = opened(tmp_path / "out", load_nanogpt(tmp_path / "ckpt.pt"))
    ids = torch.tensor([tokenizer("Hello world<|endoftext|>")["input_ids"]])
    assert ids[0].tolist() == [15496, 995, 50256]
    assert model.config.vocab_size == 50257
    assert model.config.eos_token_id == 50256
    expected = nanogpt_logits(state, 2, ids)[..., :50257]
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_untied_head_stays_untied(tmp_path):
    make_checkpoint(tmp_path / "ckpt.pt")
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    saved["model"]["lm_head.weight"] = saved["model"]["lm_head.weight"].flip(0)
    torch.save(saved, tmp_path / "ckpt.pt")
    model, _ = opened(
        tmp_path / "out", load_nanogpt(tmp_path / "ckpt.pt", make_meta(tmp_path / "meta.pkl"))
    )
    ids = torch.arange(9)[None]
    torch.testing.assert_close(
        model(ids).logits, nanogpt_logits(saved["model"], 2, ids), atol=1e-5, rtol=0
    )


def test_load_nanogpt_reads_old_formats(tmp_path):
    """Causal masks as buffers, arguments without `bias`, torch's format before zip files."""
    make_checkpoint(tmp_path / "ckpt.pt")
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    del (
        saved["model_args"]["bias"],
        saved["model_args"]["dropout"],
        saved["config"],
        saved["iter_num"],
    )
    saved["model"] |= {
        f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)
    }
    torch.save(saved, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    meta = make_meta(tmp_path / "meta.pkl")
    new, old = (load_nanogpt(tmp_path / name, meta, "gelu_new") for name in ("ckpt.pt", "old.pt"))
    assert old.config.bias is True
    assert old.config.activation_function == "gelu_new"
    assert new.weights.keys() == old.weights.keys()
    assert all(torch.equal(new.weights[name], old.weights[name]) for name in new.weights)


@torch.no_grad()
def test_load_nanogpt_keeps_the_loss_of_a_real_checkpoint(tmp_path, shared):
    folder = shared / "models" / "nanogpt-shakespeare-char"
    model, tokenizer = opened(
        tmp_path / "out", load_nanogpt(folder / "ckpt.pt", folder / "meta.pkl")
    )
    text = (shared / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text[int(0.9 * len(text)) :])["input_ids"])
    assert len(ids) == 111540
    windows = ids[: (len(ids) - 1) // 64 * 64 + 1].unfold(0, 65, 64)
    losses = [
        F.cross_entropy(
            model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        )
        for rows in windows[::8].split(100)
    ]
    # that of all windows
    assert sum(losses).item() / windows[::8, 1:].numel() == pytest.approx(1.898, abs=0.04)


@torch.no_grad()
def test_load_nanogpt_keeps_the_logits_of_a_real_checkpoint_with_biases(tmp_path, shared):
    path = shared / "models" / "nanogpt-tiny-bias" / "ckpt.pt"
    saved = torch.load(path, weights_only=True, map_location="cpu")
    meta = shared / "models" / "nanogpt-shakespeare-char" / "meta.pkl"
    model, _ = opened(tmp_path / "out", load_nanogpt(path, meta))
    ids = torch.arange(32)[None] * 2
    expected = nanogpt_logits(saved["model"], saved["model_args"]["n_head"], ids)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


class Malicious:
    """Creates a folder when unpickled without weights_only."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_ckpt_pt_or_meta_pkl_is_not_run(tmp_path):
    trace = tmp_path / "it-ran"
    torch.save({"model": Malicious(trace), "model_args": {}}, tmp_path / "ckpt.pt")
    assert ".mkdir" in refused(load_nanogpt, tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Malicious(trace)}))
    assert ".mkdir" in refused(load_meta, tmp_path / "meta.pkl")
    assert not trace.exists()
    pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert trace.exists()  # the pickle runs code


def change(saved: dict, key: str, value: object) -> None:
    *path, last = key.split("/")
    for name in path:
        saved = saved[name]
    if value is None:
        del saved[last]
    else:
        saved[last] = value


C_ATTN = "transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model"),
        ("model_args", [1, 2], ""),
        ("model_args/n_head", None, "n_head"),
        ("model_args/n_embd", "16", ""),
        ("model_args/n_layer", 3, "transformer.h.2.attn.c_attn.bias"),
        ("model_args/n_layer", 1, "transformer.h.1.attn.c_attn.bias"),
        ("model_args/block_size", 24, "(24, 16)"),
        ("model_args/bias", False, "transformer.h.0.attn.c_attn.bias"),
        (f"model/{C_ATTN}", None, C_ATTN),
        (f"model/{C_ATTN}", torch.zeros(16, 48), f"{C_ATTN} is (16, 48)"),
        (f"model/{C_ATTN}", torch.full((48, 16), torch.nan), C_ATTN),
        ("model/extra.weight", torch.zeros(2), "extra.weight"),
    ],
)
def test_malformed_nanogpt_checkpoints_are_refused(tmp_path, key, value, message):
    make_checkpoint(tmp_path / "ckpt.pt")
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    change(saved, key, value)
    torch.save(saved, tmp_path / "ckpt.pt")
    line = refused(load_nanogpt, tmp_path / "ckpt.pt", make_meta(tmp_path / "meta.pkl"))
    assert line.startswith(f"{tmp_path / 'ckpt.pt'}: ")
    assert message in line


@pytest.mark.parametrize("length", [0, 10, 1000, -30])
def test_load_nanogpt_refuses_truncated_files(tmp_path, length):
    make_checkpoint(tmp_path / "ckpt.pt")
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:length])
    assert f"{tmp_path / 'ckpt.pt'}: " in refused(load_nanogpt, tmp_path / "ckpt.pt")


def test_load_nanogpt_refuses_other_checkpoints(shared):
    message = refused(load_nanogpt, shared / "models" / "not-a-nanogpt-ckpt.pt")
    assert "n_layer, n_head, n_embd, block_size" in message


def test_load_nanogpt_needs_the_matching_meta_pkl(tmp_path):
    make_checkpoint(tmp_path / "ckpt.pt")
    assert "--meta (data/letters/meta" in refused(load_nanogpt, tmp_path / "ckpt.pt")
    for characters in ("abc", CHARACTERS + "xyz"):
        other = make_meta(tmp_path / "other.pkl", characters)
        message = refused(load_nanogpt, tmp_path / "ckpt.pt", other)
        assert f"other.pkl has {len(characters)} characters" in message
        assert "9 tokens" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"itos": ["a", "b"]},
        {"itos": {0: "a"}, "stoi": {"a": 0}},
        {"itos": {0: "ab", 1: "c"}, "stoi": {"ab": 0, "c": 1}, "vocab_size": 2},
        {"itos": {0: "a", 1: "a"}, "stoi": {"a": 1}, "vocab_size": 2},
        {"itos": {0: "\ud800"}, "stoi": {"\ud800": 0}, "vocab_size": 1},
        {"itos": {}, "stoi": {}, "vocab_size": 0},
        {"stoi": None},
    ],
)
def test_load_meta_refuses_wrong_content(tmp_path, changes):
    assert f"{tmp_path / 'meta.pkl'}: " in refused(
        load_meta, make_meta(tmp_path / "meta.pkl", **changes)
    )


def test_load_meta_refuses_missing_and_damaged_files(tmp_path):
    whole = make_meta(tmp_path / "meta.pkl").read_bytes()
    for content in (b"", whole[:-20], b"itos: [a, b]", pickle.dumps([1])):
        (tmp_path / "bad.pkl").write_bytes(content)
        assert f"{tmp_path / 'bad.pkl'}: " in refused(load_meta, tmp_path / "bad.pkl")
    assert f"{tmp_path / 'missing.pkl'}: " in refused(load_meta, tmp_path / "missing.pkl")
