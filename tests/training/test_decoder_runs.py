"""Runs of transformers' decoders: from a recipe to a folder that transformers opens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from assertions import run_without_this_package
from nanogpt_hf.commands import main
from nanogpt_hf.model.build import load_model

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


@pytest.mark.long
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


@pytest.mark.slow
@pytest.mark.long
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
