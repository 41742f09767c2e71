"""A made-up bundle of CORE: every type of task, with and without solved examples."""

import json
import random
from pathlib import Path

import yaml

# label, type, solved examples, delimiter, percent of right guesses
tasks = [
    ("choose", "multiple_choice", 0, "? ", 25),
    ("choose_few", "multiple_choice", 2, " ", 25.0),
    ("resolve", "schema", 1, " ", 50),
    ("continue", "language_modeling", 0, "", 0),
    ("continue_few", "language_modeling", 1, "?", 0),
]


def write(folder: Path) -> Path:
    """A bundle of five tasks in the letters that `letter_model` knows; many texts are longer
    than its positions.
    """
    draw = random.Random(0)

    def words(least: int, greatest: int) -> str:
        return " ".join(
            "".join(draw.choices("abcdefgh", k=draw.randint(1, 4)))
            for _ in range(draw.randint(least, greatest))
        )

    rows = {
        "multiple_choice": lambda: {
            "query": words(1, 5),
            "choices": [words(1, 2) for _ in range(4)],
            "gold": draw.randrange(4),
        },
        "schema": lambda: {
            "context_options": [words(1, 3), words(1, 3)],
            "continuation": words(1, 2),
            "gold": draw.randrange(2),
        },
        "language_modeling": lambda: {
            "context": f" {words(1, 4)} \n",
            "continuation": draw.choice("abcdefgh"),
        },
    }
    (folder / "eval_data" / "sub").mkdir(parents=True)
    entries = []
    baselines = "Eval Task,Task Category,Random baseline\n"
    for label, kind, shots, delimiter, baseline in tasks:
        uri = f"sub/{label}.jsonl"
        made = [rows[kind]() for _ in range(37)]
        (folder / "eval_data" / uri).write_text("".join(json.dumps(row) + "\n" for row in made))
        entry = {"label": label, "dataset_uri": uri, "num_fewshot": [shots], "icl_task_type": kind}
        entries.append(entry | ({} if delimiter == " " else {"continuation_delimiter": delimiter}))
        baselines += f"{label},made up,{baseline}\n"
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text(baselines)
    return folder
