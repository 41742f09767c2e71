"""Runs of transformers' decoders: from a recipe to a folder that transformers opens; on two processes."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import state
from accelerate.utils import DistributedType
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file, save_file

from assertions import run_without_this_package
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.synthetic import synthetic_data
from nanogpt_hf.distributed.accelerator import build_accelerator
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.build import load_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.setup import build_run
from nanogpt_hf.training.step import train_step

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


@pytest.fixture
def train(write_recipe, tmp_path, forget_accelerate):
    """Train a tiny decoder on the tiny text into a run folder."""

    def train(architecture: str, name: str, resume: bool = False, **overrides) -> RunFolder:
        sizes = {"model__architecture": architecture, "model__n_kv_head": 1, "optim__schedule": "constant"}
        config = load_config(write_recipe(**sizes | overrides))
        prepare(config)
        forget_accelerate()
        loop.train(config, RunFolder(tmp_path / name), load_prepared(config), resume=resume)
        return RunFolder(tmp_path / name)

    return train


def test_commands_open_a_run_of_a_decoder(train, tmp_path, capsys, text_file):
    run = str(train("qwen3", "run", model__extra={"tie_word_embeddings": True}, tracking__layers=True).path)
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


@pytest.mark.long
def test_final_folders_open_without_this_package(train, tmp_path):
    folders, expected = {}, {}
    for architecture in DECODERS:
        folders[architecture] = str(train(architecture, architecture, train__max_steps=2).final)
        with torch.no_grad():
            expected[architecture] = load_model(folders[architecture]).eval()(torch.arange(16)[None] % 20).logits
    run_without_this_package(OTHER_PROCESS, tmp_path, json.dumps(folders), str(tmp_path / "logits.safetensors"))
    logits = load_file(tmp_path / "logits.safetensors")
    for architecture in DECODERS:
        assert torch.equal(logits[architecture], expected[architecture])


def few_steps(architecture: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a tiny decoder after a few steps, on the main process; the loss and norm of each step."""
    tied = architecture == "qwen3"
    values = {"model.architecture": architecture, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 16}
    values |= {"model.n_kv_head": 1, "model.n_positions": 16, "model.extra": {"tie_word_embeddings": tied}}
    values |= {"data.source": "python-docs", "data.block_size": 16, "train.tokens_per_step": 128}
    values |= {"train.micro_batch_size": 4, "optim.warmup_steps": 0, "train.max_steps": 10}
    config: Config = load_config(None, values, name="tiny")
    accelerator = build_accelerator(config, RunFolder(folder))
    run = build_run(config, accelerator, synthetic_data(config, 61))
    results = {}
    for step in range(4):
        loss, norm, _ = train_step(run, step, 1e-3)
        results[f"step {step}"] = torch.stack([accelerator.reduce(loss, "sum"), norm])
    weights = full_weights(accelerator, run.model)
    accelerator.free_memory()
    return results | weights


def on_ranks(rank: int, port: int, folder: Path) -> None:
    """A process of two: every architecture under DDP, then under FSDP2 with gloo in place of an accelerator."""
    torch.set_num_threads(1)
    loss_gpt.LOGITS_PER_CHUNK = 61 * 10
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    for kind in ("ddp", "fsdp2"):
        if kind == "ddp":
            os.environ["ACCELERATE_USE_CPU"] = "true"
        else:
            del os.environ["ACCELERATE_USE_CPU"]
            os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
            os.environ.update(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_RESHARD_AFTER_FORWARD="true")
            os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
            state.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)
        for architecture in DECODERS:
            for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
                kept._reset_state()
            values = few_steps(architecture, folder)
            if rank == 0:
                save_file(values, folder / f"{kind}-{architecture}.safetensors")
    os._exit(0)  # gloo processes sometimes abort during teardown


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch is imported, which is safe on Linux only")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_decoders_on_one_process_equal_ddp_and_fsdp2(tmp_path, monkeypatch, forget_accelerate):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 61 * 10)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    fork = multiprocessing.get_context("fork")
    port = get_free_port()
    ranks = [fork.Process(target=on_ranks, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    alone = {}
    for architecture in DECODERS:
        forget_accelerate()
        alone[architecture] = few_steps(architecture, tmp_path)
    for process in ranks:
        process.join(timeout=200)
        process.kill()
        assert process.exitcode == 0
    for architecture, expected in alone.items():
        for kind in ("ddp", "fsdp2"):
            values = load_file(tmp_path / f"{kind}-{architecture}.safetensors")
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    values[name], value, atol=1e-5, rtol=1e-5, msg=f"{kind} {architecture} {name}"
                )
