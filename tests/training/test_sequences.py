"""`inspect`: the batch of a step with places, text and losses; the steps that saw a text."""

import json

import pytest

from arguments import argv
from assertions import column, file_contents
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> RunFolder:
    return train(tmp_path_factory.mktemp("seen") / "run", train__max_steps=6, checkpoint__keep=9)


@pytest.fixture
def inspect(capsys, forget_accelerate, tmp_path):
    """The table of `inspect`, and the tree that it writes."""

    def inspect(run: RunFolder, options: str, *values: object) -> tuple[list[str], dict]:
        forget_accelerate()
        capsys.readouterr()
        file = tmp_path / "seen.json"
        assert main(argv(f"inspect {{}} {options} --json {{}}", run.path, *values, file)) == 0
        return capsys.readouterr().out.splitlines(), json.loads(file.read_text())

    return inspect


@pytest.mark.parametrize(("step", "before"), [(1, 0), (3, 2), (5, 4)])
def test_losses_of_a_step_are_those_that_the_run_logged(run, inspect, step, before):
    files = file_contents(run.path)
    lines, tree = inspect(run, f"--step {step}")
    losses = [sequence["loss"] for sequence in tree["sequences"]]
    assert (len(losses), tree["weights_of_step"]) == (8, before)
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) / 8 == pytest.approx(column(run, "train/loss")[step], abs=1e-5)
    assert len(lines) == 1 + 8
    assert lines[1].startswith(f"{losses[0]:.4f}")
    assert file_contents(run.path) == files


def test_text_is_that_of_the_place_and_is_found(run, inspect, text_file):
    _, tree = inspect(run, "--step 4")
    text = text_file.read_text()
    for sequence in tree["sequences"]:
        first, last = sequence["tokens"]
        assert (last - first, sequence["documents"]) == (16, [0])
        assert sequence["text"] == text[first : last + 1]
    lines, found = inspect(run, "--find {}", tree["sequences"][0]["text"])
    assert 4 in found["steps"]
    assert lines == [f"{len(found['steps'])} of 6 steps saw it: {found['steps']}"]
    assert inspect(run, "--find {}", "no such text")[1]["steps"] == []


def test_conversations_of_a_mixture_are_named(
    train, tmp_path, inspect, chat_file, text_file, byte_tokenizer
):
    sources = [
        {"source": str(text_file), "weight": 1},
        {"source": str(chat_file), "weight": 3, "format": "chat"},
    ]
    knobs = {"data__source": sources, "data__tokenizer": str(byte_tokenizer)}
    knobs |= {"data__dir": str(tmp_path / "data"), "data__block_size": 128}
    knobs |= {"model__n_positions": 128, "train__tokens_per_step": 1024, "train__max_steps": 2}
    _, tree = inspect(train(tmp_path / "run", **knobs), "--step 2")
    kinds = {sequence["source"]: sequence for sequence in tree["sequences"]}
    text, chat = kinds[text_file.stem], kinds[chat_file.stem]
    assert "tokens" in text
    assert chat.keys() == {"loss", "source", "documents", "text"}
    assert chat["text"].startswith("### User:\n")
    assert len(chat["documents"]) >= 1
