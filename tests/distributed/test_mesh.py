"""Mesh: sizes and ranks of every process of a layout."""

import math

import pytest

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh

SIZES = [(1, 1, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1), (2, 2, 1, 1), (2, 3, 2, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_of_a_layout_are_numbered_in_the_order_pp_dp_cp_tp(sizes):
    pp, dp, cp, tp = sizes
    meshes = [
        Mesh.of(Launch(math.prod(sizes), pp_size=pp, cp_size=cp, tp_size=tp), rank)
        for rank in range(math.prod(sizes))
    ]
    ranks = [(mesh.pp_rank, mesh.dp_rank, mesh.cp_rank, mesh.tp_rank) for mesh in meshes]
    assert ranks == [
        (p, d, c, t) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)
    ]
    assert {mesh.dp_size for mesh in meshes} == {dp}


def test_from_environment_reads_the_launchers_variables(monkeypatch):
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_CP_SIZE": "1",
        "PARALLELISM_CONFIG_PP_SIZE": "2",
        "PARALLELISM_CONFIG_EP_SIZE": "2",
        "PARALLELISM_CONFIG_PP_SCHEDULE": "zero_bubble",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
    }.items():
        monkeypatch.setenv(name, value)
    assert Mesh.from_environment() == Mesh(
        world_size=8,
        local_world_size=4,
        tp_size=2,
        pp_size=2,
        ep_size=2,
        pp_schedule="zero_bubble",
        cp_rotation="alltoall",
        rank=5,
        local_rank=1,
    )


@pytest.mark.parametrize(
    "launch",
    [
        Launch(),
        Launch(device="cpu", precision="bf16", compiler="eager", checkpointing="selective"),
        Launch(compiler="inductor, max-autotune-no-cudagraphs, regional"),
        Launch(8, 8, compiler="no"),
        Launch(8, 4, tp_size=2, precision="bf16"),
        Launch(8, 8, compression="fp16", device="cpu"),
        Launch(16, 8, sharding="fsdp", dp_replicate_size=2, reshards=True, checkpointing="2"),
        Launch(8, 8, cp_size=4, sharding="fsdp", sends_weights=True, cp_rotation="alltoall"),
        Launch(8, 8, pp_size=4, sharding="fsdp", pp_schedule="zero_bubble"),
        Launch(8, 8, sharding="zero", zero_stage=3, precision="bf16"),
    ],
)
def test_a_launch_is_read_from_the_variables_that_it_states(launch):
    for rank in {0, launch.world_size - 1}:
        mesh = Mesh.of(launch, rank)
        assert mesh.local_rank == rank % launch.local_world_size
        assert Mesh.from_environment(mesh.environment()) == mesh


@pytest.mark.parametrize(
    ("schedule", "counts"), [("1f1b", [4, 5, 6, 7, 8, 9, 10]), ("zero_bubble", [4, 5, 6, 7, 8, 10])]
)
def test_micro_batches_that_fill_four_stages(schedule, counts):
    launch = Launch(4, pp_size=4, pp_schedule=schedule)
    assert [count for count in range(1, 11) if launch.fills_pipeline(count)] == counts
