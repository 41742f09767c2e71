"""Runs of transformers' decoders: from a recipe to a folder that transformers opens."""

import json
from pathlib import Path

import pytest
import torch
from decoder_types import tiny_section
from tables import KINDS
from transformers import AutoModelForCausalLM

from arguments import argv
from assertions import copy_at, same_weights
from nanogpt_hf.commands import main
from nanogpt_hf.model.architecture import saved_buffers
from nanogpt_hf.model.load import load_model
from nanogpt_hf.training import build as build_module

pytestmark = pytest.mark.long


def test_commands_open_a_run_of_a_decoder(start, tmp_path, text_file):
    extra = {"model__extra": {"tie_word_embeddings": True}, "tracking__layers": True}
    run = str(start(model__architecture="qwen3", model__n_kv_head=1, **extra).path)
    assert main(argv("sample {} --prompt The --max-new-tokens 5", run)) == 0
    loss = tmp_path / "loss.json"
    assert main(argv("evaluate {} --data {} --output {}", run, text_file, loss)) == 0
    assert json.loads(loss.read_text())["text"]["loss"] < 3.4
    assert main(argv("export {} {}", run, tmp_path / "out")) == 0
    opened_by_transformers(tmp_path / "out")
    assert main(["report", run]) == 0


def test_saved_buffers_are_in_checkpoints_and_folders(start, monkeypatch):
    knobs = {"model__architecture": "apertus", "checkpoint__every": 2}  # constants of its MLP
    build = build_module.start_model

    def with_other_constants(*arguments):
        model = build(*arguments)
        for buffer in saved_buffers(model).values():
            buffer.fill_(0.25)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "start_model", with_other_constants)
        whole = start("whole", train__max_steps=4, **knobs)
    resumed = copy_at(whole, 2, whole.path.with_name("resumed"))
    start("resumed", resume=True, train__max_steps=4, **knobs)
    for run in (whole, resumed):
        model = AutoModelForCausalLM.from_pretrained(run.final)
        assert {value.item() for value in saved_buffers(model).values()} == {0.25}
    assert same_weights(whole, resumed)


def opened_by_transformers(folder: Path) -> torch.nn.Module:
    """The model in a folder, whose logits are those of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    assert type(model).__module__.startswith("transformers.")
    ours = load_model(str(folder)).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", KINDS)
def test_blocks_of_several_kinds(architecture, start, tmp_path, text_file):
    knobs = {f"model__{name}": value for name, value in vars(tiny_section(architecture)).items()}
    if architecture == "gemma4_text":  # more than the characters of the text
        knobs["model__extra"] |= {"vocab_size_per_layer_input": 64}
    knobs |= {"train__max_steps": 4, "checkpoint__every": 2, "eval__every": 4}
    knobs |= {"eval__samples": ["A cat "], "eval__sample_tokens": 6}
    whole = start("whole", **knobs)
    resumed = copy_at(whole, 2, tmp_path / "resumed")
    start("resumed", resume=True, **knobs)
    assert same_weights(whole, resumed)
    base = dict(opened_by_transformers(whole.final).named_parameters())
    command = "finetune --from {} --data {} --data.dir {} --run-dir {} --train.max_steps 2 "
    command += "--train.tokens_per_step 64 --train.micro_batch_size 2 --data.block_size 16 "
    command += "--optim.learning_rate 0.01 --optim.warmup_steps 0 --eval.tokens 64 {}"
    for name, options in (
        ("frozen", "--freeze-layers 1"),
        ("adapted", "--lora 2 --lora.merge true"),
    ):
        words = command.format(whole.final, text_file, tmp_path / "tuned", tmp_path / name, options)
        assert main(words.split()) == 0
        tuned = dict(opened_by_transformers(tmp_path / name / "final").named_parameters())
        assert tuned.keys() == base.keys()
        changed = [name for name in base if not torch.equal(base[name], tuned[name])]
        assert changed
        if name == "frozen":
            assert not any(".0." in name for name in changed)
