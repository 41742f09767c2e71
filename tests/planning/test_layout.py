"""Layouts over GPUs: the proposal for worked examples, its memory and communication summed by
hand, its config.
"""

import math
from pathlib import Path

import pytest

from nanogpt_hf.config.load import load_config
from nanogpt_hf.errors import UserError
from nanogpt_hf.planning.candidates import Cluster, candidates, propose
from nanogpt_hf.planning.config_files import config_text, read_launch
from nanogpt_hf.planning.estimate import planned_model
from nanogpt_hf.planning.hardware import GPUS, gpu_of
from nanogpt_hf.planning.memory import LOSS
from nanogpt_hf.planning.transfers import all_gather_bytes, all_reduce_bytes

ROOT = Path(__file__).parents[2]
LLAMA_7B = {
    "model.architecture": "llama",
    "model.n_layer": 32,
    "model.n_head": 32,
    "model.n_embd": 4096,
    "model.n_inner": 11008,
    "model.n_positions": 4096,
    "data.source": "Skylion007/openwebtext",
    "data.tokenizer": "gpt2",
    "data.dir": "none",
    "data.block_size": 4096,
    "train.tokens_per_step": 4_194_304,
    "train.micro_batch_size": 1,
}
FOUR_LAYERS = LLAMA_7B | {"model.n_layer": 4}
LLAMA_70B = LLAMA_7B | {"model.n_layer": 80, "model.n_head": 64, "model.n_kv_head": 8}
LLAMA_70B |= {"model.n_embd": 8192, "model.n_inner": 28672}


def cluster(gpus, name="H100", memory=None, per_machine=8, gigabits=400.0) -> Cluster:
    name, gpu = gpu_of(name, memory)
    return Cluster(gpus, name, gpu, min(per_machine, gpus), gigabits * 1e9 / 8)


def gpt2_1558m():
    config = load_config(ROOT / "recipes" / "gpt2_1558m.yaml", [("data.dir", "none")])
    return config, planned_model(config)


def proposal_for(values, where):
    config = load_config(None, values, name="example")
    model = planned_model(config)
    return config, model, propose(config, model, where, mfu=0.4)


def bytes_of_shards(model, shards) -> float:
    """Float32 bytes of all parameters on the first of `shards` processes: FSDP2 shards by rows,
    rounded up.
    """
    return sum(4 * math.ceil(len(p) / shards) * math.prod(p.shape[1:]) for p in model.parameters())


@pytest.mark.long
def test_gpt2_1558m_on_8_gpus_of_24_gb_is_sharded():
    config, model = gpt2_1558m()
    found = propose(config, model, cluster(8, None, 24e9), mfu=0.4)
    layout = found.layout
    families = {other.launch.family: other for other in found.best}
    assert (found.cluster.name, layout.launch.name) == ("RTX 4090", "FSDP2 8")
    state = layout.memory.phases[LOSS]
    assert state["weights"] == pytest.approx(bytes_of_shards(model, 8), rel=1e-3)
    assert state["optimizer"] == 2 * state["weights"]
    assert layout.memory.peak <= 0.9 * 24e9
    # DDP: 16 bytes for each of 1,556.8 M parameters and 64 rows that pad the vocabulary
    assert found.cluster.lacks(families["DDP"])
    assert 16 * model.num_parameters() > 24e9
    # its 25 heads are not divided by tensor parallelism, but parts of a sequence go in a ring
    assert not any("TP" in family for family in families)
    assert "CP × FSDP2" in families
    # 2 bytes gathered twice, 4 scattered, of all but what stays gathered, for each of 12
    # micro-batches
    micro_batches = 480 // 8 // layout.micro_batch_size
    outside = model.transformer.wte.weight.numel() + 1024 * 1600 + 1600
    inside = model.num_parameters() - outside
    sent = 7 / 8 * micro_batches * (2 * (2 * inside + outside) + 4 * (inside + outside))
    assert layout.bytes_sent(between_machines=False) == pytest.approx(sent)
    assert layout.bytes_sent(between_machines=True) == 0


