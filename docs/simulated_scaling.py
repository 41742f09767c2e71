"""Print the tables of docs/performance.md that simulate steps of large models on 8 to 1,024 GPUs.

They are the arithmetic of nanogpt_hf/planning/layout.py; no GPU is involved.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config
from nanogpt_hf.planning.hardware import GPUS, NETWORK
from nanogpt_hf.planning.layout import Cluster, Layout, layouts
from nanogpt_hf.planning.proposal import propose

COUNTS = (8, 64, 256, 1024)
SEQUENCES = 256  # per step
# Share of the peak while computing. Each is fitted to one row of PUBLISHED, its first of that GPU, the others follow.
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
        positions = {"model.n_positions": size, "train.tokens_per_step": sequences * size, "train.micro_batch_size": 1}
        config = replace_knobs(Config(name=self.name), self.knobs | positions)
        model_config = build_config(config.model, self.vocabulary)
        with torch.device("meta"):
            return config, architecture_of(model_config).model_class(model_config)


def _llama(name: str, vocabulary: int, layers: int, heads: int, kv: int, width: int, inner: int, block: int) -> Size:
    sizes = {"n_layer": layers, "n_head": heads, "n_kv_head": kv, "n_embd": width, "n_inner": inner}
    knobs = {f"model.{knob}": value for knob, value in sizes.items()}
    return Size(name, vocabulary, {"model.architecture": "llama", "data.block_size": block} | knobs)


GPT2_XL = Size(
    "GPT-2 1558M",
    50257,
    {"model.n_layer": 48, "model.n_head": 25, "model.n_embd": 1600, "data.block_size": 1024},
)
LLAMA_2_7B = _llama("Llama 2 7B", 32000, 32, 32, 32, 4096, 11008, 4096)
LLAMA_2_13B = _llama("Llama 2 13B", 32000, 40, 40, 40, 5120, 13824, 4096)
LLAMA_2_70B = _llama("Llama 2 70B", 32000, 80, 64, 8, 8192, 28672, 4096)
LLAMA_3_8B = _llama("Llama 3.1 8B", 128256, 32, 32, 8, 4096, 14336, 8192)
LLAMA_3_70B = _llama("Llama 3 70B", 128256, 80, 64, 8, 8192, 28672, 8192)


SIZES = (GPT2_XL, LLAMA_2_7B, LLAMA_2_70B)


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


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3, with torch.compile) and docs/performance.md
# at 0413364: FSDP2 in bf16, 8 GPUs per host. On H100 it checkpoints some of the layers, counted here as none.
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


def tokens_per_second(config: Config, layout: Layout) -> float:
    """Of one GPU."""
    return config.train.tokens_per_step / layout.step_seconds / layout.place.processes


def mfu(config: Config, model: PreTrainedModel, layout: Layout, gpu: str) -> float:
    """Share of the peak, without the repeated arithmetic of checkpointing."""
    flops = architecture_of(model).flops_per_token(model.config, config.data.block_size)
    return flops * tokens_per_second(config, layout) / GPUS[gpu].bf16_flops


def simulated(published: Published) -> tuple[float, float]:
    """Tokens per second and GPU, and MFU, in the layout of a published row."""
    row = published
    config, model = row.size.build(row.gpus * row.micro_batch_size)
    cluster = cluster_of(row.gpus, row.gpu)
    cluster = dataclasses.replace(cluster, gpu=cluster.gpu._replace(memory=math.inf))  # theirs fit by other means
    found = layouts(config, model, cluster, REACHED[row.gpu])
    layout = next(x for x in found if (x.name, x.place.checkpointing) == (row.layout, row.checkpointing))
    return tokens_per_second(config, layout), mfu(config, model, layout, row.gpu)


def scaling_table(sizes: Iterable[Size] = SIZES) -> list[str]:
    """A table in Markdown: the proposed layouts of three sizes, with the same step on all numbers of GPUs."""
    titles = ["model", "GPUs", "layout", "seconds per step", "tokens/s per GPU", "MFU", "waits", "bubble"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for size in sizes:
        config, model = size.build(SEQUENCES)
        for gpus in COUNTS:
            proposal = propose(config, model, cluster_of(gpus, "H100"), REACHED["H100"])
            layout = proposal.layout
            cells = [size.name, f"{gpus:,}", "none fits" if proposal.best else "too few sequences", *[""] * 5]
            if layout:
                name = f"{layout.name}{', checkpointing' if layout.place.checkpointing else ''}"
                times = (layout.waiting_seconds, layout.bubble_seconds)
                cells[2:] = [name, f"{layout.step_seconds:.3g}", f"{tokens_per_second(config, layout):,.0f}"]
                cells += [f"{mfu(config, model, layout, 'H100'):.1%}"]
                cells += [f"{value / layout.step_seconds:.1%}" for value in times]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def published_table() -> list[str]:
    """A table in Markdown: published throughputs beside simulated ones."""
    lines = [
        "| torchtitan's runs | published tokens/s per GPU | simulated | ratio |",
        "|---|---|---|---|",
    ]
    for row in PUBLISHED:
        rate, _ = simulated(row)
        run = f"{row.size.name}, {row.gpus} × {row.gpu}, {row.layout}{', checkpointing' if row.checkpointing else ''}"
        lines.append(f"| {run} | {row.tokens_per_second:,} | {rate:,.0f} | {rate / row.tokens_per_second:.2f} |")
    return lines


if __name__ == "__main__":
    print(*scaling_table(), "", *published_table(), sep="\n")
