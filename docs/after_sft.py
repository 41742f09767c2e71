#!/usr/bin/env python3
"""The comparison of methods after SFT in docs/alignment.md: what each gains at equal answers.

    docs/after_sft.py models
    docs/after_sft.py run METHOD SEED RATE
    docs/after_sft.py seeds SEED ...
    docs/after_sft.py table SEED ...

`models` trains a base model, and a teacher with three times its layers. `run` trains a student by
SFT, if that seed has none yet, and by a method for as many answers as any other. `seeds` runs all
methods at the chosen rates. `table` prints right answers and answer tokens of these runs. A run
with a result is not repeated. All goes into the working folder, under runs/after_sft.

Protocol, fixed before seeds 1 to 5 ran. Every method continues the same student with 6,400
answers, given or sampled, once, with the same linear schedule. Seed 101 chose the rates, of three
or four for each method. Answers per step were not scanned, except with rewards, which are noisy:
rewards alone lost right answers with Muon. Rewards with a teacher had five trials of rate, weight,
divergence and answers per step. The last model is measured, by greedy answers to 500 held-out
questions.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from nanogpt_hf.data.built_in import arithmetic_rows
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
FOLDER = Path("runs/after_sft")
TEACHER = FOLDER / "teacher"
SFT_STEPS = 150
ANSWERS = 6_400
BLOCK = 40

_SFT = ["finetune", RECIPES / "arithmetic_sft.yaml"]
# The evaluation during training is not the one that is reported, so it is small.
_RL = ["rl", RECIPES / "arithmetic_rl.yaml", "--rl.eval_questions", 8, "--rl.eval_samples", 1]
# A teacher alone needs one answer to each question.
_ALONE = [*_RL, "--rl.samples", 1]
_TAUGHT = ["--distill.teacher", TEACHER, "--distill.weight"]
_FORWARD = ["--distill.beta", 0]


class Method(NamedTuple):
    # The name in the table.
    name: str
    words: list[object]
    per_step: int  # answers
    optimizer: str
    answers: int = ANSWERS


METHODS = {
    "sft": Method("SFT, continued", _SFT, 64, "muon"),
    "off-policy": Method("teacher on given answers", [*_SFT, *_TAUGHT, 1], 64, "muon"),
    "on-policy": Method("teacher on own answers", [*_ALONE, *_TAUGHT, 1], 64, "muon"),
    "on-policy-forward": Method(
        "the same with `--distill.beta 0`", [*_ALONE, *_TAUGHT, 1, *_FORWARD], 64, "muon"
    ),
    "rl": Method("rewards", _RL, 256, "adamw"),
    "rl+teacher": Method(
        "rewards with a teacher", [*_RL, "--rl.samples", 2, *_TAUGHT, 0.9, *_FORWARD], 128, "muon"
    ),
    # Not at equal answers: what more of them are worth.
    "rl-eightfold": Method("rewards of 51,200 answers", _RL, 256, "adamw", 8 * ANSWERS),
}
# The chosen rates. With Muon, AdamW's rate for all that is not a matrix is a tenth of Muon's.
RATES = {
    "sft": 1e-2,
    "off-policy": 1e-2,
    "on-policy": 3e-3,
    "on-policy-forward": 1e-2,
    "rl": 3e-5,
    "rl+teacher": 1e-2,
}


def command(*words: object) -> None:
    line = ["nanogpt-hf", *map(str, words)]
    print(" ".join(line), flush=True)
    subprocess.run([sys.executable, "-m", "nanogpt_hf", *line[1:], "--quiet"], check=True)


def train(folder: Path, seed: int, steps: int, words: list[object]) -> None:
    if (folder / "final").is_dir():
        return
    ends = ["--train.max_steps", steps, "--eval.every", steps, "--checkpoint.every", steps]
    command(*words, "--train.seed", seed, *ends, "--run-dir", folder, "--overwrite")


def right_answers(folder: Path) -> float:
    """Measure the share of right greedy answers of the last model, once."""
    file = folder / "right.json"
    if not file.is_file():
        asked = ["--limit", 500, "--max-new-tokens", 8, "--batch-size", 500]
        command("evaluate", folder / "final", "--tasks", "rl:arithmetic", *asked, "--json", file)
    return json.loads(file.read_text())["answers"]["rl:arithmetic"]["pass@1"]


def models() -> None:
    recipe = RECIPES / "arithmetic_base.yaml"
    train(FOLDER / "base", 100, 300, ["pretrain", recipe])
    large = FOLDER / "teacher_base"
    train(large, 7, 500, ["pretrain", recipe, "--model.n_layer", 9])
    # After the first two the teacher had 0.900 and 0.914 right answers, so it went on.
    first = FOLDER / "teacher_sft"
    train(first, 7, 400, [*_SFT, "--from", large])
    second = FOLDER / "teacher_sft_2"
    train(second, 8, 300, [*_SFT, "--from", first])
    slower = ["--optim.muon_learning_rate", 3e-3, "--optim.learning_rate", 3e-4]
    slower += ["--optim.min_learning_rate", 0]
    train(TEACHER, 9, 200, [*_SFT, "--from", second / "final", *slower])
    print(f"teacher: {right_answers(TEACHER):.3f}")


def student(seed: int) -> Path:
    folder = FOLDER / f"student_{seed}"
    train(folder, seed, SFT_STEPS, [*_SFT, "--from", FOLDER / "base"])
    print(f"{folder.name}: {right_answers(folder):.3f}", flush=True)
    return folder


def run(method: str, seed: int, rate: float) -> None:
    start = student(seed)
    folder = FOLDER / f"{method}_{seed}_{rate:g}"
    # A seed of its own: the questions come in another order than in the student's SFT.
    _, words, per_step, optimizer, answers = METHODS[method]
    words = [*words, "--from", start / "final", "--optim.name", optimizer]
    words += ["--train.tokens_per_step", per_step * BLOCK]
    words += ["--train.micro_batch_size", min(per_step, 128)]
    if optimizer == "muon":
        words += ["--optim.muon_learning_rate", rate]
        rate /= 10
    words += ["--optim.learning_rate", rate, "--optim.min_learning_rate", 0]
    words += ["--optim.schedule", "linear", "--optim.warmup_steps", 5, "--tracking.every", 1]
    train(folder, seed + 1000, answers // per_step, words)
    print(f"{folder.name}: {right_answers(folder):.3f}", flush=True)


def seeds(*numbers: str) -> None:
    for number in numbers:
        for method, rate in RATES.items():
            run(method, int(number), rate)


def answer_tokens(method: str, folder: Path) -> int:
    """Count the answer tokens that a run learned from, sampled or given."""
    events = read_metrics(RunFolder(folder))
    means = [e["train/completion_tokens"] for e in events if "train/completion_tokens" in e]
    if means:
        return round(METHODS[method].per_step * sum(means))
    # The characters of a given answer, and the token that ends it.
    return round(
        METHODS[method].answers
        * statistics.fmean(len(row["completion"]) + 1 for row in arithmetic_rows())
    )


def table(*numbers: str) -> None:
    """Print the right answers of each seed; their mean with its standard deviation; and the mean
    lead over SFT that goes on, with its standard error over the seeds.
    """
    rows = {"SFT alone": [right_answers(FOLDER / f"student_{n}") for n in numbers]}
    tokens = {"SFT alone": ""}
    for method, rate in RATES.items():
        name = METHODS[method].name
        folders = [FOLDER / f"{method}_{n}_{rate:g}" for n in numbers]
        rows[name] = [right_answers(folder) for folder in folders]
        counts = [answer_tokens(method, folder) for folder in folders]
        tokens[name] = f"{statistics.fmean(counts):,.0f}"
    continued = METHODS["sft"].name
    last = "mean ± standard deviation | minus continued SFT"
    print(f"| | tokens | seed {' | '.join(numbers)} | {last} |")
    print("|---|---|" + "---|" * (len(numbers) + 2))
    for name, shares in rows.items():
        gains = [a - b for a, b in zip(shares, rows[continued], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        figures = [f"{share:.3f}" for share in shares]
        figures.append(f"{statistics.fmean(shares):.3f} ± {statistics.stdev(shares):.3f}")
        lead = f"{statistics.fmean(gains):+.3f} ± {error:.3f}"
        figures.append("" if name == continued else lead)
        print(f"| {name} | {tokens[name]} | {' | '.join(figures)} |")


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "run":
        run(arguments[0], int(arguments[1]), float(arguments[2]))
    else:
        {"models": models, "seeds": seeds, "table": table}[name](*arguments)
