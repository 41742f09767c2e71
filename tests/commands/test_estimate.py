"""The `estimate` command: memory, time and disk of a recipe, and mistakes in one line."""

import json
import re
from pathlib import Path

import pytest
import torch

from arguments import argv
from forked import Forked
from nanogpt_hf.bench.rehearsal import rehearse
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.config.stages import largest_stage
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTForCausalLM
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.planning.estimate import estimate, planned_model, run_bytes
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import micro_batch, step

ROOT = Path(__file__).parents[2]


def test_estimate_of_gpt2_on_8_gpus(capsys, tmp_path):
    file = tmp_path / "figures.json"
    recipe = ROOT / "recipes" / "gpt2_124m.yaml"
    machine = ROOT / "accelerate_configs" / "ddp.yaml"
    options = argv("--data.dir {} --config_file {} --memory 16GiB", tmp_path / "none", machine)
    assert main(["estimate", str(recipe), *options, "--mfu", "0.5", "--json", str(file)]) == 0
    captured = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert (
        "DDP 8, bf16 with float32 weights, on GPUs; micro-batches of 12 × 1,024 tokens, 5 per step"
    ) in captured
    assert "vocabulary 50,257, GPT-2's" in captured
    assert "time at 0.5 of the peak" in captured
    # as for train/mfu of metrics.jsonl: 6 · (N - positions) + 12 · layers · width · tokens
    per_token = 6 * (figures["parameters"] - 1024 * 768) + 12 * 12 * 768 * 1024
    assert figures["flops_per_token"] == per_token
    h100 = next(device for device in figures["devices"] if device["name"] == "H100")
    assert h100["seconds"] == pytest.approx(600_000 * 491_520 * per_token / (8 * 0.5 * 989e12))
    assert figures["chinchilla_tokens"] == 20 * figures["parameters"]
    assert sum(figures["by_part"].values()) == figures["parameters"]
    device = figures["devices"][0]
    assert (device["memory"], device["seconds"]) == (16 * 2**30, None)
    assert 60 % device["micro_batch_size"] == 0  # 480 sequences over 8 processes
    assert figures["data_bytes"] is None
    assert "these are estimates" in captured
    assert list(tmp_path.iterdir()) == [file]


def test_tokens_are_counted_per_active_parameter(capsys, tmp_path):
    file = tmp_path / "figures.json"
    recipe = ROOT / "recipes" / "experts_char_cpu.yaml"
    assert main(argv("estimate {} --data.dir {} --json {}", recipe, tmp_path / "none", file)) == 0
    figures = json.loads(file.read_text())
    assert figures["active"] < figures["parameters"] / 2
    assert figures["chinchilla_tokens"] == 20 * figures["active"]
    assert "per active parameter" in capsys.readouterr().out


@pytest.mark.long
def test_estimate_proposes_a_layout_and_writes_its_config(capsys, tmp_path):
    written = tmp_path / "machine.yaml"
    file = tmp_path / "figures.json"
    recipe = argv(
        "estimate {} --data.dir {}", ROOT / "recipes" / "gpt2_1558m.yaml", tmp_path / "none"
    )
    options = argv("--gpus 8 --memory 24GB --write-config {} --json {}", written, file)
    assert main([*recipe, *options]) == 0
    captured = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert "layout over 8 × RTX 4090: 24.0 GB, 165 TFLOP/s, 32 GB/s to the others" in captured
    size = figures["micro_batch_size"]
    assert f"  FSDP2 8; micro-batches of {size} × 1,024 tokens, {60 // size} per step" in captured
    assert re.search("DDP 8.*does not fit", captured)
    layout = figures["layout"]
    assert (layout["name"], layout["micro_batch_size"]) == ("FSDP2 8", size)
    assert layout["step_seconds"] == pytest.approx(
        491_520 * figures["flops_per_token"] / (8 * 0.4 * 165e12)
    )
    # the same as for the config that it wrote
    same = argv("--train.micro_batch_size {} --config_file {} --json {}", size, written, file)
    assert main([*recipe, *same]) == 0
    assert json.loads(file.read_text())["memory"] == figures["memory"]


