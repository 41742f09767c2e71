"""Runs of transformers' decoders: from a recipe to a folder that transformers opens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arguments import argv
from assertions import copy_at, same_weights
from nanogpt_hf.commands import main
from nanogpt_hf.model.architecture import saved_buffers
from nanogpt_hf.model.build import load_model
from nanogpt_hf.training import start as start_module

pytestmark = pytest.mark.long


def test_commands_open_a_run_of_a_decoder(start, tmp_path, text_file):
    extra = {"model__extra": {"tie_word_embeddings": True}, "tracking__layers": True}
    run = str(start(model__architecture="qwen3", model__n_kv_head=1, **extra).path)
    assert main(argv("sample {} --prompt The --max-new-tokens 5", run)) == 0
    loss, bf16 = tmp_path / "loss.json", tmp_path / "bf16"
    assert main(argv("evaluate {} --data {} --output {}", run, text_file, loss)) == 0
    assert json.loads(loss.read_text())["text"]["loss"] < 3.4
    assert main(argv("export {} {} --dtype bf16", run, bf16)) == 0
    config = json.loads((bf16 / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    weights = load_file(bf16 / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in load_model(str(bf16)).parameters()} == {torch.float32}
    assert "A Qwen3 with" in (Path(run) / "final" / "README.md").read_text()
    assert main(["report", run]) == 0


def test_saved_buffers_are_in_checkpoints_and_folders(start, monkeypatch):
    knobs = {"model__architecture": "apertus", "checkpoint__every": 2}  # constants of its MLP
    build = start_module.start_model

    def with_other_constants(*arguments):
        model = build(*arguments)
        for buffer in saved_buffers(model).values():
            buffer.fill_(0.25)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(start_module, "start_model", with_other_constants)
        whole = start("whole", train__max_steps=4, **knobs)
    resumed = copy_at(whole, 2, whole.path.with_name("resumed"))
    start("resumed", resume=True, train__max_steps=4, **knobs)
    for run in (whole, resumed):
        model = AutoModelForCausalLM.from_pretrained(run.final)
        assert {value.item() for value in saved_buffers(model).values()} == {0.25}
    assert same_weights(whole, resumed)
