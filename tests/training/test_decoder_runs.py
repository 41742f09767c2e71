"""Runs of transformers' decoders: from a recipe to a folder that transformers opens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from assertions import copy_at, run_without_this_package, same_weights
from nanogpt_hf.commands import main
from nanogpt_hf.model.architecture import saved_buffers
from nanogpt_hf.model.build import load_model
from nanogpt_hf.training import start as start_module

pytestmark = pytest.mark.long

DECODERS = ["qwen3", "llama", "nanochat", "olmo2"]

OTHER_PROCESS = """
import json, sys
sys.modules["nanogpt_hf"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
logits = {}
for name, folder in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__module__ == f"transformers.models.{name}.modeling_{name}"
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    with torch.no_grad():
        logits[name] = model(input_ids=torch.arange(16)[None] % 20).logits
save_file(logits, sys.argv[2])
"""


def test_commands_open_a_run_of_a_decoder(start, tmp_path, capsys, text_file):
    extra = {"model__extra": {"tie_word_embeddings": True}, "tracking__layers": True}
    run = str(start(model__architecture="qwen3", model__n_kv_head=1, **extra).path)
    assert main(["sample", run, "--prompt", "The ", "--max-new-tokens", "5"]) == 0
    text = str(text_file)
    assert main(["evaluate", run, "--data", text, "--output", str(tmp_path / "loss.json")]) == 0
    assert json.loads((tmp_path / "loss.json").read_text())["text"]["loss"] < 3.4
    assert main(["export", run, str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert "A Qwen3 with" in (Path(run) / "final" / "README.md").read_text()
    weights = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    masters = load_model(str(tmp_path / "bf16"))
    assert {parameter.dtype for parameter in masters.parameters()} == {torch.float32}
    assert main(["report", run]) == 0
    capsys.readouterr()


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


@pytest.mark.slow
def test_final_folders_open_without_this_package(start, tmp_path):
    folders, expected = {}, {}
    for architecture in DECODERS:
        knobs = {"model__architecture": architecture, "model__n_kv_head": 1}
        folders[architecture] = str(start(architecture, train__max_steps=2, **knobs).final)
        with torch.no_grad():
            expected[architecture] = (
                load_model(folders[architecture]).eval()(torch.arange(16)[None] % 20).logits
            )
    run_without_this_package(
        OTHER_PROCESS, tmp_path, json.dumps(folders), str(tmp_path / "logits.safetensors")
    )
    logits = load_file(tmp_path / "logits.safetensors")
    for architecture in DECODERS:
        assert torch.equal(logits[architecture], expected[architecture])
