"""Resuming needs the text, tokenizer and seed of the run, in any folder; otherwise it stops with
one line.
"""

import json
import shutil

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture
def resume(tmp_path, write_recipe, forget_accelerate):
    """Train to step 4 on TEXT, call `change`, and resume to step 6; return the exit status."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def train(*arguments: str, steps: int) -> int:
        forget_accelerate()
        options = {
            "data__source": str(text),
            "data__dir": str(tmp_path / "data"),
            "data__tokenizer": "char",
        }
        recipe = write_recipe(**options, train__max_steps=steps, checkpoint__every=4, eval__every=4)
        return main(["pretrain", str(recipe), "--run-dir", str(tmp_path / "run"), *arguments])

    def change_and_resume(change, *arguments: str) -> int:
        assert train(steps=4) == 0
        change(text)
        return train("--resume", *arguments, steps=6)

    return change_and_resume


def prepare_again(content: str, tmp_path):
    def change(text) -> None:
        text.write_text(content)
        shutil.rmtree(tmp_path / "data")

    return change


@pytest.mark.parametrize(
    ("content", "difference"),
    [(TEXT.upper(), "data tokenizer_hash: "), (TEXT[::-1], "data revision: ")],
)
def test_resume_with_other_text_or_tokenizer_is_refused(
    resume, tmp_path, capsys, content, difference
):
    assert resume(prepare_again(content, tmp_path)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert difference in error
    state = json.loads((RunFolder(tmp_path / "run").newest_checkpoint() / "state.json").read_text())
    assert state["step"] == 4


def test_resume_with_another_seed_is_refused(resume, tmp_path, capsys):
    def change(_) -> None:
        run = RunFolder(tmp_path / "run")
        recipe = run.recipe.read_text()
        run.recipe.write_text(recipe.replace("seed: 1337", "seed: 7"))

    assert resume(change, "--train.seed", "7") == 2
    assert "train.seed: 1337 -> 7" in capsys.readouterr().err