@pytest.mark.long
def test_estimate_rehearses_a_step(tmp_path, write_recipe):
    file = tmp_path / "figures.json"
    words = argv("estimate {} --rehearse --json {}", write_recipe(), file)
    assert Forked(words, folder=tmp_path).wait(120) == 0
    figures = json.loads(file.read_text())
    memory = figures["memory"]
    rehearsal = figures["rehearsal"]
    copied = memory["phases"][memory["peak_phase"]]["checkpoint"]
    assert rehearsal["peak"] == pytest.approx(memory["peak"] - copied, rel=0.1)
    assert (rehearsal["sent"], rehearsal["waits"]) == ({}, {})


def test_the_largest_stage_is_rehearsed_as_a_recipe_of_its_own(write_recipe):
    knobs = {"train.micro_batch_size": 8}
    staged = replace_knobs(load_config(write_recipe()), {"train.stages": [{"at": 3, **knobs}]})
    alone = replace_knobs(staged, {"train.stages": None, **knobs})
    found = rehearse(largest_stage(staged), Launch())
    assert found == rehearse(alone, Launch())
    assert found.peak > rehearse(replace_knobs(staged, {"train.stages": None}), Launch()).peak


def test_a_rehearsal_takes_two_steps(write_recipe, monkeypatch):
    """The first makes the optimizer state, as the dry-run step of a build does elsewhere."""
    calls = []
    take = step.train_step

    def counting(*arguments, **options):
        calls.append(arguments)
        return take(*arguments, **options)

    for module in (step, micro_batch):
        monkeypatch.setattr(module, "train_step", counting)
    config = load_config(write_recipe())
    found = rehearse(config, Launch())
    assert len(calls) == 2
    # The weights, and AdamW's two averages of each.
    weights = 4 * count_parameters(planned_model(config).config)
    assert found.state == pytest.approx(3 * weights, rel=0.05)


def test_a_rehearsal_has_the_precision_of_its_launch_on_any_machine(write_recipe, monkeypatch):
    config = load_config(write_recipe())
    launch = Launch(precision="bf16")
    found = rehearse(config, launch)
    monkeypatch.setattr("nanogpt_hf.cpu.multiplies_bfloat16", lambda: False)
    assert rehearse(config, launch) == found


def test_a_rehearsal_finds_a_tensor_on_the_wrong_device(tmp_path, write_recipe, monkeypatch):
    forward = GPTForCausalLM.forward

    def planted(model, input_ids, **options):
        on_cpu = torch.zeros(input_ids.shape, dtype=torch.long)  # without device=
        return forward(model, input_ids, **options | {"position_ids": on_cpu})

    config = load_config(write_recipe())
    assert rehearse(config, Launch()).waits == {}
    monkeypatch.setattr(GPTForCausalLM, "forward", planted)
    with pytest.raises(UserError, match=r"^--rehearse: .* meet: model/modeling_gpt\.py:\d+ .*wpe"):
        rehearse(config, Launch())


ON_GPUS = {
    "shakespeare_char": "single_gpu",
    "gpt2_124m": "ddp",
    "gpt2_124m_muon": "ddp",
    "gpt2_350m": "ddp",
    "gpt2_774m": "fsdp2",
    "gpt2_1558m": "hsdp",
    "fineweb_124m": "ddp",
    "modern_124m": "fsdp2",
    "nanochat_d12": "ddp",
    "experts_124m": "fsdp2",
}


# The largest of a kind differ from the others in their number of layers only.
LARGEST = ("gpt2_774m", "gpt2_1558m")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LARGEST)) for name in ON_GPUS],
)
def test_recipes_for_gpus_are_rehearsed(name, tmp_path):
    file = tmp_path / "figures.json"
    # A rehearsal is not compiled, and a compiled loss holds fewer tensors.
    machine = tmp_path / "machine.yaml"
    settings = (ROOT / "accelerate_configs" / f"{ON_GPUS[name]}.yaml").read_text()
    machine.write_text(settings.replace("dynamo_backend: INDUCTOR", "dynamo_backend: 'NO'"))
    recipe = ROOT / "recipes" / f"{name}.yaml"
    words = argv("estimate {} --rehearse --config_file {} --json {}", recipe, machine, file)
    words += ["--data.dir", "none"]
    if name == "shakespeare_char":  # its characters are not known before `prepare`
        words += ["--data.tokenizer", "gpt2"]
    assert Forked(words, folder=tmp_path).wait(400) == 0
    figures = json.loads(file.read_text())
    assert figures["rehearsal"]["waits"] == {}
    assert figures["rehearsal"]["peak"] == pytest.approx(figures["memory"]["peak"], rel=0.05)


