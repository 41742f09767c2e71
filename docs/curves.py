#!/usr/bin/env python3
"""Draw docs/curves.png: validation loss over tokens of nanoGPT's own program and of runs.

    docs/curves.py NANOGPT_LOG NAME=RUN[,RUN...] ...

NANOGPT_LOG is what nanoGPT's train.py prints. The runs of a name are seeds: their mean is drawn,
with the range from the lowest to the highest.
"""

import re
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot

from nanogpt_hf.reports.curves import RUN_COLORS
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

TOKENS_PER_STEP = 768
LOSS = 1.898  # nanoGPT's


def read_run(path: str) -> tuple[list[int], list[float]]:
    events = [event for event in read_metrics(RunFolder(Path(path))) if "val/loss" in event]
    return [event["step"] for event in events], [event["val/loss"] for event in events]


def main(log: str, *named: str) -> None:
    found = re.findall(r"^step (\d+): .*val loss ([\d.]+)", Path(log).read_text(), re.MULTILINE)
    steps, losses = zip(*found, strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    curves = [("nanoGPT, its own program", np.array(steps, int), np.array([losses], float))]
    for words in named:
        name, runs = words.split("=")
        seeds = [read_run(run) for run in runs.split(",")]
        curves.append((name, np.array(seeds[0][0]), np.array([values for _, values in seeds])))
    for color, (name, at, values) in zip(RUN_COLORS, curves, strict=False):
        tokens = at * TOKENS_PER_STEP / 1e6
        axes.plot(tokens, values.mean(0), color=color, marker=".", label=name)
        axes.fill_between(tokens, values.min(0), values.max(0), color=color, alpha=0.25, lw=0)
    axes.axhline(LOSS, color="gray", lw=0.8, ls="--")
    axes.set(xlabel="million tokens", ylabel="validation loss", ylim=(1.8, 2.8), xlim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).with_name("curves.png"), dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
