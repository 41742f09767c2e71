"""`evaluate --tasks rl:NAME`: pass@k is unbiased; answers equal those of single prompts;
mistakes are one line.
"""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.data.hf_tokenizer import load_tokenizer
from nanogpt_hf.evaluation.answers import pass_at_k
from nanogpt_hf.generate import continue_text
from nanogpt_hf.model.load import load_model


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    passed = torch.tensor(list(itertools.product([False, True], repeat=5)))
    subsets = list(itertools.combinations(range(5), k))
    expected = [
        sum(any(row[i] for i in subset) for subset in subsets) / len(subsets)
        for row in passed.tolist()
    ]
    assert pass_at_k(passed, k).tolist() == pytest.approx(expected)


@pytest.fixture(scope="module")
def rows(tmp_path_factory, letter_model) -> tuple[Path, int]:
    """30 questions for `letter_model`; the reference answer of about every other one, whose number
    is returned, too, is what the model writes.
    """
    model = load_model(str(letter_model))
    tokenizer = load_tokenizer(letter_model)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = []
    right = 0
    for number, word in enumerate(itertools.islice(itertools.product("abcde", repeat=3), 30)):
        question = "".join(word)
        ids = tokenizer(question, add_special_tokens=False)["input_ids"]
        written = continue_text(model, tokenizer, ids, max_new_tokens=4, temperature=0, seed=0)
        answer = "hhhh" if number % 2 or not written.strip() else written
        right += written.split() == answer.split()
        lines.append(json.dumps({"question": question, "answer": answer}) + "\n")
    path.write_text("".join(lines))
    return path, right


def measure(capsys, *arguments: object) -> tuple[dict, str]:
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(Path(arguments[-1]).read_text())["answers"], out


def test_greedy_answers_equal_those_of_single_prompts(capsys, letter_model, rows, tmp_path):
    path, right = rows
    options = ["--max-new-tokens", 4, "--batch-size", 7, "--output", tmp_path / "out.json"]
    answers, out = measure(
        capsys, letter_model, "--tasks", "rl:exact", "--questions", path, *options
    )
    figures = answers["rl:exact"]
    assert 0.3 < right / 30 < 0.7
    assert figures["pass@1"] == pytest.approx(right / 30)
    assert figures["pass@1_stderr"] == pytest.approx(math.sqrt(right * (30 - right) / 30 / 29 / 30))
    assert (figures["questions"], figures["samples"], figures["temperature"]) == (30, 1, 0)
    assert (figures["answer_tokens"], figures["cut_share"]) == (4, 1)
    assert f"{letter_model} on rl:exact: 30 questions" in out
    assert f"{right / 30:.4f} ± {figures['pass@1_stderr']:.4f}" in out


def test_samples_give_pass_at_powers_of_two(capsys, letter_model, tmp_path):
    regex = tmp_path / "regex.jsonl"
    rows = [{"prompt": letter, "completion": "[ab]"} for letter in "abcdefgh"]
    regex.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--tasks", "rl:regex", "--questions", regex, "--samples", 6]
    options += ["--max-new-tokens", 1, "--output", tmp_path / "out.json"]
    answers, _ = measure(capsys, letter_model, *options)
    rates = [answers["rl:regex"][f"pass@{k}"] for k in (1, 2, 4, 6)]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1]
    assert answers["rl:regex"]["temperature"] == 1
    few, _ = measure(capsys, letter_model, "--limit", 3, *options)
    assert few["rl:regex"]["questions"] == 3


def test_generated_questions_and_room_for_answers(capsys, byte_tokenizer, tmp_path):
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM

    folder = tmp_path / "model"
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPTConfig(**sizes, bos_token_id=256, eos_token_id=256)
    GPTForCausalLM(config).save_pretrained(folder)
    load_tokenizer(byte_tokenizer).save_pretrained(folder)
    capsys.readouterr()
    arguments = argv("{} --tasks rl:arithmetic --output {}", folder, tmp_path / "out.json")
    answers, _ = measure(capsys, *arguments)
    assert answers["rl:arithmetic"]["questions"] == 500
    assert answers["rl:arithmetic"]["max_new_tokens"] == 16 - len("12+34")


def write_questions(path: Path, *lengths: int) -> Path:
    rows = ({"question": "ab" * (length // 2), "answer": "h"} for length in lengths)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_without_room_are_left_out_and_counted(capsys, letter_model, tmp_path):
    positions = load_model(str(letter_model)).config.max_position_embeddings
    path = write_questions(tmp_path / "rows.jsonl", 2, 10 * positions, positions - 4, positions - 2)
    options = ["--tasks", "rl:exact", "--questions", path, "--max-new-tokens", 4]
    answers, out = measure(capsys, letter_model, *options, "--output", tmp_path / "out.json")
    assert answers["rl:exact"]["questions"] == 2
    assert answers["rl:exact"]["questions_left_out"] == 2
    assert "2 questions, 1 answer each (2 more leave no room for it, left out)" in out


@pytest.mark.parametrize(
    ("more", "options", "remedy"),
    [
        (-2, ["--max-new-tokens", 4], "lower --max-new-tokens to 2, or shorten the questions"),
        (40, ["--max-new-tokens", 4], "of the model; shorten the questions"),
        (0, [], "with --max-new-tokens 1 that is more than"),
    ],
)
def test_only_questions_without_room_are_refused(
    capsys, letter_model, tmp_path, more, options, remedy
):
    positions = load_model(str(letter_model)).config.max_position_embeddings
    path = write_questions(tmp_path / "rows.jsonl", positions + more, positions + 50)
    arguments = ["--tasks", "rl:exact", "--questions", path, *options]
    assert main(["evaluate", *map(str, [letter_model, *arguments])]) == 2
    error = capsys.readouterr().err
    assert f"has {positions + more} tokens" in error
    assert remedy in error
