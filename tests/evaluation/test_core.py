"""The CORE score: equal to a slow reference, on one process and two; mistakes in a bundle are
one line.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import core_bundle
from assertions import refusal
from nanogpt_hf.commands import main
from nanogpt_hf.evaluation.core import load_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return core_bundle.write(tmp_path_factory.mktemp("bundle"))


def reference_accuracies(
    tasks: list, folder: Path, model_folder: Path, limit: int | None = None
) -> dict[str, float]:
    """The accuracy in each task, from the definition: one text at a time, all logits, no shared
    code.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    positions = model.config.n_positions

    def tokens(text: str) -> list[int]:
        # it has no start token
        return [*tokenizer("\n")["input_ids"], *tokenizer(text)["input_ids"]]

    @torch.no_grad()
    def log_probabilities(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def loss(ids: list[int], scored: int) -> float:
        """The mean over the last `scored` tokens."""
        ids = ids[-positions:]
        table = log_probabilities(ids)
        return (
            -sum(table[i - 1, ids[i]].item() for i in range(len(ids) - scored, len(ids))) / scored
        )

    def options(kind: str, item: dict) -> list[tuple[str, str]]:
        if kind == "multiple_choice":
            return [(item["query"], choice) for choice in item["choices"]]
        if kind == "schema":
            return [(context, item["continuation"]) for context in item["context_options"]]
        return [(item["context"].strip(), item["continuation"])]

    accuracies = {}
    for label, kind, shots, delimiter, _ in tasks:
        lines = (folder / "eval_data" / "sub" / f"{label}.jsonl").read_text().splitlines()
        data = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(data)
        data = data[:limit]
        right = 0
        for index, item in enumerate(data):
            others = [i for i in range(len(data)) if i != index]
            before = ""
            for example in (data[i] for i in random.Random(1234 + index).sample(others, shots)):
                before += delimiter.join(options(kind, example)[example.get("gold", 0)]) + "\n\n"
            texts = [tokens(before + delimiter.join(option)) for option in options(kind, item)]
            if kind == "language_modeling":
                greedy = tokens((before + item["context"].strip() + delimiter).strip())
                while len(greedy) < len(texts[0]):
                    greedy.append(int(log_probabilities(greedy[-positions + 1 :])[-1].argmax()))
                right += greedy == texts[0]
                continue
            order = -1 if kind == "schema" else 1
            shared = 0
            while len({tuple(text[::order][: shared + 1]) for text in texts}) == 1:
                shared += 1
            losses = [
                loss(text, shared if kind == "schema" else len(text) - shared) for text in texts
            ]
            right += losses.index(min(losses)) == item["gold"]
        accuracies[label] = right / len(data)
    return accuracies


def measure(capsys, *arguments: object) -> tuple[dict, str]:
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(Path(arguments[-1]).read_text())["core"], out


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.slow), 20])
def test_core_equals_a_slow_reference(capsys, letter_model, bundle, tmp_path, limit):
    options = ["--limit", limit] if limit else []
    core, out = measure(
        capsys, letter_model, "--core", bundle, *options, "--output", tmp_path / "out.json"
    )
    expected = reference_accuracies(core_bundle.tasks, bundle, letter_model, limit)
    assert {label: task["accuracy"] for label, task in core["tasks"].items()} == pytest.approx(
        expected
    )
    assert all(0 < accuracy < 1 for accuracy in expected.values())
    centered = [
        (expected[label] - guess / 100) / (1 - guess / 100)
        for label, *_, guess in core_bundle.tasks
    ]
    assert [task["centered"] for task in core["tasks"].values()] == pytest.approx(centered)
    assert core["score"] == pytest.approx(sum(centered) / len(centered))
    assert f"5 tasks of {bundle}" in out
    assert f"CORE {core['score']:.4f} " in out
    assert f"{expected['resolve']:.4f}  centered {centered[2]:7.4f}  {limit or 37} questions" in out


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("eval_data/sub/choose.jsonl", "choices", "x"),
        ("eval_data/sub/choose.jsonl", '"gold": ', '"gold": 9'),
        ("core.yaml", "icl_tasks:", "icl_tasks: []\nothers:"),
        ("eval_meta_data.csv", "choose,made up,25", "choose,made up,100"),
        ("eval_meta_data.csv", "choose,made up,25", "choose," + "x" * 200_000),  # csv.Error
    ],
)
def test_damaged_file_of_a_bundle_is_one_line(tmp_path, file, before, after):
    folder = core_bundle.write(tmp_path / "bundle")
    path = folder / file
    path.write_text(path.read_text().replace(before, after, 1))
    assert f"--core: {folder}: " in refusal(load_bundle, str(folder))


def test_limit_leaves_room_for_the_solved_examples(bundle, tmp_path):
    message = refusal(load_bundle, str(bundle), limit=2)
    assert message.startswith("--limit: choose_few: ")
    assert f"--core: {tmp_path}: no bundle" in refusal(load_bundle, str(tmp_path))