@pytest.mark.slow
def test_70b_on_64_gpus_of_80_gb_needs_every_gpu_and_checkpointing():
    _, model, found = proposal_for(LLAMA_70B, cluster(64))
    layout = found.layout
    assert (layout.launch.name, layout.launch.checkpointing) == ("FSDP2 64", "true")
    weights = layout.memory.phases[LOSS]["weights"]
    assert weights == pytest.approx(bytes_of_shards(model, 64), rel=1e-3)
    by_family = {other.launch.family: other for other in found.best}
    assert by_family.keys() >= {"DDP", "FSDP2", "TP × FSDP2", "CP × FSDP2", "PP × FSDP2"}
    assert by_family["HSDP"].memory.peak > 16 * model.num_parameters() / 8 > 80e9
    # with a slow network only activations should cross it, but torch's pipelines hold buffers for
    # all micro-batches of a step
    _, _, slow = proposal_for(LLAMA_70B, cluster(64, gigabits=10.0))
    pipeline = next(other for other in slow.best if other.launch.family == "PP × FSDP2")
    assert pipeline.launch.pp_size > 1
    assert slow.layout.launch.family == "FSDP2"


@pytest.mark.long
def test_tensor_parallel_memory_is_that_of_split_matrices():
    config = load_config(None, FOUR_LAYERS, name="example")
    model = planned_model(config)
    layout = next(
        x for x in candidates(config, model, cluster(8), 0.4) if x.launch.name == "TP 4 × FSDP2 2"
    )
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    matrices = model.num_parameters() - norms
    assert layout.memory.phases[LOSS]["weights"] == pytest.approx(
        4 * (matrices / 4 + norms) / 2, rel=1e-4
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "where", "name"),
    [
        ({}, cluster(1), "one process"),
        ({}, cluster(8), "DDP 8"),
        ({}, cluster(16), "DDP 16"),
        ({"model.n_layer": 24, "model.n_embd": 1024}, cluster(8, "H100", 4e9), "FSDP2 8"),
        # Its steps take less than 1 ms, of which a pipeline sends the least.
        (
            {"model.n_layer": 4, "model.n_embd": 128, "train.tokens_per_step": 256 * 48},
            cluster(4, "RTX 4090"),
            "DDP 4",
        ),
    ],
)
def test_simplest_layout_that_is_nearly_as_fast_is_proposed(values, where, name):
    sizes = {"model.n_layer": 12, "model.n_head": 16, "model.n_embd": 768, "data.block_size": 256}
    small = {key: LLAMA_7B[key] for key in ("data.source", "data.tokenizer", "data.dir")}
    _, _, found = proposal_for(small | sizes | {"train.tokens_per_step": 256 * 960} | values, where)
    assert found.layout.launch.name == name


@pytest.mark.slow
def test_hsdp_is_proposed_if_a_machine_holds_the_model_and_the_network_is_slow():
    _, _, found = proposal_for(
        LLAMA_7B | {"train.tokens_per_step": 4096 * 128}, cluster(16, gigabits=50.0)
    )
    assert found.layout.launch.name == "HSDP 2×8"
    whole = next(other for other in found.best if other.launch.family == "FSDP2")
    assert 4 * found.layout.bytes_sent(between_machines=True) < whole.bytes_sent(True)


MIXTURE = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 11008}
MIXTURE |= {"tie_word_embeddings": True}


