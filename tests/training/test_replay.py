"""`branch`: a run from a checkpoint of another, with other knobs. `inspect`: the batch of a step,
with places, text and losses; the steps that saw a text.
"""

import json

import pytest

from arguments import argv
from assertions import column, file_contents, numbers
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import read_starts
from nanogpt_hf.runs.recipe import read_recipe

pytestmark = pytest.mark.long


@pytest.fixture
def branch(honest, tmp_path, forget_accelerate):
    """Make a branch with knobs, and train it to its end; return its folder."""

    def branch(*knobs: object, step: int = 4) -> RunFolder:
        before = file_contents(honest.path)
        new = RunFolder(tmp_path / "new")
        words = argv("branch {} --at {} --run-dir {}", honest.path, step, new.path)
        assert main([*words, *map(str, knobs)]) == 0
        assert file_contents(honest.path) == before
        forget_accelerate()
        assert main(argv("pretrain {} --run-dir {} --resume", new.recipe, new.path)) == 0
        return new

    return branch


def test_branch_without_changes_is_the_same_run(honest, branch):
    new = branch()
    for run in (honest, new):
        (run.final / "README.md").unlink()  # the card states the duration
    assert file_contents(new.final) == file_contents(honest.final)
    assert [e for e in numbers(new) if e["step"] != 4] == [
        e for e in numbers(honest) if e["step"] != 4
    ]
    assert [e["step"] for e in numbers(new)] == [e["step"] for e in numbers(honest)]
    (copied, _) = read_starts(new)
    assert (copied["step"], copied["branch_of"]) == (4, str(honest.path))
    assert str(honest.path) in new.report.read_text()


def test_branch_has_other_text_rates_and_steps(honest, branch, text_file, tmp_path):
    (tmp_path / "other.txt").write_text(text_file.read_text()[::-1])
    tokenizer = honest.path.parent / "data" / "tokenizer"
    line = "--data.source {} --data.dir {} --data.tokenizer {} --checkpoint.keep 2"
    line += " --optim.schedule linear --train.max_steps 6"
    new = branch(*argv(line, tmp_path / "other.txt", tmp_path / "data", tokenizer))
    events = numbers(new)
    assert max(event["step"] for event in events) == 6
    old = {e["step"]: e["train/loss"] for e in numbers(honest) if "train/loss" in e}
    for event in events:
        if "train/loss" in event:
            assert (event["train/loss"] == old[event["step"]]) == (event["step"] <= 4)
    optimizers = [read_checkpoint(run.checkpoint(6)).optimizer_state for run in (honest, new)]
    assert optimizers[0].layout == optimizers[1].layout
    assert main(argv("verify {}", new.path)) == 0
    assert main(argv("verify {} --steps 0:6", new.path)) == 2
    assert main(argv("inspect {} --step 5", new.path)) == 0
    assert main(argv("inspect {} --step 4", new.path)) == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--at 4 --run-dir NEW --model.n_layer 3", "model.n_layer: 2 -> 3"),
        ("--at 4 --run-dir NEW --optim.name muon", "optim.name: adamw -> muon"),
        ("--at 3 --run-dir NEW", "--at 3: STEM has checkpoints of the steps 2, 4, 6, 8"),
        ("--at 8 --run-dir NEW", "--train.max_steps 8: is not past step 8; give more steps"),
        ("--at 4 --run-dir STEM/new", "is inside"),
        ("--at 4 --run-dir NEW --data.dir NEW/data", "one is inside the other"),
    ],
)
def test_mistake_is_one_line(honest, refused, tmp_path, words, part):
    words = words.split()
    for name, path in (("STEM", honest.path), ("NEW", tmp_path / "new")):
        words = [word.replace(name, str(path)) for word in words]
        part = part.replace(name, str(path))
    assert part in refused("branch", honest.path, *words)
    assert not (tmp_path / "new").exists()


def test_text_of_another_tokenizer_is_refused(honest, tmp_path, capsys):
    line = "branch {} --at 4 --run-dir {} --data.dir {} --data.tokenizer bpe --data.vocab_size 280"
    assert main(argv(line, honest.path, tmp_path / "new", tmp_path / "data")) == 2
    assert "data: has another tokenizer than " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


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
    text = kinds[text_file.stem]
    chat = kinds[chat_file.stem]
    assert "tokens" in text
    assert chat.keys() == {"loss", "source", "documents", "text"}
    assert chat["text"].startswith("### User:\n")
    assert len(chat["documents"]) >= 1


def test_branch_on_a_full_disk_is_one_line_and_leaves_nothing(honest, volume, capsys):
    (volume / "filler").write_bytes(bytes(4 * 2**20 - 40_000))
    words = argv("branch {} --at 4 --run-dir {}", honest.path, volume / "new")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{volume}/")
    assert line.endswith("No space left on device")
    assert [path.name for path in volume.iterdir()] == ["filler"]


def test_branch_of_a_fine_tuned_run(tiny_base, text_file, tmp_path, capsys):
    """Fine-tuning gives knobs that nothing reads other defaults; a branch does not state them."""
    words = "finetune --from {} --data {} --run-dir {} --data.dir {} --train.max_steps 2"
    places = tiny_base, text_file, tmp_path / "run", tmp_path / "data"
    more = "--train.tokens_per_step 64 --train.micro_batch_size 1 --model.n_positions 32"
    more += " --checkpoint.every 1 --eval.every 2 --eval.samples []"
    assert main(argv(f"{words} {more}", *places)) == 0
    line = "branch {} --at 1 --run-dir {} --train.max_steps 4"
    assert main(argv(line, tmp_path / "run", tmp_path / "new")) == 0, capsys.readouterr().err
    assert read_recipe(RunFolder(tmp_path / "new")).optim.muon_learning_rate == 0.002
