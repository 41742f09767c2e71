"""Metrics of answers by the `evaluate` library: values beside those of rouge_score, sacrebleu and
the library's own call; during training; on two processes; metrics that cannot be used.
"""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

import nanogpt_hf
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.blocks import open_tokens
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation import metric_modules as module
from nanogpt_hf.evaluation.metric_modules import (
    class_numbers,
    compute_metrics,
    load_metrics,
    standard_errors,
)
from nanogpt_hf.evaluation.question_task import training_question_task
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

pytestmark = pytest.mark.long

# Metrics as the library loads them from a folder. Those of the Hub have the same form.
_MODULE = """
import datasets
import evaluate
{imports}


class Ours(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("{dtype}")
        features = datasets.Features({{"predictions": kind, "references": kind}})
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=features
        )

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        {body}
"""
_MODULES = {
    "exact": ("", "string", 'return {"exact_match": sum(p == r for p, r in pairs) / len(pairs)}'),
    "accuracy": ("", "int32", 'return {"accuracy": sum(p == r for p, r in pairs) / len(pairs)}'),
    "rouge_l": (
        "from rouge_score import rouge_scorer",
        "string",
        'scorer = rouge_scorer.RougeScorer(["rougeL"])\n'
        '        scores = [scorer.score(r, p)["rougeL"].fmeasure for p, r in pairs]\n'
        '        return {"rougeL": sum(scores) / len(scores)}',
    ),
    "chrf": (
        "import sacrebleu",
        "string",
        "score = sacrebleu.corpus_chrf(predictions, [references])\n"
        '        return {"score": score.score, "char_order": score.char_order}',
    ),
    "lengths": ("", "string", 'return {"lengths": [len(p) for p, _ in pairs], "score": 1.0}'),
    "share": ("", "string", 'return {"share": sum(float(p) for p, _ in pairs) / len(pairs)}'),
    "numbers": ("", "float32", 'return {"distance": 0.0}'),
    # As a correlation, it has no value if all texts are equal.
    "spread": ("", "string", 'return {"spread": 1 / (len({p for p, _ in pairs}) - 1)}'),
    "slow": ("import time", "string", "time.sleep(9)"),
    "writes": (
        "import os\nimport subprocess",
        "string",
        'os.write(1, b"by itself ")\n'
        '        subprocess.run(["echo", "by a program"], check=True)\n'
        '        return {"share": 1.0}',
    ),
    "broken": ("", "string", "return 1 / 0"),
    "ends": ("", "string", "raise SystemExit(0)"),
    "ends_at_import": ("raise SystemExit(0)", "string", "return {}"),
    "nothing": ("", "string", "return None"),
    "number": ("", "string", "return 3.0"),
    "objects": ("", "string", 'return {"figure": object()}'),
    "huge": ("", "string", 'return {"figure": 10**400}'),
    "names": (
        "",
        "string",
        'return {"data": 1.0, "rows": 2.0, "a\\nb": 3.0, "nan": float("nan"), "s": "x"}',
    ),
    "silent": ("", "string", 'return {"nan": float("nan"), "word": "x"}'),
    "missing": ("import no_such_package", "string", "return {}"),
    "several": ("", "string", 'return {"exact_match": 0.0, "nothing": float("nan")}'),
}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> Path:
    """A folder with all metrics, each a folder of its own."""
    place = tmp_path_factory.mktemp("metrics")
    for name, (imports, dtype, body) in _MODULES.items():
        (place / name).mkdir()
        text = _MODULE.format(imports=imports, dtype=dtype, body=body)
        (place / name / f"{name}.py").write_text(text)
    (place / "judged").mkdir()
    judged = _MODULE.format(imports="", dtype="string", body="return {}")
    judged = judged.replace('"references"', '"sources"')
    (place / "judged" / "judged.py").write_text(judged)
    (place / "text.txt").write_text("no metric")
    (place / "empty").mkdir()
    return place


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    draw = random.Random(3)
    lines = []
    for _ in range(12):
        word = "".join(draw.choices("abc", k=3))
        lines.append(json.dumps({"prompt": word, "completion": word[::-1]}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def evaluated(chat_model, rows, metrics, tmp_path_factory, forget_accelerate):
    """The result of `evaluate --metrics` with names of the fixture's metrics, as JSON and text."""

    def evaluated(capsys, *names: str, options: tuple = (), model: Path = chat_model):
        output = tmp_path_factory.mktemp("out") / "results.json"
        named = ",".join(str(metrics / name) for name in names)
        words = ["--data", rows, "--metrics", named, "--json", output, *options]
        forget_accelerate()
        capsys.readouterr()
        assert main(["evaluate", str(model), *map(str, words)]) == 0
        return json.loads(output.read_text())["metrics"], capsys.readouterr().out

    return evaluated


def test_figures_equal_those_of_the_libraries(evaluated, capsys, rows):
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    scorers = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge_score is missing")
    options = ("--max-new-tokens", 8)
    found, out = evaluated(capsys, "rouge_l", "chrf", "exact", "accuracy", options=options)
    answers = found["answers"]
    data = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["prompt"] for row in answers] == [row["prompt"] for row in data]
    assert [row["reference"] for row in answers] == [row["completion"] for row in data]
    predictions = [row["answer"] for row in answers]
    references = [row["reference"] for row in answers]
    scorer = scorers.RougeScorer(["rougeL"])
    scores = [
        scorer.score(reference, prediction)["rougeL"].fmeasure
        for prediction, reference in zip(predictions, references, strict=True)
    ]
    assert found["figures"]["rougeL"] == pytest.approx(sum(scores) / len(scores), abs=1e-12)
    chrf = sacrebleu.corpus_chrf(predictions, [references]).score
    assert found["figures"]["score"] == pytest.approx(chrf, abs=1e-12)
    assert found["figures"]["exact_match"] == found["figures"]["accuracy"]
    assert f"  score          {chrf:.4f} ± " in out
    assert "12 questions, greedy" in out
    assert found["rows"] == 12


def test_figures_equal_the_call_of_the_library(metrics):
    evaluate = pytest.importorskip("evaluate")
    predictions = ["a b c", "b", ""]
    references = ["a c", "b", "c"]
    path = str(metrics / "rouge_l")
    theirs = evaluate.load(path, keep_in_memory=True).compute(
        predictions=predictions, references=references
    )
    ours = compute_metrics(load_metrics([path], "--metrics"), predictions, references)
    assert ours == theirs
    assert ours["rougeL"] == pytest.approx((0.8 + 1 + 0) / 3)


def test_figures_of_equal_names_get_the_names_of_their_metrics(metrics):
    names = [str(metrics / name) for name in ("exact", "several")]
    found = compute_metrics(load_metrics(names, "--metrics"), ["a"], ["a"])
    assert found["exact_exact_match"] == 1.0
    assert found["several_exact_match"] == 0.0


def test_lists_are_in_the_json_and_only_numbers_in_the_table(evaluated, capsys):
    found, out = evaluated(capsys, "lengths", "several", options=("--max-new-tokens", 4))
    assert len(found["figures"]["lengths"]) == 12
    assert "lengths" not in out
    assert "nothing" not in out


def test_names_and_values_of_figures_are_the_metrics_own(evaluated, capsys):
    found, out = evaluated(capsys, "names", options=("--max-new-tokens", 2, "--limit", 2))
    figures = {"data": 1.0, "rows": 2.0, "a b": 3.0, "nan": None, "s": "x"}
    assert found["figures"] == figures
    assert found["rows"] == 2
    assert "  a b            3.0000" in out
    _, out = evaluated(capsys, "silent", options=("--max-new-tokens", 2, "--limit", 2))
    assert "no figure is a single finite number" in out


@pytest.mark.parametrize(
    ("texts", "references", "numbers"),
    [
        (["b", " a\n"], ["a", "b"], [1, 0]),
        (["c", "a"], ["a", "b"], [2, 0]),
        (["", "x"], ["x", "x"], [1, 0]),
    ],
)
def test_texts_become_numbers_of_classes(texts, references, numbers):
    assert class_numbers(texts, references) == numbers


def test_standard_errors_are_those_of_a_share(metrics):
    loaded = load_metrics([str(metrics / "share")], "--metrics")
    texts = ["1"] * 200 + ["0"] * 200
    # The standard error of a share of one half over 400 rows is 0.025; a hundred resamples
    # estimate it within a fifth.
    assert standard_errors(loaded, texts, texts)["share"] == pytest.approx(0.025, rel=0.2)
    assert standard_errors(loaded, ["1"], ["1"]) == {}


def test_resample_without_a_value_is_left_out(metrics):
    """Each third resample of three rows with one that differs has equal rows only."""
    loaded = load_metrics([str(metrics / "spread")], "--metrics")
    assert compute_metrics(loaded, ["1", "0", "0"], ["1"] * 3) == {"spread": 1.0}
    assert standard_errors(loaded, ["1", "0", "0"], ["1"] * 3) == {"spread": 0.0}
    with pytest.raises(UserError, match="spread: cannot be computed for these answers: Zero"):
        compute_metrics(loaded, ["1", "1"], ["1", "1"])


def test_metric_has_a_time_limit(metrics, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    loaded = load_metrics([str(metrics / "slow")], "--metrics")
    for compute in (compute_metrics, standard_errors):
        with pytest.raises(UserError, match=r"slow: takes more than 0.2 seconds for 2 answers"):
            compute(loaded, ["1", "0"], ["1", "0"])


def test_metric_writes_nothing_to_stdout(metrics, capfd):
    loaded = load_metrics([str(metrics / "writes")], "--metrics")
    assert compute_metrics(loaded, ["1"], ["1"]) == {"share": 1.0}
    print("after")
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert "by itself" in err
    assert "by a program" in err


def test_sampled_answers_repeat_and_differ_from_greedy_ones(evaluated, capsys):
    options = ("--max-new-tokens", 8, "--limit", 4)
    first, _ = evaluated(capsys, "exact", options=(*options, "--temperature", 1))
    second, _ = evaluated(capsys, "exact", options=(*options, "--temperature", 1))
    greedy, _ = evaluated(capsys, "exact", options=options)
    assert first["answers"] == second["answers"]
    assert first["answers"] != greedy["answers"]


@pytest.mark.slow
def test_batches_and_processes_change_no_answer(
    evaluated, capsys, chat_model, rows, metrics, tmp_path, launch_command
):
    whole, _ = evaluated(capsys, "rouge_l", options=("--max-new-tokens", 8, "--batch-size", 12))
    single, _ = evaluated(capsys, "rouge_l", options=("--max-new-tokens", 8, "--batch-size", 1))
    assert single == whole
    output = tmp_path / "two.json"
    words = ["--data", rows, "--metrics", metrics / "rouge_l", "--json", output]
    command = launch_command(
        "cpu_ddp", "evaluate", chat_model, *words, "--max-new-tokens", "8", "--batch-size", 4
    )
    completed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(output.read_text())["metrics"] == whole


def test_training_measures_held_out_rows(chat_model, chat_file, metrics, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    knobs = {
        "eval.metrics": f"[{metrics / 'exact'}, {metrics / 'lengths'}]",
        "eval.metric_rows": 3,
        "eval.every": 1,
        "train.max_steps": 2,
        "train.micro_batch_size": 2,
        "train.tokens_per_step": 512,
        "data.block_size": 256,
        "data.format": "chat",
        "data.dir": tmp_path / "data",
        "optim.warmup_steps": 0,
    }
    options = [str(word) for key, value in knobs.items() for word in (f"--{key}", value)]
    words = ["finetune", "--from", chat_model, "--data", chat_file, "--run-dir", run.path]
    assert main([*map(str, words), *options]) == 0
    found = [event for event in read_metrics(run) if "metrics/exact_match" in event]
    assert [event["step"] for event in found] == [0, 1, 2]
    assert "3 held-out answers: exact_match 0.0000" in capsys.readouterr().out
    # Answers change nothing of the training.
    plain = RunFolder(tmp_path / "plain")
    words[-1] = plain.path
    without = [*options, "--eval.metrics", "[]"]
    without = [word for word in without if word not in ("--eval.metric_rows", "3")]
    assert main([*map(str, words), *without]) == 0
    losses, expected = (
        [event["train/loss"] for event in read_metrics(one) if "train/loss" in event]
        for one in (run, plain)
    )
    assert losses == expected


def test_questions_of_training_are_the_conversations_that_it_holds_out(
    byte_tokenizer, tmp_path, make_recipe
):
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"number {n:04d}?", "completion": f"{n}"} for n in range(80)]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = load_config(
        make_recipe(
            tmp_path / "recipe.yaml",
            data__source=str(source),
            data__format="chat",
            data__tokenizer=str(byte_tokenizer),
            data__block_size=64,
            model__n_positions=64,
            train__tokens_per_step=256,
            data__validation_fraction=0.2,
            eval__metrics=["exact"],
        )
    )
    manifest, _ = prepare(config)
    tokenizer = build_tokenizer(config.data.tokenizer, ()).hf
    held_out, trained = (
        tokenizer.decode([t for ids in open_tokens(folder, split, manifest).chunks for t in ids])
        for folder in [Path(config.data.dir)]
        for split in ("validation", "train")
    )
    task = training_question_task(config, tokenizer, 10**6)
    assert len(task.questions) == manifest.validation.documents == 16
    for question in task.questions:
        assert question.prompt in held_out
        assert question.prompt not in trained
    first = training_question_task(config, tokenizer, 3).questions
    assert list(first) == list(task.questions[:3])


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("{}/broken", "ZeroDivisionError: division by zero"),
        ("{}/ends", "cannot be computed for these answers: SystemExit: 0"),
        ("{}/ends_at_import", "ends_at_import: SystemExit: 0"),
        ("{}/nothing", "cannot be computed"),
        ("{}/number", "cannot be computed"),
        ("{}/objects", "which is no number, text or list"),
        ("{}/huge", "which is no number, text or list"),
        ("{}/numbers", "cannot be computed for these answers"),
        ("{}/missing", "no_such_package"),
        ("{}/judged", "compares predictions, sources"),
        ("{}/absent", "no such file or folder"),
        ("{}/empty", "FileNotFoundError|no such folder"),
        ("{}/text.txt", "text.txt: "),
        ("absent.py", "no such file or folder"),
        ("no_such_metric_1", "cannot be loaded from the Hub"),
        (",", "--metrics: expected a path or a name, got ','"),
        ("{}/exact,{}/exact", "exact: named twice"),
    ],
)
def test_metric_that_cannot_be_used_is_one_line(
    named, reason, metrics, chat_model, rows, refused, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--data", rows, "--metrics", named.replace("{}", str(metrics)), "--max-new-tokens", 2]
    line = refused("evaluate", chat_model, *words)
    assert re.search(reason, line), line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--metrics", "exact"], "--metrics: needs rows"),
        (["--data", "ROWS", "--metrics", "EXACT", "--stride", "4"], "--stride: only with"),
        (["--data", "nowhere.jsonl", "--metrics", "EXACT"], "--data: nowhere.jsonl"),
        (["--data", "TEXT", "--metrics", "EXACT"], "expected rows (.jsonl"),
    ],
)
def test_other_mistakes_are_one_line(
    words, reason, metrics, chat_model, rows, text_file, refused, tmp_path
):
    names = {"ROWS": rows, "EXACT": metrics / "exact", "TEXT": text_file}
    line = refused("evaluate", chat_model, *(names.get(word, word) for word in words))
    assert reason in line