@pytest.mark.slow
def test_experts_are_shared_if_no_gpu_holds_those_of_two_layers():
    values = FOUR_LAYERS | {"model.architecture": "qwen3_moe", "model.extra": MIXTURE}
    values |= {"train.tokens_per_step": 4096 * 32}
    _, model, found = proposal_for(values, cluster(16))
    layout = found.layout
    assert layout.launch.name == "EP 16 × DDP 16"
    experts = 4 * 64 * 3 * 4096 * 11008
    others = model.num_parameters() - experts
    weights = layout.memory.phases[LOSS]["weights"]
    assert weights == pytest.approx(4 * (experts / 16 + others))
    # two experts of each token, sent and received in each pass of four layers; no copies to sum
    sent = {transfer.name: transfer.size for transfer in layout.transfers}
    assert sent == {
        "all-reduce of gradients": 2 * 15 / 16 * 4 * others,
        "exchanges with experts": 4 * 4 * 2 * 15 / 16 * 2 * 2 * 4096 * 4096,
    }
    families = {other.launch.family: other for other in found.best}
    assert found.cluster.lacks(families["FSDP2"])  # the gathered experts of two layers
    shared = families["EP × FSDP2"]
    held = shared.memory.phases[LOSS]["weights"]
    assert held == pytest.approx(bytes_of_shards(model, 16), rel=1e-3)
    assert {transfer.name for transfer in shared.transfers} == {
        "gathers of weights",
        "reduce-scatters of gradients",
        "exchanges with experts",
    }


@pytest.mark.long
def test_no_layout_is_proposed_that_the_recipe_refuses_or_that_does_not_fit():
    config = load_config(None, FOUR_LAYERS | {"optim.state": "8bit"}, name="example")
    found = candidates(config, planned_model(config), cluster(8), 0.4)
    assert {layout.launch.pp_size for layout in found} == {1}
    with pytest.raises(UserError, match=r"2 × L4.*21\.6 GB"):
        proposal_for(LLAMA_7B | {"model.n_layer": 16}, cluster(2, "L4"))


def test_ring_bytes_are_those_of_a_ring_passed_around_by_hand():
    size = 4
    whole = 12_000
    sent = 0
    # reduce-scatter, then all-gather: in each round every device sends one part
    for _ in range(2 * (size - 1)):
        sent += whole // size
    assert all_reduce_bytes(whole, size) == sent
    assert all_gather_bytes(whole, size) == sent / 2
    assert all_reduce_bytes(whole, 1) == 0


@pytest.mark.long
def test_written_config_is_read_as_the_proposed_launch(tmp_path):
    seen = set()
    config = load_config(None, FOUR_LAYERS | {"train.tokens_per_step": 4096 * 64}, name="example")
    model = planned_model(config)
    experts = {"num_experts": 8, "moe_intermediate_size": 64, "tie_word_embeddings": True}
    values = FOUR_LAYERS | {"model.architecture": "qwen3_moe", "model.extra": experts}
    mixture = load_config(None, values | {"train.tokens_per_step": 4096 * 64}, name="example")
    found = candidates(mixture, planned_model(mixture), cluster(4), 0.4)
    for where in (cluster(1), cluster(4), cluster(4, per_machine=2)):
        found += candidates(config, model, where, 0.4)
    for layout in found:
        path = tmp_path / "machine.yaml"
        path.write_text(config_text(layout.launch))
        assert read_launch(str(path)) == layout.launch
        assert layout.launch.dp_size * layout.micro_batch_size * layout.accumulation == 64
        assert layout.accumulation >= layout.launch.pp_size
        seen.add(layout.launch.family)
    assert seen >= {"one process", "DDP", "FSDP2", "HSDP", "TP", "TP × FSDP2", "CP × FSDP2"}
    assert seen >= {"PP", "PP × DDP", "PP × FSDP2", "EP × DDP", "EP × FSDP2"}


def test_gpu_is_chosen_by_name_or_memory():
    assert gpu_of("A100", None) == ("A100", GPUS["A100"])
    assert gpu_of("A100", 40e9)[1].memory == 40e9
    fitting = [gpu_of(None, memory)[0] for memory in (24e9, 48e9, 80e9, None)]
    assert fitting == ["RTX 4090", "L40S", "H100", "H100"]
