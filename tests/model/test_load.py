"""Models from folders: what is read, and what is refused."""

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanogpt_hf import console
from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import DivergedError, UserError
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.load import load_model

SECTION = ModelSection(n_layer=1, n_head=2, n_embd=8, n_positions=8)


def test_folder_without_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="not a model folder"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="looked up on the Hub") as caught:
        load_model("nobody/nothing")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded as a language model"):
        load_model(str(tmp_path))


@pytest.fixture
def folder(tmp_path):
    """A model folder to damage."""
    build_model(build_config(SECTION, 61), seed=1).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder) -> str:
    with pytest.raises(UserError) as error:
        load_model(str(folder))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value).removeprefix(f"{folder}: cannot be loaded as a language model: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layer", 10**9),
        ("n_positions", 0),
    ],
)
def test_invalid_sizes_are_refused_before_building(folder, name, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    assert refusal(folder).startswith(f"{name} must be from ")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda w: w.pop("transformer.ln_f.weight"), "missing keys: ['transformer.ln_f.weight']"),
        (lambda w: w.update(more=torch.ones(1)), "unexpected keys: ['more']"),
        (lambda w: w.update({"transformer.ln_f.weight": torch.ones(3)}), "mismatched keys: "),
    ],
    ids=["missing", "more", "shape"],
)
def test_weights_of_another_model_are_one_line(folder, capfd, damage, reason):
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with console.configure_logging(None):
        assert reason in refusal(folder)
    assert "REPORT" not in capfd.readouterr().err  # no long message of transformers


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickle_is_refused_in_one_line(folder, protocol):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([Path("x"), "x" * 10**5], protocol))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refusal(folder).endswith("holds more than tensors, and were not opened")


@pytest.mark.parametrize(
    "ends",
    ['"x"', '[1, "x"]', "[[1]]", '{"a": 1}', "1.5", "true", "-1", "61", "[1, 61]", '"1"'],
)
def test_end_of_the_generation_config_that_is_no_token_is_one_line(folder, ends):
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    assert refusal(folder).startswith(f"{folder}: generation_config.json: eos_token_id ")
    assert refusal(folder).endswith("correct it, or remove the field")


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "5", "", "{", "[" * 9000),
        *('{"temperature": NaN}', '{"temperature": 1e999}', '{"a": {"b": [-Infinity]}}'),
        *('{"cache_implementation": "x"}', '{"compile_config": 5}', '{"watermarking_config": 5}'),
    ],
    ids=lambda text: text[:30],
)
def test_damaged_generation_config_is_one_line(folder, text):
    (folder / "generation_config.json").write_text(text)
    assert refusal(folder).startswith(f"{folder}/generation_config.json: cannot be read: ")
    assert "remove the file" in refusal(folder)


@pytest.mark.parametrize("ends", [None, 3, [], [3, 60]])
def test_generation_config_of_tokens_is_read(folder, ends):
    fields = {"eos_token_id": ends, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    model = load_model(str(folder))
    assert model.generation_config.eos_token_id == ends
    assert model.generation_config.temperature == 0.5


def test_end_beyond_the_vocabulary_that_config_has_too_is_read(folder):
    """As in a GPT-2 of transformers with few tokens, of whose config only the size was set."""
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 50256}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 50256}')
    assert load_model(str(folder)).generation_config.eos_token_id == 50256


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "its transformer.h.0.mlp.fc.weight is not finite"),
        (float("inf"), "its transformer.h.0.mlp.fc.weight is not finite"),
        (3e38, "its last hidden state is not finite"),
    ],
    ids=str,
)
def test_start_with_weights_that_are_not_finite_is_one_line(folder, value, reason):
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.weight"][:] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DivergedError) as error:
        check_causal(load_model(str(folder)), packs=True)
    assert str(error.value).startswith(f"{folder}: {reason}: its training diverged, or")