def test_training_on_text_refuses_metrics(write_recipe, refused, metrics):
    line = refused("pretrain", write_recipe(), "--eval.metrics", f"[{metrics / 'exact'}]")
    assert "does not combine with data.format text: its texts have no answers" in line


def test_reward_function_scores_rows(capsys, chat_model, rows, tmp_path, refused):
    reward = tmp_path / "mine.py"
    reward.write_text("def score(prompt, completion, answer):\n    return 0.25\n")
    output = tmp_path / "out.json"
    words = ["--questions", rows, "--reward", f"{reward}:score", "--max-new-tokens", "4"]
    assert main(["evaluate", str(chat_model), *map(str, words), "--json", str(output)]) == 0
    assert "  reward         0.2500 ± 0.0000" in capsys.readouterr().out
    (found,) = json.loads(output.read_text())["answers"].values()
    assert found["reward"] == 0.25
    assert "--reward" in refused("evaluate", chat_model, "--questions", rows, "--reward", "no.py:f")
    reward.write_text("def score(prompt, completion, answer):\n    return 1 / 0\n")
    line = refused("evaluate", chat_model, *words)
    assert "ZeroDivisionError" in line
    assert line.rstrip().endswith("; correct it")
    assert "questions" in refused("evaluate", chat_model, "--reward", f"{reward}:score")


def test_measurement_of_the_library_equals_the_command(capsys, letter_model, tmp_path):
    import evaluate

    texts = ["abc fed hag bed?\n" * 20, "head ache cab beef?\n" * 20]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = tmp_path / "out.json"
    words = ["--data", str(file), "--stride", "8", "--json", str(output)]
    assert main(["evaluate", str(letter_model), *words]) == 0
    expected = json.loads(output.read_text())["text"]
    folder = Path(nanogpt_hf.__file__).parent / "evaluation" / "text_loss"
    module = evaluate.load(str(folder), keep_in_memory=True)
    found = module.compute(data=texts, model=str(letter_model), stride=8)
    for name in ("loss", "loss_standard_error", "perplexity", "bits_per_byte", "bytes", "tokens"):
        assert found[name] == expected[name], name
    with pytest.raises(UserError, match="at least two are needed"):
        module.compute(data=["a"], model=str(letter_model))
    with pytest.raises(UserError, match="positions"):
        module.compute(data=texts, model=str(letter_model), block_size=10**6)
    with pytest.raises(UserError, match="no_such_model"):
        module.compute(data=texts, model="no_such_model/")
