"""GPT-2 on disk: reading and writing GPT-2 checkpoints; other variants are refused."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.head_gpt import Head
from nanogpt_hf.model.layout_gpt import gpt2_state_dict

SHAPE = {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
NO_TEXT = {"bos_token_id": None, "eos_token_id": None}
TOKENS = torch.arange(24).view(2, 12)


def add_noise(model):
    """Add noise to every parameter: biases of zero would hide mistakes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def ours(**options):
    """A model of ours with noise."""
    return add_noise(GPTForCausalLM(GPTConfig(**SHAPE | NO_TEXT | options)))


@pytest.fixture
def gpt2(tmp_path):
    """A GPT-2 of transformers and its saved folder."""

    def make(**options):
        model = add_noise(GPT2LMHeadModel(GPT2Config(**SHAPE | NO_TEXT | options)))
        model.save_pretrained(tmp_path / "gpt2")
        return model, tmp_path / "gpt2"

    return make


def assert_same_logits(model, reference) -> bool:
    with torch.no_grad():
        return torch.allclose(
            model.eval()(TOKENS).logits, reference.eval()(TOKENS).logits, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_gpt2_checkpoint_forms_load(gpt2, tied, prefix, form):
    reference, folder = gpt2(tie_word_embeddings=tied)
    weights = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in weights) != tied
    if not prefix:
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    (folder / "model.safetensors").unlink()
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert assert_same_logits(GPTForCausalLM.from_pretrained(folder), reference)


def test_causal_mask_buffers_of_old_files_are_ignored(gpt2):
    reference, folder = gpt2()
    weights = load_file(folder / "model.safetensors")
    for i in range(3):
        weights[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        weights[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert assert_same_logits(GPTForCausalLM.from_pretrained(folder), reference)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "is not supported"),
        ({"scale_attn_weights": False}, "is not supported"),
        ({"add_cross_attention": True}, "is not supported"),
        ({"model_type": "llama"}, "is a llama model, not a GPT-2"),
    ],
)
def test_other_models_are_refused(gpt2, variant, reason):
    _, folder = gpt2()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | variant))
    with pytest.raises(ValueError, match=reason):
        GPTForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"resid_pdrop": 0.0, "embd_pdrop": 0.3}, "embd_pdrop 0.3, attn_pdrop 0.1"),
        ({"attn_pdrop": 0.5}, "training takes 0.1"),
        ({"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}, ""),
        ({}, ""),
    ],
)
def test_dropouts_that_differ_are_one_warning(gpt2, caplog, variant, words):
    _, folder = gpt2()
    raw = json.loads((folder / "config.json").read_text())
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw | variant))
    config = GPTConfig.from_pretrained(folder)
    assert config.dropout == variant.get("resid_pdrop", 0.1)
    warned = [record.getMessage() for record in caplog.records if "dropouts" in record.message]
    assert len(warned) == bool(words)
    assert all(words in line for line in warned)


def test_missing_weight_is_an_error(gpt2):
    _, folder = gpt2()
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.ln_f.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: .*ln_f\.weight"):
        GPTForCausalLM.from_pretrained(folder)


