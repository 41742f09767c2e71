"""Placements of accelerate configs, and refused files."""

from pathlib import Path

import pytest

from assertions import refusal
from nanogpt_hf.errors import UserError
from nanogpt_hf.planning.placement import Placement, read_placement

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
ON_8 = {"processes": 8, "precision": "bf16"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", Placement(per_machine=1, on_cpu=True)),
        ("cpu_bf16", Placement(per_machine=1, precision="bf16", on_cpu=True)),
        ("cpu_ddp", Placement(kind="DDP", processes=2, per_machine=2, on_cpu=True)),
        ("mps", Placement(per_machine=1)),
        ("single_gpu", Placement(per_machine=1, precision="bf16", compiles=True)),
        ("ddp", Placement(kind="DDP", compiles=True, **ON_8)),
        ("multi_node_ddp", Placement(kind="DDP", processes=16, precision="bf16", compiles=True)),
        ("fsdp2", Placement(kind="FSDP2", shards=8, compiles=True, **ON_8)),
        (
            "fsdp2_checkpointing",
            Placement(kind="FSDP2", shards=8, checkpointing="true", compiles=True, **ON_8),
        ),
        ("hsdp", Placement(kind="FSDP2", processes=16, shards=8, precision="bf16", compiles=True)),
        (
            "multi_node_fsdp2",
            Placement(kind="FSDP2", processes=16, shards=16, precision="bf16", compiles=True),
        ),
        ("tp", Placement(processes=2, tp=2, per_machine=2, precision="bf16")),
        ("tp_fsdp2", Placement(kind="FSDP2", shards=4, tp=2, **ON_8)),
        ("cp_fsdp2", Placement(kind="FSDP2", shards=8, cp=4, **ON_8)),
        ("pp", Placement(processes=2, pp=2, per_machine=2, precision="bf16")),
        (
            "pp_fsdp2",
            Placement(kind="FSDP2", processes=4, shards=2, pp=2, per_machine=4, precision="bf16"),
        ),
        ("pp_tp", Placement(kind="DDP", pp=2, tp=2, **ON_8)),
        ("ep", Placement(kind="DDP", ep=8, **ON_8)),
        (
            "ep_fsdp2",
            Placement(kind="FSDP2", processes=16, shards=16, ep=8, precision="bf16"),
        ),
        ("deepspeed_zero2", Placement(kind="ZeRO-2", shards=8, compiles=True, **ON_8)),
        ("deepspeed_zero3", Placement(kind="ZeRO-3", shards=8, **ON_8)),
    ],
)
def test_read_placement_of_shipped_configs(name, expected):
    assert read_placement(str(CONFIGS / f"{name}.yaml")) == expected


def test_every_shipped_config_is_tested():
    cases = next(
        mark
        for mark in test_read_placement_of_shipped_configs.pytestmark
        if mark.name == "parametrize"
    ).args[1]
    assert {name for name, _ in cases} == {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("fsdp_version: 2", "fsdp_version: 1"), "FSDP 1"),
        (("mixed_precision: bf16", "mixed_precision: fp8"), "mixed_precision fp8"),
        (("dp_replicate_size: 2", "dp_replicate_size: 3"), "dp_replicate_size 3"),
        (("tp_size: 1", "tp_size: 3"), "dp_replicate_size 2, tp_size 3"),
        (("cp_size: 1", "sp_size: 2"), "sp_size 2"),
        (("tp_size: 1", "pp_schedule: zero_bubble"), "pp_schedule zero_bubble"),
        (("num_machines", "numb_machines"), ""),
        (("num_processes: 16", "num_processes: 0"), "num_processes 0"),
        (("dp_replicate_size: 2", "dp_replicate_size: -2"), "dp_replicate_size -2"),
        (("num_processes: 16", "num_processes: many"), ""),
        (("num_processes: 16", "num_processes: [1"), ""),
        (("compute_environment: LOCAL_MACHINE", "compute_environment: MOON"), ""),
    ],
)
def test_read_placement_refuses_unsupported_settings(tmp_path, edit, complaint):
    text = (CONFIGS / "hsdp.yaml").read_text()
    assert edit[0] in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(*edit))
    message = refusal(read_placement, str(path), error=UserError)
    assert str(path) in message
    assert complaint in message


def test_read_placement_refuses_missing_files_and_recipes(tmp_path):
    for path in (tmp_path / "none.yaml", CONFIGS.parent / "recipes" / "quickstart.yaml"):
        assert str(path) in refusal(read_placement, str(path), error=UserError)


def test_placement_as_text():
    hsdp = read_placement(str(CONFIGS / "hsdp.yaml"))
    assert str(hsdp) == (
        "16 processes, FSDP2, 2 copies over 8 processes each, bf16 with float32 weights, on GPUs"
    )
    assert str(Placement(on_cpu=True)) == "1 process, float32, on the CPU"
