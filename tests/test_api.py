"""The Python API: the example of docs/training.md as it is written, and the public names."""

import re
from pathlib import Path

import numpy as np
import pytest

import nanogpt_hf
from nanogpt_hf.config.load import load_config
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
def test_tracker_of_the_example_prints_progress_and_an_evaluation(
    tmp_path, write_recipe, monkeypatch, capsys
):
    recipe = write_recipe(data__max_epochs=99, tracking__every=20)
    (_, example) = EXAMPLES
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
