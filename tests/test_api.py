"""The Python API: the example of docs/training.md as it is written, and the public names."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

import nanogpt_hf
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import knob_values
from nanogpt_hf.errors import ConfigError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")

EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_python_example_trains_resumes_samples_and_pushes(
    hub, tmp_path, write_recipe, monkeypatch, capsys
):
    example = EXAMPLES[0]
    monkeypatch.chdir(tmp_path)
    # smaller than the quickstart's
    recipe = write_recipe(tracking__every=10, model__n_positions=64)
    example = example.replace("user/python", "tester/python").replace(
        '"quickstart"', repr(str(recipe))
    )
    exec(compile(example, "training.md", "exec"), {})
    events = read_metrics(RunFolder("runs/python"))
    assert [event["step"] for event in events if "train/loss" in event] == list(range(10, 61, 10))
    assert (tmp_path / "runs/python/checkpoints/step_00000060").is_dir()
    *_, url = capsys.readouterr().out.splitlines()
    assert url.startswith(f"{hub.url}/tester/python/commit/")
    files = hub.repositories["tester/python"].files()
    assert {"model.safetensors", "README.md", "recipe.yaml", "metrics.jsonl"} <= set(files)
    assert hub.repositories["tester/python"].private


@pytest.mark.long
def test_own_model_optimizer_and_loss_of_the_example_train_without_a_change_of_the_package(
    tmp_path, write_recipe
):
    recipe = write_recipe(
        model__n_kv_head=1,
        tracking__every=1,
        checkpoint__every=2,
        train__stages=[{"at": 3, "optim.weight_decay": 0.2}],
        train__max_steps=4,
    )
    tree = yaml.safe_load(recipe.read_text())
    for knob in ("bias", "dropout", "activation_function"):
        tree["model"].pop(knob, None)
    recipe.write_text(yaml.safe_dump(tree))
    example = EXAMPLES[2].replace('"quickstart"', repr(str(recipe)))
    example = example.replace('"train.max_steps": 40, "eval.every": 20', "")
    # In a process of its own, since the row has to be there before the schema is imported.
    ended = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    events = read_metrics(RunFolder(tmp_path / "runs/own"))
    # In the stage, too, for which the run is built again.
    assert [e["step"] for e in events if "train/own" in e] == [1, 2, 3, 4]
    best = json.loads((tmp_path / "runs/own/best/config.json").read_text())
    assert (best["model_type"], best["architectures"]) == ("my_llama", ["MyForCausalLM"])


@pytest.mark.long
def test_tracker_of_the_example_prints_progress_and_an_evaluation(
    tmp_path, write_recipe, monkeypatch, capsys
):
    recipe = write_recipe(data__max_epochs=99, tracking__every=20)
    (_, example, _) = EXAMPLES
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example.replace('"quickstart"', repr(str(recipe))), "training.md", "exec"), names)
    events = read_metrics(RunFolder("runs/progress"))
    losses = {e["step"]: e["train/loss"] for e in events if "train/loss" in e}
    lines = capsys.readouterr().out.splitlines()
    printed = [f"step {step}: loss {loss:.3f}" for step, loss in losses.items()]
    assert [line for line in lines if "loss" in line] == printed
    shares = [line for line in lines if line.endswith("of the next tokens are right")]
    assert [line.split()[1] for line in shares] == ["0:", "20:", "40:"]
    # Of the last weights, as computed from what was saved.
    run = names["progress"].run
    model = nanogpt_hf.GPTForCausalLM.from_pretrained(run.folder.final)
    batch = run.data.validation.batch(np.arange(1))
    right = model(batch["input_ids"]).logits.argmax(-1) == batch["shift_labels"]
    assert shares[-1] == f"step 40: {right.float().mean():.1%} of the next tokens are right"


def test_recipe_of_the_example_to_train_a_model_further_is_the_commands(
    tiny_base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"((?:^    .*finetune_config.*\n){2})", PAGE, re.MULTILINE)
    names = {}
    exec(textwrap.dedent(block).replace('"gpt2"', repr(str(tiny_base))), names)
    assert names["config"].name == "tiny-gpt2-my"
    assert main(["finetune", "--from", str(tiny_base), "--data", "my.txt", "--dry-run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out.partition("\n\n")[0])
    values = knob_values(names["config"])
    shown = {f"{s}.{name}": value for s in resolved for name, value in resolved[s].items()}
    assert shown == {key: values[key] for key in shown}
    assert len(shown) > 50


def test_load_config_takes_plain_values():
    values = {
        "optim.learning_rate": 3e-3,
        "tracking.layers": True,
        "eval.samples": ["a, b"],
        "eval.patience": None,
    }
    config = load_config("quickstart", values)
    assert (config.optim.learning_rate, config.tracking.layers) == (3e-3, True)
    assert (list(config.eval.samples), config.eval.patience) == (["a, b"], None)
    with pytest.raises(ConfigError, match=r"train\.max_steps: expected an integer, got '1.5'"):
        load_config("quickstart", {"train.max_steps": 1.5})


def test_all_public_names_are_lazy_and_importable():
    for name in nanogpt_hf.__all__:
        assert getattr(nanogpt_hf, name) is not None
    assert set(nanogpt_hf.__all__) == {*nanogpt_hf._MODULES, "__version__"}
    table = re.findall(
        r"^\| (`.*?) \|", PAGE.partition("## From Python")[2].partition("## What")[0], re.MULTILINE
    )
    assert {name for row in table for name in re.findall(r"`(\w+)", row)} == set(
        nanogpt_hf._MODULES
    ) - {"Config"}
