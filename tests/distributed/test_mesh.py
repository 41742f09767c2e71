"""Mesh: sizes and ranks of every process of a layout."""

import math

import pytest

from nanogpt_hf.distributed.mesh import Mesh

SIZES = [(1, 1, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1), (2, 2, 1, 1), (2, 3, 2, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_of_a_layout_are_numbered_in_the_order_pp_dp_cp_tp(sizes):
    pp, dp, cp, tp = sizes
    meshes = [
        Mesh(rank, math.prod(sizes), pp_size=pp, cp_size=cp, tp_size=tp)
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
    sizes = {"tp_size": 2, "cp_size": 1, "pp_size": 2, "ep_size": 2}
    mesh = Mesh.from_environment()
    assert mesh == Mesh(
        5, 8, 1, 4, **sizes, pp_schedule="zero_bubble", cp_rotation="alltoall", stated_sizes=sizes
    )


@pytest.mark.parametrize(
    ("schedule", "counts"), [("1f1b", [4, 5, 6, 7, 8, 9, 10]), ("zero_bubble", [4, 5, 6, 7, 8, 10])]
)
def test_micro_batches_that_fill_four_stages(schedule, counts):
    mesh = Mesh(world_size=4, pp_size=4, pp_schedule=schedule)
    assert [count for count in range(1, 11) if mesh.fills_pipeline(count)] == counts
