"""Configs that no model works with: refused before a model of them is built."""

import json
import math
from dataclasses import replace

import pytest
import torch
from decoder_types import VOCAB, tiny, tiny_section
from safetensors.torch import save_file
from transformers import Qwen3Model
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nanogpt_hf.errors import UserError
from nanogpt_hf.model import trial_step
from nanogpt_hf.model.architecture import architecture_of_type, count_parameters
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.head_gpt import CACHE
from nanogpt_hf.model.load import load_base_config, load_model

FIELDS = {
    "dropout 2": ("llama", {"attention_dropout": 2.0}, "attention_dropout 2.0"),
    "dropout 1": ("llama", {"attention_dropout": 1}, "attention_dropout 1"),
    "dropout -1": ("llama", {"attention_dropout": -1.0}, "attention_dropout -1.0"),
    "dropout nan": ("llama", {"attention_dropout": math.nan}, "nan is not finite"),
    "eps inf": ("llama", {"rms_norm_eps": math.inf}, "inf is not finite"),
    "window 0": ("gemma3_text", {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    "window -3": ("gemma3_text", {"sliding_window": -3}, "sliding_window"),
    "window of all layers": ("mistral", {"sliding_window": 0}, "sliding_window"),
    "local window": ("gpt_neo", {"window_size": 0}, "window_size must be at least 1, got 0"),
    "no expert chosen": ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
    "negative choice": ("qwen3_moe", {"num_experts_per_tok": -1}, "num_experts_per_tok"),
    "no experts": ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "num_experts 0"),
    "no routed experts": ("deepseek_v3", {"n_routed_experts": 0}, "0"),
    "negative width": ("llama", {"head_dim": -2}, "head_dim must not be negative, got -2"),
    "no heads": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
    "no width": ("llama", {"intermediate_size": 0}, "intermediate_size"),
    "no width of a head": ("qwen3", {"head_dim": 0}, "0.0"),
    "no state": ("mamba2", {"state_size": 0}, "mamba2"),
    "gpt2": ("gpt2", {"dropout": 2.0}, "dropout 2.0"),
    "gpt2 nan": ("gpt2", {"layer_norm_epsilon": math.nan}, "nan is not finite"),
}


def write_model(folder, name, fields):
    tiny(name).config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    save_file({"x": torch.zeros(10_000)}, folder / "model.safetensors")


@pytest.mark.parametrize("case", FIELDS)
def test_folder_with_such_a_field_is_refused_by_all_who_read_it(tmp_path, case):
    name, fields, reason = FIELDS[case]
    write_model(tmp_path, name, fields)
    for read in (load_base_config, load_model):
        with pytest.raises(UserError, match="cannot be loaded as a language model") as raised:
            read(str(tmp_path), None)
        assert reason in str(raised.value) or (read is load_model and "keys" in str(raised.value))
        assert len(str(raised.value).splitlines()) == 1


def test_model_that_cannot_generate_is_refused_before_a_run(monkeypatch):
    forward = Qwen3Model.forward

    def fails_with_a_cache(self, *arguments, **options):
        if options.get(CACHE) is not None:
            raise RuntimeError("no window")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Qwen3Model, "forward", fails_with_a_cache)
    with pytest.raises(UserError, match=r"cannot take a step, or generate, with .*: no window"):
        build_config(replace(tiny_section("qwen3"), n_embd=24), VOCAB)


def count_blocks(monkeypatch, architecture):
    """Lists of the numbers of blocks that take a step, and of the models that are built."""
    stepped = []
    built = []
    step = trial_step.output_shapes
    build = architecture.model_class.__init__

    def noted_step(model):
        stepped.append(len(architecture.blocks(model)))
        return step(model)

    def noted_build(self, *arguments, **options):
        built.append(self)
        build(self, *arguments, **options)

    monkeypatch.setattr(trial_step, "output_shapes", noted_step)
    monkeypatch.setattr(architecture.model_class, "__init__", noted_build)
    return stepped, built


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_few_blocks_of_a_deep_model_take_the_step(monkeypatch, name):
    """Such a model is built once without and once with a gate, and not again to count it."""
    architecture = architecture_of_type(name)
    stepped, built = count_blocks(monkeypatch, architecture)
    config = build_config(replace(tiny_section(name), n_layer=104, n_inner=None, extra={}), VOCAB)
    parameters = architecture.count_parameters(config)
    architecture.flops_per_token(config, 8)
    assert (stepped, len(built)) == ([2], 2)
    assert len(architecture.blocks(built[-1])) == 104
    assert parameters == built[-1].num_parameters()


def test_deep_model_with_another_top_block_takes_the_whole_step(monkeypatch):
    initialize = LlamaDecoderLayer.__init__

    def with_another_top(self, config, layer_idx):
        initialize(self, config, layer_idx)
        self.mlp.is_top = layer_idx == 104

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", with_another_top)
    stepped, _ = count_blocks(monkeypatch, architecture_of_type("llama"))
    build_config(replace(tiny_section("llama"), n_layer=105), VOCAB)
    assert stepped == [105]


def test_deep_model_that_fails_is_refused_as_a_shallow_one(monkeypatch):
    def fails(self, *arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(LlamaDecoderLayer, "forward", fails)
    for layers in (2, 106):
        with pytest.raises(UserError, match=r"cannot take a step, .* kernel"):
            build_config(replace(tiny_section("llama"), n_layer=layers, n_embd=24), VOCAB)


@pytest.mark.parametrize(("numbers", "is_refused"), [(2, False), (2.01, True)])
def test_config_of_a_far_larger_model_than_its_weights(tmp_path, numbers, is_refused):
    """Weights of four bits have half a byte per parameter; fewer bytes cannot hold the model."""
    tiny("llama").config.save_pretrained(tmp_path)
    parameters = count_parameters(load_base_config(str(tmp_path), None)[0])
    (tmp_path / "model.safetensors").write_bytes(bytes(math.ceil(parameters / numbers)))
    larger = f"its config.json describes {parameters:,} parameters, its weights have "
    with pytest.raises(UserError) as raised:
        load_model(str(tmp_path))
    assert (larger in str(raised.value)) == is_refused
