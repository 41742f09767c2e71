#!/usr/bin/env python3
"""The toys of docs/alignment.md: the data of preferences and their plot, and the data of tools.

    docs/alignment.py pairs
    docs/alignment.py plot RUN=BEFORE,AFTER ...
    docs/alignment.py sums

`pairs` writes pairs.jsonl, and 500 questions that are in no training data: right.jsonl with the
right answer, with or without a full stop, stop.jsonl with any answer that ends with one. `plot`
draws docs/preferences.png from runs, with the right answers before and after each.

`sums` writes sums of numbers of three figures: sums_plain.jsonl with the answers alone,
sums_called.jsonl with calls of the calculator before the answers, and questions that are in
neither, sums_rl.jsonl to train on and sums_held_out.jsonl to measure.
"""

import json
import random
import re
import sys
from pathlib import Path

from nanogpt_hf.data.built_in import arithmetic_question
from nanogpt_hf.data.call_format import call_of
from nanogpt_hf.reports.curves import RUN_COLORS
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.tasks.tools import load_tools

# The seed of the questions; RL's have others.
SEED = 7


def pairs() -> None:
    trained = [arithmetic_question(SEED, n, held_out=False) for n in range(4000)]
    asked = [arithmetic_question(SEED, n, held_out=True) for n in range(500)]
    files = {
        "pairs": [{"prompt": q, "chosen": f"{a}.", "rejected": a} for q, a in trained],
        "right": [{"prompt": q, "completion": rf"^{re.escape(a)}\.?$"} for q, a in asked],
        "stop": [{"prompt": q, "completion": r"\.$"} for q, _ in asked],
    }
    for name, rows in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plot(*runs: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (curves, dots) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for color, words in zip(RUN_COLORS, runs, strict=False):
        run, figures = words.split("=")
        folder = RunFolder(Path(run))
        events = [event for event in read_metrics(folder) if "val/accuracy" in event]
        steps = [event["step"] for event in events]
        curves.plot(steps, [event["val/accuracy"] for event in events], color=color, marker=".")
        dots.plot([0, 1], [float(figure) for figure in figures.split(",")], color=color, marker="o")
    curves.set(xlabel="step", ylabel="accuracy on held-out pairs", ylim=(-0.03, 1.03))
    dots.set(ylabel="right greedy answers", ylim=(0.7, 1.01), xlim=(-0.3, 1.3))
    dots.set_xticks([0, 1], ["after SFT", "after align"])
    figure.savefig(Path(__file__).with_name("preferences.png"), dpi=130)


def sums() -> None:
    tools = load_tools(["calculator"], seconds=5.0)
    draw = random.Random(SEED)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(16_000)]
    # Each sum is in one file only.
    asked = [(f"{a}+{b}", str(a + b)) for a, b in dict.fromkeys(pairs)]
    plain = [{"prompt": question, "completion": answer} for question, answer in asked]
    called = []
    for question, answer in asked[:10_000]:
        call = call_of("calculator", {"expression": question})
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        called.append({"messages": messages, "tools": tools.schemas})
    files = {
        "plain": plain[:10_000],
        "called": called,
        "rl": plain[10_000:15_000],
        "held_out": plain[15_000:15_500],
    }
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(f"sums_{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    {"pairs": pairs, "plot": plot, "sums": sums}[sys.argv[1]](*sys.argv[2:])