OPTIONS = [
    {},
    {"bias": False},
    {"padded_vocab_size": 128},
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": False, "padded_vocab_size": 64, "bias": False},
    {"activation_function": "gelu", "n_inner": 48, "layer_norm_epsilon": 1e-6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_model_is_plain_gpt2_and_loads_exactly(tmp_path, options):
    model = ours(**options)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"], raw["vocab_size"]) == (
        "gpt2",
        ["GPT2LMHeadModel"],
        61,
    )
    assert not list(tmp_path.glob("*.py"))
    loaded_again = GPTForCausalLM.from_pretrained(tmp_path)
    assert loaded_again.config.bias == options.get("bias", True)
    saved, loaded = (gpt2_state_dict(m.config, m.state_dict()) for m in (model, loaded_again))
    assert saved.keys() == loaded.keys()
    assert len(saved) > 30
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    if "padded_vocab_size" not in options:
        assert model.state_dict().keys() == loaded_again.state_dict().keys()
    assert assert_same_logits(loaded_again, model)
    assert assert_same_logits(GPT2LMHeadModel.from_pretrained(tmp_path), model)


def test_biases_trained_elsewhere_are_kept(tmp_path):
    model = ours(bias=False)
    model.save_pretrained(tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        trained.transformer.h[1].attn.c_attn.bias[5] = 0.25
    trained.save_pretrained(tmp_path / "trained")
    loaded_again = GPTForCausalLM.from_pretrained(tmp_path / "trained")
    assert loaded_again.config.bias
    assert assert_same_logits(loaded_again, trained)


@pytest.mark.parametrize("loader_name", ["config", "config folder", "subfolder"])
def test_model_without_biases_loads_by_every_class(tmp_path, loader_name):
    model = ours(bias=False)
    folder = tmp_path / "best"
    model.save_pretrained(folder)
    if loader_name == "subfolder":
        loaded_again = GPTForCausalLM.from_pretrained(tmp_path, subfolder="best")
    else:
        config = GPTConfig.from_pretrained(folder)
        loaded_again = GPTForCausalLM.from_pretrained(
            folder, config=config if loader_name == "config" else str(folder)
        )
        assert config.bias is False
    assert loaded_again.config.bias is False
    assert assert_same_logits(loaded_again, model)


def test_gpt2_state_dict_loads_into_a_model(gpt2):
    # like the Trainer with strict=False when it resumes or loads the best model
    reference, folder = gpt2()
    model = ours()
    loaded = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]  # tied
    assert loaded.unexpected_keys == []
    assert assert_same_logits(model, reference)
    repeated = ours()
    repeated.load_state_dict(model.state_dict())
    assert assert_same_logits(repeated, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary_is_resized_and_saved(tmp_path, tied):
    model = ours(padded_vocab_size=64, tie_word_embeddings=tied)
    model.resize_token_embeddings(70)
    assert type(model.lm_head) is Head
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    model.save_pretrained(tmp_path)
    loaded_again = GPTForCausalLM.from_pretrained(tmp_path)
    assert loaded_again.transformer.wte.weight.shape == (70, 32)
    assert assert_same_logits(loaded_again, model)


def without(weights, name):
    return {key: weight for key, weight in weights.items() if key != name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda weights: {"state_dict": {}}, "state_dict: is empty"),
        (
            lambda weights: {"state_dict": without(weights, "transformer.ln_f.weight")},
            "transformer.ln_f.weight of GPT-2's names is missing",
        ),
        (
            lambda weights: {"state_dict": weights | {"transformer.wpe.weight": torch.zeros(2, 3)}},
            r"transformer.wpe.weight of GPT-2's names has \[2, 3\]",
        ),
        (lambda weights: {"state_dict": weights | {"more": torch.zeros(2)}}, "GPT-2 has no more"),
        (lambda weights: {"max_shard_size": "large"}, "Unit"),
        (lambda weights: {"variant": "../x"}, "No such file"),
        (lambda weights: {"push_to_hub": True, "repo_id": "a b"}, "Repo id"),
    ],
)
@pytest.mark.parametrize("is_gpt2", [True, False])
def test_model_that_cannot_be_saved_leaves_nothing(
    tmp_path, monkeypatch, options, message, is_gpt2
):
    model = ours()
    options = options(model.state_dict())
    if not is_gpt2 and "state_dict" in options:
        pytest.skip("transformers writes whatever weights it gets")
    monkeypatch.setattr(GPTConfig, "is_gpt2", is_gpt2)
    with pytest.raises(Exception, match=message):
        model.save_pretrained(tmp_path / "new", **options)
    assert list(tmp_path.iterdir()) == []
    # A folder of others stays.
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes").touch()
    with contextlib.suppress(Exception):
        model.save_pretrained(tmp_path / "old", **options)
    assert (tmp_path / "old" / "notes").is_file()


@pytest.mark.parametrize("is_gpt2", [True, False])
def test_model_whose_push_is_interrupted_is_kept(tmp_path, monkeypatch, is_gpt2):
    """The push comes after the last file."""
    save = GPTForCausalLM._save

    def interrupted(model, folder, state_dict, push_to_hub):
        save(model, folder, state_dict)
        raise KeyboardInterrupt

    monkeypatch.setattr(GPTConfig, "is_gpt2", is_gpt2)
    monkeypatch.setattr(GPTForCausalLM, "_save", interrupted)
    model = ours()
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    saved = GPTForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)


def test_other_processes_write_nothing_and_remove_nothing(tmp_path, monkeypatch):
    """With FSDP2 accelerate's get_state_dict gives the weights to the main process alone."""
    model = ours()
    model.save_pretrained(tmp_path / "new", is_main_process=False, state_dict={})
    assert list(tmp_path.iterdir()) == []
    # The main process makes this folder while another one fails.
    save = GPTForCausalLM._save

    def fail(model, folder, *arguments, **options):
        save(model, folder, None)
        raise RuntimeError

    monkeypatch.setattr(GPTForCausalLM, "_save", fail)
    with pytest.raises(RuntimeError):
        model.save_pretrained(tmp_path / "new", is_main_process=False)
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_model_is_not_saved_where_a_file_or_a_dead_link_is_and_tilde_is_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = ours()
    (tmp_path / "file").touch()
    (tmp_path / "dead").symlink_to("nowhere")
    for name in ("file", "dead"):
        with pytest.raises(FileExistsError, match=f"{name}: is no folder"):
            model.save_pretrained(name)
    model.save_pretrained("~/model")
    assert not (tmp_path / "~").exists()
    opened = GPTForCausalLM.from_pretrained("~/model")
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    with pytest.raises(FileNotFoundError):
        model.save_pretrained("")
