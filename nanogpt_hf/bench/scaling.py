"""The same recipe on 1..N processes, each launched as a run would be: throughput, efficiency, a picture."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import written_whole


@dataclass(frozen=True)
class Point:
    processes: int
    tokens_per_second: float  # of all processes together
    step_seconds: float
    efficiency: float  # of a process, as a share of what one alone does


def machine_config(processes: int) -> str:
    """An accelerate config of so many processes on this machine: plain DDP, bf16 on GPUs, float32 on the CPU."""
    gpu = torch.cuda.is_available()
    lines = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if processes > 1 else "'NO'",
        "num_machines": 1,
        "num_processes": processes,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "bf16" if gpu else "'no'",
        "use_cpu": str(not gpu).lower(),
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


def measure(counts: list[int], arguments: Callable[[int], list[str]], say: Callable[[str], None]) -> list[Point]:
    """A bench of its own for each number of processes, which must begin with 1; `arguments` are those of `bench`.

    A process has the same number of CPU threads in all of them. Raises UserError where one of them fails.
    """
    threads = max(1, allowed_cores() // max(counts))
    points = []
    for count in counts:
        say(f"{count} process{'es' * (count > 1)} of {threads} CPU thread{'s' * (threads > 1)} ...")
        with tempfile.TemporaryDirectory() as folder:
            machine, found = Path(folder) / "machine.yaml", Path(folder) / "found.json"
            machine.write_text(machine_config(count), encoding="utf-8")
            launch = ["-m", "accelerate.commands.launch", "--config_file", machine]
            launch += [f"--num_cpu_threads_per_process={threads}", "-m", "nanogpt_hf", "bench"]
            words = [sys.executable, *launch, *arguments(count), "--json", found]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment)
            if not found.is_file():
                said = (done.stderr.strip() or done.stdout.strip()).splitlines()
                raise UserError(f"bench on {count} processes failed: {said[0] if said else done.returncode}")
            result = json.loads(found.read_text())
        alone = points[0].tokens_per_second if points else result["tokens_per_second"]
        rate = result["tokens_per_second"]
        points.append(Point(count, rate, result["step_seconds"]["median"], rate / alone / count))
    return points


def table(points: list[Point]) -> list[str]:
    rows = [
        f"{p.processes:>9}  {p.step_seconds * 1e3:>9,.2f}  {p.tokens_per_second:>12,.0f}  {p.efficiency:>10.0%}"
        for p in points
    ]
    return [f"{'processes':>9}  {'step (ms)':>9}  {'tokens/s':>12}  {'efficiency':>10}", *rows]


def draw(points: list[Point], title: str, path: Path) -> None:
    """Throughput over processes beside the line that it would follow if none had to wait, as a PNG at `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    counts, rates = [p.processes for p in points], [p.tokens_per_second for p in points]
    axes.plot(counts, [rates[0] * n for n in counts], color="#969696", linestyle="--", label="in proportion")
    axes.plot(counts, rates, color="#2171b5", marker="o", label="measured")
    for point in points:
        axes.annotate(
            f"{point.efficiency:.0%}",
            (point.processes, point.tokens_per_second),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
            color="#08519c",
        )
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.set_xlabel("processes")
    axes.set_xticks(counts)
    axes.set_ylabel("tokens a second, all processes")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png")
