"""Context parallelism: the parts of a sequence, ring attention on several processes, and what it
refuses.
"""

import copy
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from cpu_ring import allow_cpu_ring
from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.context_parallel import own_positions, share_positions
from nanogpt_hf.distributed.layout import Machine, check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_size": 24,
}
LLAMA = LlamaConfig(vocab_size=50, intermediate_size=32, max_position_embeddings=16, **SIZES)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("ring", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("exchange_of_heads", [[0, 1, 2, 3], [4, 5, 6, 7]])],
)
def test_own_positions_of_ring_and_exchange(attention, expected):
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    tokens = torch.arange(16).view(2, 8) + 100
    parts = [
        own_positions({"input_ids": tokens}, model, Mesh(rank, 2, cp_size=2)) for rank in range(2)
    ]
    assert [part["position_ids"].tolist() for part in parts] == [
        [positions] for positions in expected
    ]
    for part in parts:
        assert part["input_ids"].tolist() == tokens[:, part["position_ids"][0]].tolist()


def train_and_evaluate(rank: int, processes: int, rotation: str) -> None:
    """A model that attends in a ring equals one on whole sequences, and leaves the attention of
    that one as it was.
    """
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LLAMA).train()
    model = copy.deepcopy(whole)
    attention = F.scaled_dot_product_attention
    mesh = init_device_mesh("cpu", (processes,))
    share_positions(model, mesh, ring=True, rotation=rotation)
    tokens = torch.randint(50, (2, 17))
    batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
    part = own_positions(batch, model, Mesh(rank, processes, cp_size=processes))
    gradients = []
    for each, own in ((whole, batch), (model, part)):
        targets = own.pop("targets").flatten()
        F.cross_entropy(
            each(**own, use_cache=False).logits.flatten(0, 1), targets, reduction="sum"
        ).backward()
        gradients.append(dict(each.named_parameters()))
    for name, parameter in gradients[1].items():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(
            parameter.grad, gradients[0][name].grad, atol=1e-5, rtol=1e-5, msg=name
        )
    assert F.scaled_dot_product_attention is attention
    padding = torch.ones(2, 16, dtype=torch.long)
    padding[0, :5] = 0
    with pytest.raises(ValueError, match="no attention masks"):
        model(tokens[:, :-1], attention_mask=padding)
    logits = [
        each.eval()(tokens[:, :-1], attention_mask=padding).logits[padding.bool()]
        for each in (whole, model)
    ]
    torch.testing.assert_close(*logits)
    assert not torch.allclose(logits[0], model(tokens[:, :-1]).logits[padding.bool()])
    gpu_kernel_in_ring(mesh)


def gpu_kernel_in_ring(mesh: DeviceMesh) -> None:
    """Torch sends the flash kernel of GPUs through its ring, also with fewer kv heads than
    heads: shapes only.
    """
    query, key, value = (
        DTensor.from_local(
            torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="meta"), mesh, [Shard(2)]
        )
        for heads in (3, 1, 1)
    )
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, *saved, _ = kernel(query, key, value, 0.0, True)
    lse, *lengths, seed, offset = saved
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    gradients = kernel(out, query, key, value, out, lse, *lengths, 0.0, True, seed, offset)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]
    assert [gradient.to_local().shape[2] for gradient in (out, *gradients)] == [8, 8, 8, 8]


def on_rank(rank: int, folder: Path, processes: int, rotation: str) -> None:
    torch.set_num_threads(1)
    try:
        allow_cpu_ring()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
        )
        train_and_evaluate(rank, processes, rotation)
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # gloo processes sometimes abort during teardown


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux", reason="forks after torch is imported, which is safe on Linux only"
)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("processes", "rotation"), [(2, "allgather"), (4, "alltoall")])
def test_ring_attention_equals_whole_sequences(tmp_path, processes, rotation):
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=on_rank, args=(rank, tmp_path, processes, rotation))
        for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
        process.kill()
    errors = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.txt")))
    assert [process.exitcode for process in ranks] == [0] * processes, errors


GPU = Machine("fsdp", "bf16", device="cuda")


def check(machine: Machine, **knobs) -> None:
    values = {"model.n_head": 3, "model.n_embd": 24, "model.n_positions": 16, "data.block_size": 16}
    values |= {
        "train.micro_batch_size": 1,
        "train.tokens_per_step": 16 * 14,
        "data.source": "python-docs",
        "data.tokenizer": "gpt2",
        "data.dir": "none",
    }
    config = load_config(
        None,
        values | {name.replace("__", "."): value for name, value in knobs.items()},
        name="tiny",
    )
    check_layout(config, Mesh(world_size=2, cp_size=2, stated_sizes={"cp_size": 2}), machine)


@pytest.mark.parametrize(
    ("machine", "knobs", "message"),
    [
        (
            Machine("fsdp", "bf16"),
            {},
            "model.n_head is 3, which 2 processes do not divide, and ring attention",
        ),
        (
            Machine("fsdp", "no", device="cuda"),
            {},
            r"CUDA GPUs \(Ampere or newer\) with mixed_precision bf16; set other sizes",
        ),
        (
            GPU,
            {"data__block_size": 14},
            "data.block_size is 14, which does not divide into the 2 × 2 equal parts",
        ),
        (GPU, {"model__dropout": 0.1}, r"dropout 0\.1 does not combine with ring attention"),
    ],
)
def test_ring_attention_refuses(machine, knobs, message):
    with pytest.raises(UserError, match=message):
        check(machine, **knobs)


def test_ring_attention_needs_no_sizes_of_heads_on_a_gpu():
    check(GPU)
    # heads are exchanged
    check(Machine("fsdp", "bf16"), model__n_head=4, data__block_size=14, model__dropout=0.1)
