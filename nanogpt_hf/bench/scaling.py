"""Scaling over numbers of processes, each launched like a run: throughput, efficiency, plot."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.planning.placement import Placement, config_text
from nanogpt_hf.reports.curves import new_figure, save_figure


@dataclass(frozen=True)
class Point:
    processes: int
    tokens_per_second: float  # all processes together
    step_seconds: float
    efficiency: float  # throughput per process, relative to one process alone


def machine_of(processes: int, split: str = "ddp") -> Placement:
    """Processes on this machine, bf16 on GPUs, float32 on the CPU.

    `split`: ddp, fsdp2, tp or pp.
    """
    gpu = torch.cuda.is_available()
    place = Placement(
        processes, per_machine=processes, precision="bf16" if gpu else "no", on_cpu=not gpu
    )
    kinds: dict[str, dict[str, Any]] = {
        "ddp": {"kind": "DDP"},
        "fsdp2": {"kind": "FSDP2", "shards": processes},
        "tp": {"tp": processes},
        "pp": {"pp": processes},
    }
    return dataclasses.replace(place, **kinds[split]) if processes > 1 else place


def measure(
    counts: list[int],
    arguments: Callable[[int], list[str]],
    log: Callable[[str], None],
    split: str = "ddp",
) -> list[Point]:
    """Launch a bench for each number of processes, 1 first; `arguments` are those of `bench`.

    The number of CPU threads per process is always the same. Raises UserError if a bench fails.
    """
    threads = max(1, allowed_cores() // max(counts))
    points = []
    for count in counts:
        log(f"{plural(count, 'process')} with {plural(threads, 'CPU thread')} each ...")
        with tempfile.TemporaryDirectory() as folder:
            machine, output = Path(folder) / "machine.yaml", Path(folder) / "bench.json"
            machine.write_text(config_text(machine_of(count, split)), encoding="utf-8")
            options = ["--config_file", machine, f"--num_cpu_threads_per_process={threads}"]
            options.append("--main_process_port=0")  # a free one
            # accelerate's own has no pipelines
            launch = ["-m", "nanogpt_hf", "launch", *options, "bench"]
            words = [sys.executable, *launch, *arguments(count), "--json", output]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(
                list(map(str, words)), capture_output=True, text=True, env=environment
            )
            if not output.is_file():
                lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
                reason = lines[0] if lines else f"exit status {done.returncode}"
                raise UserError(f"bench on {plural(count, 'process')} failed: {reason}")
            result = json.loads(output.read_text())
        alone = points[0].tokens_per_second if points else result["tokens_per_second"]
        rate = result["tokens_per_second"]
        points.append(Point(count, rate, result["step_seconds"]["median"], rate / alone / count))
    return points


def table(points: list[Point]) -> list[str]:
    rows = [
        (
            f"{p.processes:>9}  {p.step_seconds * 1e3:>9,.2f}  {p.tokens_per_second:>12,.0f}  "
            f"{p.efficiency:>10.0%}"
        )
        for p in points
    ]
    return [f"{'processes':>9}  {'step (ms)':>9}  {'tokens/s':>12}  {'efficiency':>10}", *rows]


def draw(points: list[Point], title: str, path: Path) -> None:
    """Draw throughput over processes, with the line of linear scaling, as a PNG."""
    figure, (axes,) = new_figure(1)
    counts, rates = [p.processes for p in points], [p.tokens_per_second for p in points]
    axes.plot(counts, [rates[0] * n for n in counts], "--", color="#969696", label="linear scaling")
    axes.plot(counts, rates, "o-", color="#2171b5", label="measured")
    for point in points:
        axes.annotate(
            f"{point.efficiency:.0%}",
            (point.processes, point.tokens_per_second),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
        )
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.set(xlabel="processes", xticks=counts, ylabel="tokens per second, all processes")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    save_figure(figure, path)
