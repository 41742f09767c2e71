"""Print published throughputs of runs on GPUs beside those that `estimate` computes.

It is the arithmetic of nanogpt_hf/planning/candidates.py; no GPU is involved.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config
from nanogpt_hf.planning.candidates import Cluster, candidates
from nanogpt_hf.planning.hardware import GPUS, NETWORK

# Share of the peak while computing. Each is fitted to one row of PUBLISHED, its first of that GPU,
# the others follow.
REACHED = {"H100": 0.402, "A100": 0.611}


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its sequences."""

    name: str
    vocabulary: int
    knobs: dict[str, Any]

    def build(self, sequences: int) -> tuple[Config, PreTrainedModel]:
        """A recipe with `sequences` per step, and the model on the meta device."""
        size = self.knobs["data.block_size"]
        positions = {
            "model.n_positions": size,
            "train.tokens_per_step": sequences * size,
            "train.micro_batch_size": 1,
        }
        config = replace_knobs(Config(name=self.name), self.knobs | positions)
        model_config = build_config(config.model, self.vocabulary)
        with torch.device("meta"):
            return config, architecture_of(model_config).model_class(model_config)


def _llama(
    name: str, vocabulary: int, layers: int, heads: int, kv: int, width: int, inner: int, block: int
) -> Size:
    sizes = {"n_layer": layers, "n_head": heads, "n_kv_head": kv, "n_embd": width, "n_inner": inner}
    knobs = {f"model.{knob}": value for knob, value in sizes.items()}
    return Size(name, vocabulary, {"model.architecture": "llama", "data.block_size": block} | knobs)


LLAMA_2_13B = _llama("Llama 2 13B", 32000, 40, 40, 40, 5120, 13824, 4096)
LLAMA_2_70B = _llama("Llama 2 70B", 32000, 80, 64, 8, 8192, 28672, 4096)
LLAMA_3_8B = _llama("Llama 3.1 8B", 128256, 32, 32, 8, 4096, 14336, 8192)
LLAMA_3_70B = _llama("Llama 3 70B", 128256, 80, 64, 8, 8192, 28672, 8192)


@dataclass(frozen=True)
class Published:
    """A throughput that others measured, in tokens per second and GPU."""

    size: Size
    gpu: str
    gpus: int
    layout: str
    checkpointing: bool
    micro_batch_size: int
    tokens_per_second: float


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3, with torch.compile) and
# docs/performance.md at 0413364: FSDP2 in bf16, 8 GPUs per host. On H100 it checkpoints some of the
# layers, counted here as none.
PUBLISHED = (
    Published(LLAMA_3_8B, "H100", 8, "FSDP2 8", False, 2, 6667),
    Published(LLAMA_3_8B, "H100", 128, "FSDP2 128", False, 2, 6514),
    Published(LLAMA_2_13B, "A100", 64, "FSDP2 64", False, 2, 2162),
    Published(LLAMA_2_70B, "A100", 64, "FSDP2 64", True, 2, 353),
    Published(LLAMA_3_70B, "A100", 64, "FSDP2 64", True, 1, 331),
)


def cluster_of(gpus: int, gpu: str) -> Cluster:
    """Machines of 8 GPUs with an adapter of 400 Gb/s for each."""
    return Cluster(gpus, gpu, GPUS[gpu], 8, NETWORK * 1e9 / 8)


def simulated(row: Published) -> float:
    """Tokens per second and GPU in the layout of a published row."""
    config, model = row.size.build(row.gpus * row.micro_batch_size)
    cluster = cluster_of(row.gpus, row.gpu)
    # theirs fit by other means
    cluster = dataclasses.replace(cluster, gpu=cluster.gpu._replace(memory=math.inf))
    found = candidates(config, model, cluster, REACHED[row.gpu])
    layout = next(
        x
        for x in found
        if (x.launch.name, bool(x.launch.checkpointing)) == (row.layout, row.checkpointing)
    )
    return config.train.tokens_per_step / layout.step_seconds / layout.launch.world_size


def published_table() -> list[str]:
    """A table in Markdown: published throughputs beside simulated ones."""
    lines = [
        "| torchtitan's runs | published tokens/s per GPU | simulated | ratio |",
        "|---|---|---|---|",
    ]
    for row in PUBLISHED:
        rate = simulated(row)
        run = (
            f"{row.size.name}, {row.gpus} × {row.gpu}, "
            f"{row.layout}{', checkpointing' if row.checkpointing else ''}"
        )
        lines.append(
            f"| {run} | {row.tokens_per_second:,} | {rate:,.0f} | "
            f"{rate / row.tokens_per_second:.2f} |"
        )
    return lines


if __name__ == "__main__":
    print(*published_table(), sep="\n")
