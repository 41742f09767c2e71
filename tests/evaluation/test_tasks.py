"""lm-eval tasks: scores equal those of lm-eval's `hf` model; mistakes are one line."""

import math
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file

from assertions import refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.hf_tokenizer import load_tokenizer
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation import tasks
from nanogpt_hf.evaluation.base import Subject
from nanogpt_hf.evaluation.tasks import load_tasks, run_tasks
from nanogpt_hf.model.load import load_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.tracking import read_metrics


def subject(folder: Path) -> Subject:
    model = load_model(str(folder))
    tokenizer = load_tokenizer(folder)
    return Subject("model", model, tokenizer, Accelerator(), batch_size=4)


def evaluate_tasks(folder: Path, names: list[str]) -> tasks.Scores:
    return run_tasks(subject(folder), load_tasks(names))


@pytest.mark.slow
def test_scores_equal_lm_evals_hf_model(letter_model, letter_tasks, monkeypatch):
    ours = evaluate_tasks(letter_model, letter_tasks)

    import lm_eval
    import lm_eval.tasks

    newline = load_tokenizer(letter_model).get_vocab()["\n"]  # a character model has no start token
    options = {"pretrained": str(letter_model), "dtype": "float32", "prefix_token_id": newline}
    # lm-eval resolves the questions' path from the working folder
    monkeypatch.chdir(Path(letter_tasks[0]).parent)
    with tasks._quietly():
        manager = lm_eval.tasks.TaskManager(include_defaults=False)
        more = {"device": "cpu", "batch_size": 4, "bootstrap_iters": 100, "task_manager": manager}
        theirs = lm_eval.simple_evaluate(
            model="hf", model_args=options, tasks=letter_tasks, **more
        )["results"]
    assert set(ours) == {"letters", "lines"}
    for name, metric in (("letters", "acc"), ("letters", "acc_norm"), ("lines", "perplexity")):
        assert ours[name][metric] == pytest.approx(theirs[name][f"{metric},none"], rel=1e-4)
    assert ours["letters"]["acc_stderr"] == pytest.approx(
        theirs["letters"]["acc_stderr,none"], rel=1e-4
    )
    assert 0 < ours["letters"]["acc"] < 1  # some answers are right and some wrong
    assert 1 < ours["lines"]["perplexity"] < math.inf


def test_limit_uses_first_questions_and_keeps_the_tokenizer(letter_model, letter_tasks, capsys):
    measured = subject(letter_model)
    loaded = load_tasks(letter_tasks)
    before = measured.tokenizer.get_vocab(), measured.tokenizer.pad_token
    measured.model.train()
    capsys.readouterr()
    scores = run_tasks(measured, loaded, limit=4)
    assert measured.model.training
    assert scores["letters"]["acc"] in (0, 0.25, 0.5, 0.75, 1)
    # loaded tasks can be evaluated repeatedly, as at every evaluation of a run
    assert run_tasks(measured, loaded, limit=4) == scores
    assert (measured.tokenizer.get_vocab(), measured.tokenizer.pad_token) == before
    assert capsys.readouterr() == ("", "")


def local_task(folder: Path, **changes) -> str:
    task = {"task": "mine", "dataset_path": "json"}
    task |= {"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}} | changes
    given = {key: value for key, value in task.items() if value}
    (folder / "mine.yaml").write_text(yaml.safe_dump(given))
    return str(folder / "mine.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "none.jsonl"),
        ({"include": "other.yaml"}, "`include`"),
        ({"dataset_kwargs": None, "dataset_path": "somebody/nothing"}, "somebody/nothing"),
    ],
)
@pytest.mark.usefixtures("letter_tasks")  # skips if lm-eval is missing
def test_invalid_local_task_is_one_line_and_runs_no_python(tmp_path, changes, message, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = local_task(tmp_path, **changes)
    for name in (path, "~/mine.yaml"):
        assert message in refusal(load_tasks, [name], error=UserError)
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    (tmp_path / "mine.yaml").write_text("task: mine\nprocess_docs: !function code.run\n")
    assert "!function" in refusal(load_tasks, [path], error=UserError)


@pytest.mark.usefixtures("letter_tasks")
def test_lm_eval_tasks_by_name_and_offline(monkeypatch):
    import lm_eval.tasks

    # only one folder of lm-eval's: reading the names of all 14,000 tasks takes seconds
    folder = Path(lm_eval.tasks.__file__).parent / "hellaswag"
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: manager)
    message = refusal(load_tasks, ["helaswag"], "eval.tasks", error=UserError)
    assert message.startswith("eval.tasks: helaswag cannot be loaded: no such task")
    assert "did you mean hellaswag?" in message
    assert "hellaswag cannot be loaded: " in refusal(load_tasks, ["hellaswag"], error=UserError)


def test_task_with_unknown_character_is_one_line(letter_model, letter_tasks, tmp_path):
    questions = Path(letter_tasks[0]).with_name("letters.jsonl").read_text().replace("a", "X")
    (tmp_path / "letters.jsonl").write_text(questions)
    (tmp_path / "letters.yaml").write_text(Path(letter_tasks[0]).read_text())
    assert "character" in refusal(
        evaluate_tasks, letter_model, [str(tmp_path / "letters.yaml")], error=UserError
    )


@pytest.mark.long
def test_tasks_are_scored_at_every_evaluation_without_effect(write_recipe, tmp_path, letter_tasks):
    (tmp_path / "text.txt").write_text("abc def gh?\n fed cba hag bed?\n" * 200)
    runs = {}
    for name, first_questions in (("with", letter_tasks), ("without", [])):
        recipe = write_recipe(
            data__source=str(tmp_path / "text.txt"),
            model__n_positions=32,
            model__dropout=0.1,
            # A limit without tasks is refused.
            **({"eval__tasks": first_questions, "eval__tasks_limit": 5} if first_questions else {}),
        )
        config = load_config(recipe)
        prepare(config)
        runs[name] = RunFolder(tmp_path / name)
        loop.train(prepare_run(config, runs[name].path))
    events = [event for event in read_metrics(runs["with"]) if "val/loss" in event]
    assert [event["step"] for event in events] == [0, 3, 6]
    assert all(0 <= event["task/letters/acc"] <= 1 for event in events)
    # Three models have three perplexities.
    assert len({event["task/lines/perplexity"] for event in events}) == 3
    first, second = (load_file(run.final / "model.safetensors") for run in runs.values())
    assert all((first[name] == second[name]).all() for name in first)
    tokenizers = [run.final / "tokenizer_config.json" for run in runs.values()]
    assert tokenizers[0].read_text() == tokenizers[1].read_text()
