"""Launches of accelerate configs, and refused files."""

from pathlib import Path

import pytest

from assertions import refusal
from nanogpt_hf.errors import UserError
from nanogpt_hf.planning.config_files import read_launch

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
BF16 = "bf16 with float32 weights"
SHIPPED = {
    "cpu": "one process, float32, on the CPU",
    "cpu_bf16": f"one process, {BF16}, on the CPU",
    "cpu_ddp": "DDP 2, float32, on the CPU",
    "mps": "one process, float32, on GPUs",
    "single_gpu": f"one process, {BF16}, on GPUs",
    "ddp": f"DDP 8, {BF16}, on GPUs",
    "multi_node_ddp": f"DDP 16, {BF16}, on GPUs",
    "fsdp2": f"FSDP2 8, {BF16}, on GPUs",
    "fsdp2_checkpointing": f"FSDP2 8, {BF16}, activation checkpointing, on GPUs",
    "hsdp": f"HSDP 2×8, {BF16}, on GPUs",
    "multi_node_fsdp2": f"FSDP2 16, {BF16}, on GPUs",
    "tp": f"TP 2, {BF16}, on GPUs",
    "tp_fsdp2": f"TP 2 × FSDP2 4, {BF16}, on GPUs",
    "cp_fsdp2": f"CP 4 × FSDP2 2, {BF16}, on GPUs",
    "pp": f"PP 2, {BF16}, on GPUs",
    "pp_fsdp2": f"PP 2 × FSDP2 2, {BF16}, on GPUs",
    "pp_tp": f"PP 2 × TP 2 × DDP 2, {BF16}, on GPUs",
    "ep": f"EP 8 × DDP 8, {BF16}, on GPUs",
    "ep_fsdp2": f"EP 8 × FSDP2 16, {BF16}, on GPUs",
    "deepspeed_zero2": f"ZeRO-2 8, {BF16}, on GPUs",
    "deepspeed_zero3": f"ZeRO-3 8, {BF16}, on GPUs",
}


def test_read_launch_of_shipped_configs():
    launches = {path.stem: read_launch(str(path)) for path in CONFIGS.glob("*.yaml")}
    assert {name: str(launch) for name, launch in launches.items()} == SHIPPED
    assert launches["ep"].ep_size == 8
    assert launches["deepspeed_zero3"].shards == 8
    assert launches["hsdp"].local_world_size == 8
    assert launches["fsdp2"].compiles
    assert not launches["tp"].compiles


def test_read_launch_knows_what_decides_the_kernels(tmp_path):
    path = tmp_path / "config.yaml"
    text = (CONFIGS / "single_gpu.yaml").read_text()
    more = "  dynamo_mode: max-autotune-no-cudagraphs\n  dynamo_use_regional_compilation: true\n"
    path.write_text(text.replace("dynamo_config:\n", f"dynamo_config:\n{more}"))
    compiler = "inductor, max-autotune-no-cudagraphs, regional"
    assert read_launch(str(path)).compiler == compiler


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("fsdp_version: 2", "fsdp_version: 1"), "fsdp_version 1"),
        (("mixed_precision: bf16", "mixed_precision: fp8"), "mixed_precision fp8"),
        (("tp_size: 1", "pp_schedule: zero_bubble"), "pp_schedule zero_bubble"),
        (("num_machines", "numb_machines"), ""),
        (("num_processes: 16", "num_processes: many"), "num_processes"),
        (("num_processes: 16", "num_processes: [1"), ""),
    ],
)
def test_read_launch_refuses_unsupported_settings(tmp_path, edit, complaint):
    text = (CONFIGS / "hsdp.yaml").read_text()
    assert edit[0] in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(*edit))
    message = refusal(read_launch, str(path), error=UserError)
    assert str(path) in message
    assert complaint in message


def test_read_launch_refuses_missing_files_and_recipes(tmp_path):
    for path in (tmp_path / "none.yaml", CONFIGS.parent / "recipes" / "quickstart.yaml"):
        assert str(path) in refusal(read_launch, str(path), error=UserError)


@pytest.mark.parametrize("size", [3, 4, 99])
@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "DEEPSPEED"])
@pytest.mark.parametrize("name", ["tp", "cp", "pp", "ep", "dp_shard", "dp_replicate"])
def test_size_that_the_processes_do_not_give_is_refused(
    refused, write_recipe, tmp_path, name, kind, size
):
    (tmp_path / "m.yaml").write_text(
        f"distributed_type: {kind}\nnum_processes: 2\nfsdp_config: {{fsdp_version: 2}}\n"
        f"parallelism_config: {{parallelism_config_{name}_size: {size}}}\n"
    )
    line = refused("estimate", write_recipe(), "--config_file", "m.yaml")
    assert f"{name}_size {size}" in line or f"{name}_size is {size}" in line
    if name != "ep":
        assert line.startswith("--config_file m.yaml: ")
        assert "does not give 2 processes" in line


@pytest.mark.parametrize("machines", [2, 4])
def test_processes_that_machines_do_not_divide_are_refused(tmp_path, machines):
    (tmp_path / "m.yaml").write_text(
        f"distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: {machines}\n"
    )
    with pytest.raises(UserError, match=f"num_processes 3 .* num_machines {machines}; set a mult"):
        read_launch(str(tmp_path / "m.yaml"))
