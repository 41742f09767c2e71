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
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "dropout": 0.1}


def nanogpt_logits(state: dict[str, torch.Tensor], n_head: int, ids: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass: ids (B, T) -> logits (B, T, V)."""

    def norm(x, name):
        bias = state.get(f"{name}.bias")
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], bias, 1e-5)

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    length = ids.shape[1]
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][:length]
    future = torch.ones(length, length).triu(1).bool()
    for block in range(sum(name.endswith("ln_1.weight") for name in state)):
        at = f"transformer.h.{block}"
        heads = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").unflatten(-1, (3, n_head, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        x = x + linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{at}.attn.c_proj")
        hidden = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2  # exact GELU
        x = x + linear(hidden, f"{at}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f"), "lm_head")


def make_state(bias: bool, n_layer: int, n_embd: int, block_size: int, vocab_size: int, **_):
    """Random weights with nanoGPT's names, also biases and LayerNorms, so that any mix-up
    changes the logits.
    """
    shapes = {"wte.weight": (vocab_size, n_embd), "wpe.weight": (block_size, n_embd)}
    sizes = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
    norms = ["ln_f"]
    for block in range(n_layer):
        for name, (out, into) in sizes.items():
            shapes[f"h.{block}.{name}.weight"] = (out * n_embd, into * n_embd)
            shapes[f"h.{block}.{name}.bias"] = (out * n_embd,)
        norms += [f"h.{block}.ln_1", f"h.{block}.ln_2"]
    shapes |= {f"{name}.{kind}": (n_embd,) for name in norms for kind in ("weight", "bias")}
    draw = torch.Generator().manual_seed(0)
    state = {
        f"transformer.{name}": torch.randn(shape, generator=draw) * 0.4
        for name, shape in shapes.items()
        if bias or not name.endswith(".bias")
    }
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def make_checkpoint(path: Path, *, bias: bool = True, prefix: str = "", **changes):
    sizes = SMALL | {"vocab_size": len(CHARACTERS), "bias": bias} | changes
    state = make_state(**sizes)
    saved = {
        "model": {prefix + name: weight for name, weight in state.items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": sizes,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.8857),
        "config": {"dataset": "letters", "device": "cpu"},
    }
    torch.save(saved, path)
    return state


def make_meta(path: Path, characters: str = CHARACTERS, **changes) -> Path:
    itos = dict(enumerate(characters))
    stoi = {character: i for i, character in itos.items()}
    meta = {"vocab_size": len(characters), "itos": itos, "stoi": stoi}
    path.write_bytes(pickle.dumps(meta | changes))
    return path


@pytest.fixture
def meta(tmp_path) -> Path:
    return make_meta(tmp_path / "meta.pkl")


def opened(folder: Path, imported):
    """The imported model and tokenizer, loaded with transformers alone."""
    write_model_folder(folder, imported.config, imported.weights, imported.tokenizer.hf, "")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def assert_equal_logits(model, state, ids, n_head: int = 2) -> None:
    with torch.no_grad():
        expected = nanogpt_logits(state, n_head, ids)[..., : model.config.vocab_size]
        assert expected.std() > 0.2
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("bias", "prefix"), [(False, ""), (True, ""), (True, "_orig_mod.")])
def test_load_nanogpt_keeps_the_logits(tmp_path, meta, bias, prefix):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    imported = load_nanogpt(tmp_path / "ckpt.pt", meta)
    assert imported.config.bias is bias
    assert imported.facts == {
        "trained with": "nanoGPT",
        "steps": "2,000",
    }
    model, tokenizer = opened(tmp_path / "out", imported)
    ids = torch.tensor([tokenizer("decade éa!\nb")["input_ids"]])
    assert ids[0].tolist() == [CHARACTERS.index(character) for character in "decade éa!\nb"]
    assert_equal_logits(model, state, ids)


def test_padding_rows_of_gpt2s_vocabulary_are_dropped(tmp_path):
    state = make_checkpoint(tmp_path / "ckpt.pt", bias=False, vocab_size=50304, n_layer=1, n_embd=8)
    model, tokenizer = opened(tmp_path / "out", load_nanogpt(tmp_path / "ckpt.pt"))
    ids = torch.tensor([tokenizer("Hello world<|endoftext|>")["input_ids"]])
    assert ids[0].tolist() == [15496, 995, 50256]
    assert (model.config.vocab_size, model.config.eos_token_id) == (50257, 50256)
    assert_equal_logits(model, state, ids)


def test_untied_heads_and_older_checkpoints(tmp_path, meta):
    """An untied head, causal masks as buffers, and arguments without `bias`."""
    state = make_checkpoint(tmp_path / "ckpt.pt")
    state["lm_head.weight"] = state["lm_head.weight"].flip(0)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}
    sizes = SMALL | {"vocab_size": len(CHARACTERS)}
    torch.save({"model": state | masks, "model_args": sizes}, tmp_path / "ckpt.pt")
    imported = load_nanogpt(tmp_path / "ckpt.pt", meta)
    assert (imported.config.bias, imported.facts) == (True, {"trained with": "nanoGPT"})
    assert_equal_logits(opened(tmp_path / "out", imported)[0], state, torch.arange(9)[None])
    older = load_nanogpt(tmp_path / "ckpt.pt", meta, "gelu_new")
    assert older.config.activation_function == "gelu_new"


@pytest.mark.long
@torch.no_grad()
def test_load_nanogpt_keeps_the_loss_of_a_real_checkpoint(tmp_path, shared):
    folder = shared / "models" / "nanogpt-shakespeare-char"
    imported = load_nanogpt(folder / "ckpt.pt", folder / "meta.pkl")
    model, tokenizer = opened(tmp_path / "out", imported)
    text = (shared / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text[int(0.9 * len(text)) :])["input_ids"])
    assert len(ids) == 111540
    windows = ids[: (len(ids) - 1) // 64 * 64 + 1].unfold(0, 65, 64)[::8]
    logits = torch.cat([model(rows[:, :-1]).logits for rows in windows.split(100)])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(1.898, abs=0.04)  # that of all windows


def test_load_nanogpt_keeps_the_logits_of_a_real_checkpoint_with_biases(tmp_path, shared):
    path = shared / "models" / "nanogpt-tiny-bias" / "ckpt.pt"
    saved = torch.load(path, weights_only=True, map_location="cpu")
    meta = shared / "models" / "nanogpt-shakespeare-char" / "meta.pkl"
    model, _ = opened(tmp_path / "out", load_nanogpt(path, meta))
    ids = torch.arange(32)[None] * 2
    assert_equal_logits(model, saved["model"], ids, saved["model_args"]["n_head"])


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


C_ATTN = "transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model"),
        ("model_args", [1, 2], ""),
        ("model_args/n_head", None, "n_head"),
        ("model_args/n_embd", "16", ""),
        ("model_args/n_layer", 10**9, "n_layer must be from 1 to 1,000, got 1000000000"),
        ("model_args/block_size", 0, "n_positions must be from 1 "),
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
def test_malformed_nanogpt_checkpoints_are_refused(tmp_path, meta, key, value, message):
    make_checkpoint(tmp_path / "ckpt.pt")
    saved = part = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    *path, last = key.split("/")
    for name in path:
        part = part[name]
    part[last] = value
    if value is None:
        del part[last]
    torch.save(saved, tmp_path / "ckpt.pt")
    line = refused(load_nanogpt, tmp_path / "ckpt.pt", meta)
    assert line.startswith(f"{tmp_path / 'ckpt.pt'}: ")
    assert message in line


def test_load_nanogpt_refuses_truncated_and_other_files(tmp_path, shared):
    make_checkpoint(tmp_path / "ckpt.pt")
    content = (tmp_path / "ckpt.pt").read_bytes()
    for length in (0, 10, 1000, -30):
        (tmp_path / "ckpt.pt").write_bytes(content[:length])
        assert f"{tmp_path / 'ckpt.pt'}: " in refused(load_nanogpt, tmp_path / "ckpt.pt")
    message = refused(load_nanogpt, shared / "models" / "not-a-nanogpt-ckpt.pt")
    assert "n_layer, n_head, n_embd, block_size" in message


def test_load_nanogpt_needs_the_matching_meta_pkl(tmp_path):
    make_checkpoint(tmp_path / "ckpt.pt")
    assert "--meta (data/DATASET/meta" in refused(load_nanogpt, tmp_path / "ckpt.pt")
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
    path = make_meta(tmp_path / "meta.pkl", **changes)
    assert f"{path}: " in refused(load_meta, path)


def test_load_meta_refuses_missing_and_damaged_files(tmp_path, meta):
    whole, bad = meta.read_bytes(), tmp_path / "bad.pkl"
    assert f"{bad}: " in refused(load_meta, bad)
    for content in (b"", whole[:-20], b"itos: [a, b]", pickle.dumps([1])):
        bad.write_bytes(content)
        assert f"{bad}: " in refused(load_meta, bad)