def test_a_dry_run_refuses_data_of_another_recipe_and_an_estimate_leaves_it_out(
    write_recipe, capsys
):
    recipe = write_recipe()
    prepare(load_config(recipe))
    words = argv("{} --data.tokenizer bpe --data.vocab_size 300", recipe)
    assert main(["pretrain", *words, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "prepared with data.tokenizer 'char', the recipe says 'bpe'" in captured.err
    assert main(["estimate", *words]) == 0
    output = capsys.readouterr().out
    assert "vocabulary 300, of data.vocab_size" in output
    assert "\ntokens: 768, " in output
    assert "data: not prepared yet with these knobs" in output


def test_estimate_finds_largest_micro_batch_that_fits(tmp_path, write_recipe):
    config = load_config(write_recipe(train__tokens_per_step=12 * 16))
    peak = {}
    for size in (1, 2, 3, 4, 6, 12):
        config = replace_knobs(config, {"train.micro_batch_size": size})
        peak[size] = estimate(config, Launch()).memory.peak
    config = replace_knobs(config, {"train.micro_batch_size": "auto"})

    def largest(memory):
        return estimate(config, Launch(), memory=memory).devices[0].micro_batch_size

    assert [largest(peak[size] / 0.9 * 1.0001) for size in peak] == list(peak)
    assert largest(peak[12] / 0.9 * 0.9999) == 6
    assert largest(peak[1] / 0.9 * 0.9999) is None


@pytest.mark.long
def test_estimated_run_folder_size_is_right(tmp_path, write_recipe):
    recipe = write_recipe(checkpoint__keep=1, model__n_embd=128, train__max_steps=2, eval__every=2)
    run = RunFolder(tmp_path / "run")
    config = load_config(recipe)
    before = estimate(config, Launch())
    assert before.vocabulary.startswith("128, assumed")
    assert before.data_bytes is None
    assert main(argv("pretrain {} --run-dir {}", recipe, run.path)) == 0
    figures = estimate(config, Launch())
    weights = run_bytes(figures.parameters, 8 * figures.trainable, keep=1)
    on_disk = sum(path.stat().st_size for path in run.path.rglob("*.safetensors"))
    # one of three checkpoints, best/ and final/: 12 + 4 + 4 of 48 bytes per parameter
    assert on_disk == pytest.approx(weights * 20 / 48, rel=0.05)
    prepared = sum(
        path.stat().st_size for path in Path(config.data.dir).rglob("*") if path.is_file()
    )
    assert figures.data_bytes == prepared
    assert figures.epochs["the prepared data"] == pytest.approx(
        2 * 128 / 0.9 / Path(config.data.source).stat().st_size, rel=0.01
    )
    assert "of the prepared data" in figures.vocabulary


def test_estimate_of_lora_counts_only_adapters_as_trainable(capsys, tiny_base, text_file, tmp_path):
    recipe = tmp_path / "lora.yaml"
    file = tmp_path / "figures.json"
    recipe.write_text(
        f"finetune: {{model: {tiny_base}}}\ndata: {{source: {text_file}}}\nlora: {{rank: 2}}\n"
    )
    assert main(argv("estimate {} --json {}", recipe, file)) == 0
    figures = json.loads(file.read_text())
    adapters = 4 * 2 * (4 * (16 + 16) + 2 * (16 + 64))  # blocks, rank, (in + out) of each target
    assert figures["trainable"] == figures["by_part"]["adapters"] == adapters
    phases = figures["memory"]["phases"].values()
    assert {parts["optimizer"] for parts in phases} == {8 * adapters}
    assert {parts["weights"] for parts in phases} == {4 * figures["parameters"]}
    assert f"{adapters:,} trainable" in capsys.readouterr().out
