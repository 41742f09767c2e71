"""Placements of accelerate configs, and refused files."""

from pathlib import Path

import pytest

from nanogpt_hf.errors import UserError
from nanogpt_hf.planning.placement import Placement, read_placement

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
ON_8 = {"processes": 8, "precision": "bf16"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", Placement(per_machine=1, on_cpu=True)),
        ("cpu_ddp", Placement(kind="DDP", processes=2, per_machine=2, on_cpu=True)),
        ("mps", Placement(per_machine=1)),
        ("single_gpu", Placement(per_machine=1, precision="bf16", compiles=True)),
        ("ddp", Placement(kind="DDP", compiles=True, **ON_8)),
        ("multi_node_ddp", Placement(kind="DDP", processes=16, precision="bf16", compiles=True)),
        ("fsdp2", Placement(kind="FSDP2", shards=8, compiles=True, **ON_8)),
        ("fsdp2_checkpointing", Placement(kind="FSDP2", shards=8, checkpointing=True, compiles=True, **ON_8)),
        ("hsdp", Placement(kind="FSDP2", processes=16, shards=8, precision="bf16", compiles=True)),
        ("multi_node_fsdp2", Placement(kind="FSDP2", processes=16, shards=16, precision="bf16", compiles=True)),
        ("tp", Placement(processes=2, tp=2, per_machine=2, precision="bf16")),
        ("tp_fsdp2", Placement(kind="FSDP2", shards=4, tp=2, **ON_8)),
        ("cp_fsdp2", Placement(kind="FSDP2", shards=8, cp=4, **ON_8)),
        ("pp", Placement(processes=2, pp=2, per_machine=2, precision="bf16")),
        ("pp_fsdp2", Placement(kind="FSDP2", processes=4, shards=2, pp=2, per_machine=4, precision="bf16")),
        ("deepspeed_zero2", Placement(kind="ZeRO-2", shards=8, compiles=True, **ON_8)),
        ("deepspeed_zero3", Placement(kind="ZeRO-3", shards=8, **ON_8)),
    ],
)
def test_read_placement_of_shipped_configs(name, expected):
    assert read_placement(str(CONFIGS / f"{name}.yaml")) == expected


def test_every_shipped_config_is_tested():
    cases = next(mark for mark in test_read_placement_of_shipped_configs.pytestmark if mark.name == "parametrize").args[
        1
    ]
    assert {name for name, _ in cases} == {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("fsdp_version: 2", "fsdp_version: 1"), "FSDP 1 is not supported"),
        (("mixed_precision: bf16", "mixed_precision: fp8"), "mixed_precision fp8 is not estimated"),
        (("dp_replicate_size: 2", "dp_replicate_size: 3"), "16 processes are not a multiple of dp_replicate_size 3"),
        (("tp_size: 1", "tp_size: 3"), "16 processes are not a multiple of dp_replicate_size 2, tp_size 3"),
        (("cp_size: 1", "sp_size: 2"), "sp_size 2 is not supported; set cp_size"),
        (("tp_size: 1", "pp_schedule: zero_bubble"), "pp_schedule zero_bubble is not estimated; set 1f1b"),
        (("num_machines", "numb_machines"), "not an accelerate config"),
        (("num_processes: 16", "num_processes: 0"), "num_processes 0, dp_replicate_size 2: must be at least 1"),
        (
            ("dp_replicate_size: 2", "dp_replicate_size: -2"),
            "num_processes 16, dp_replicate_size -2: must be at least 1",
        ),
        (("num_processes: 16", "num_processes: many"), "not an accelerate config"),
        (("num_processes: 16", "num_processes: [1"), "not an accelerate config"),
        (("compute_environment: LOCAL_MACHINE", "compute_environment: MOON"), "not an accelerate config"),
    ],
)
def test_read_placement_refuses_unsupported_settings(tmp_path, edit, complaint):
    text = (CONFIGS / "hsdp.yaml").read_text()
    assert edit[0] in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(*edit))
    with pytest.raises(UserError, match=complaint) as caught:
        read_placement(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_placement_refuses_missing_files_and_recipes(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_placement(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="not an accelerate config"):
        read_placement(str(CONFIGS.parent / "recipes" / "quickstart.yaml"))


def test_placement_as_text():
    hsdp = read_placement(str(CONFIGS / "hsdp.yaml"))
    assert str(hsdp) == "16 processes, FSDP2, 2 copies over 8 processes each, bf16 with float32 weights, on GPUs"
    assert str(Placement(on_cpu=True)) == "1 process, float32, on the CPU"
