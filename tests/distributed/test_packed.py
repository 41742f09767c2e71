"""Packed documents on several processes, by each way of attention: losses and gradients equal those
of one process with a mask of all pairs of positions.
"""

import multiprocessing
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import flex_attention
from transformers.integrations import flex_attention as integration

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.distributed.context_parallel import own_positions, share_positions
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.tensor_parallel import split_matrices, split_vocabulary
from nanogpt_hf.methods.terms import next_token_loss
from nanogpt_hf.model import packed_attention
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.packed_attention import attend_apart
from nanogpt_hf.model.recompute import recompute_blocks
from nanogpt_hf.optim.state import full_tensor

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch warns of its own parts when it compiles
    pytest.mark.skipif(sys.platform != "linux", reason="forks after torch is imported"),
]
MODELS = {
    "gpt2": {"bias": True},
    "llama": {"architecture": "llama", "n_kv_head": 2},
    "qwen3": {"architecture": "qwen3", "n_kv_head": 2},
}
# How packed documents attend, and the mask that models get.
WAYS = {
    "mask": torch.Tensor,
    "alone": packed_attention.DocumentMask,
    "flex": flex_attention.BlockMask,
}
# The lengths of the documents of four rows, the last without targets as padding is: of one token,
# across the middle, from it, and one as long as a row.
DOCUMENTS = ((70, 29, 1, 60, 40), (1, 1, 158, 40), (100, 60, 40), (200,))
PADDING = 40
LAYOUTS = {
    "CP": (2, 2),
    "CP, recomputed": (2, 2),
    "CP × FSDP2": (4, 2),
    "FSDP2": (2, 1),
    "TP": (2, 1),
}


def batch_of() -> dict[str, torch.Tensor]:
    positions = [torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS]
    ids = torch.randint(50, (4, 201), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[:3, -PADDING:] = -100
    return {
        "input_ids": ids[:, :-1],
        "shift_labels": targets,
        "position_ids": torch.stack(positions),
    }


def build(name: str):
    section = ModelSection(n_layer=2, n_head=4, n_embd=64, n_positions=256, **MODELS[name])
    model = build_model(build_config(section, 50), seed=0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so large that attention matters
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def shard(model, layout: str, mesh: Mesh) -> None:
    """Split a model as a run does."""
    if layout == "TP":
        whole = init_device_mesh("cpu", (2,))
        split_vocabulary(model, whole)
        split_matrices(model, whole)
        return
    whole = init_device_mesh("cpu", (mesh.dp_size, mesh.cp_size), mesh_dim_names=("dp", "cp"))
    if mesh.cp_size > 1:
        share_positions(model, whole["cp"], ring=False, rotation="allgather")
    if layout.endswith("recomputed"):
        recompute_blocks(model, "selective")
    flat = whole["dp", "cp"]._flatten()
    for block in architecture_of(model).blocks(model):
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)


def train_rank(rank: int, port: int, layout: str, folder) -> None:
    """A process: loss and gradients of each model and way, and of a second, other batch."""
    processes, cp_size = LAYOUTS[layout]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    launch = Launch(processes, cp_size=cp_size, tp_size=2 if layout == "TP" else 1)
    mesh = Mesh.of(launch, rank)
    patch = pytest.MonkeyPatch()
    masks = []
    patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    # torch's kernels for CPUs have no backward pass: its reference for every operation
    patch.setattr(
        integration.WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention
    )
    for way, kind in WAYS.items():
        patch.setattr(packed_attention, "FLEX_DEVICES", ["cpu"] if way == "flex" else [])
        patch.setattr(packed_attention, "MIN_POSITIONS", 1000 if way == "mask" else 2)
        for name in MODELS:
            model = build(name)
            attend_apart(model)
            shard(model, layout, mesh)
            for block in architecture_of(model).blocks(model):
                inner = architecture_of(model).attention(block)
                inner.register_forward_pre_hook(
                    lambda _, args, options: masks.append(
                        type(options.get("attention_mask", args[1] if len(args) > 1 else None))
                    ),
                    with_kwargs=True,
                )
            found = {}
            for step, order in enumerate(([0, 1, 2, 3], [3, 2, 0, 1])):
                rows = order[mesh.dp_rank :: mesh.dp_size]
                whole = {key: tensor[rows] for key, tensor in batch_of().items()}
                masks.clear()
                model.zero_grad()
                batch = own_positions(whole, model, mesh) if cp_size > 1 else whole
                loss = next_token_loss(model, batch)[0]
                loss.backward()
                assert set(masks) == {kind}, (way, masks)
                total = loss.detach().clone()
                scale = 1 if layout == "TP" else processes  # FSDP2's gradients are means
                if layout != "TP":
                    dist.all_reduce(total)
                found |= {f"{step} loss": total}
                for key, parameter in model.named_parameters():
                    found[f"{step} {key}"] = full_tensor(parameter.grad) * scale
            if rank == 0:
                found = {key: value.contiguous() for key, value in found.items()}
                save_file(found, folder / f"{name} {way}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the processes of a layout have found, trained once."""
    folders = {}

    def trained(layout: str):
        if layout not in folders:
            folders[layout] = folder = tmp_path_factory.mktemp("packed")
            torch.set_num_threads(1)  # a thread pool does not survive a fork
            fork = multiprocessing.get_context("fork")
            port = get_free_port()
            ranks = [
                fork.Process(target=train_rank, args=(rank, port, layout, folder))
                for rank in range(LAYOUTS[layout][0])
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(300)
                process.kill()
        return folders[layout]

    return trained


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_one_process(trained, layout, way, name):
    found = load_file(trained(layout) / f"{name} {way}.safetensors")
    model = build(name)
    batch = batch_of()
    for step in range(2):
        model.zero_grad()
        loss = next_token_loss(model, batch)[0]
        loss.backward()
        torch.testing.assert_close(found.pop(f"{step} loss"), loss.detach(), rtol=1e-5, atol=0)
        for key, parameter in model.named_parameters():
            difference = (found.pop(f"{step} {key}") - parameter.grad).norm()
            # The gradient of these biases is rounding only.
            if not key.endswith("k_proj.bias"):
                assert difference < 1e-5 * parameter.grad.norm(), key
    assert not found
