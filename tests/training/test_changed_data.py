"""What a run has learned changes before it resumes: one line, whose every remedy works."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml

from assertions import weights
from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long
STEPS = 2
KNOBS = {
    "data": {"dir": "data", "tokenizer": "base", "block_size": 32, "validation_fraction": 0.2},
    "train": {"max_steps": STEPS, "tokens_per_step": 128, "micro_batch_size": 2},
    "eval": {"every": 2},
    "checkpoint": {"every": 1, "keep": 9},
    "optim": {"warmup_steps": 0},
}
SIZES = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}}
RL = {"rl": {"samples": 2, "max_new_tokens": 3, "eval_questions": 1, "eval_samples": 1}}
WORDS = "the cat sat on a mat\n"


def text(folder: Path, name: str, extra: str = "") -> None:
    lines = "".join(f"{number} {WORDS}" for number in range(60))
    (folder / name).write_text(lines + extra)


def rows(folder: Path, name: str, row: dict, extra: dict | None = None) -> None:
    every = [row] * 20 + [extra] * (extra is not None)
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in every))


def chat(answer: str) -> dict:
    question = {"role": "user", "content": "ab"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def pair(chosen: str) -> dict:
    return {"prompt": "ab", "chosen": chosen, "rejected": "xy"}


def token_files(folder: Path, name: str, extra: str = "") -> None:
    """A folder of what datatrove writes."""
    (folder / name).mkdir(exist_ok=True)
    encoded = build_tokenizer(str(folder / "base"), ()).encode_batch([WORDS] * 60 + [WORDS + extra])
    rows = [[*ids, 256] for ids in encoded]
    np.concatenate(rows).astype("<u2").tofile(folder / name / "0.ds")
    np.cumsum([len(row) for row in rows]).astype("<u8").tofile(folder / name / "0.ds.index")


def copy_of_base(folder: Path, name: str) -> None:
    shutil.copytree(folder / "spare", folder / name, dirs_exist_ok=True)


def swap_tokens(folder: Path, name: str) -> None:
    """Two tokens of a tokenizer change their ids."""
    path = folder / name / "tokenizer.json"
    tree = json.loads(path.read_text())
    ids = tree["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(tree))


class Kind(NamedTuple):
    """A kind of run: its command, its knobs, and what it learns, which `change` changes."""

    command: str
    knobs: dict
    source: str
    write: Callable[[Path], None]
    change: Callable[[Path], None]
    remedies: tuple[str, ...]


# Each phrase of the line that refuses a changed source stands for one of REMEDIES.
PREPARED = ("put that back", "move the new one away", "another run", "a branch")
IN_MEMORY = ("use the recipe, the data", "another run", "start again with --overwrite")
MIXED = [{"source": "text.txt", "weight": 2}, {"source": "more.txt", "weight": 1}]
KINDS = {
    "text": Kind(
        "pretrain",
        SIZES | {"data": {"source": "text.txt"}},
        "text.txt",
        lambda folder: text(folder, "text.txt"),
        lambda folder: text(folder, "text.txt", "a cat"),
        PREPARED,
    ),
    "mixture": Kind(
        "pretrain",
        SIZES | {"data": {"source": MIXED}},
        "more.txt",
        lambda folder: [text(folder, name) for name in ("text.txt", "more.txt")],
        lambda folder: text(folder, "more.txt", "a cat"),
        PREPARED,
    ),
    # The data of the other source was removed, so it is to be prepared again.
    "first of a mixture": Kind(
        "pretrain",
        SIZES | {"data": {"source": MIXED}},
        "text.txt",
        lambda folder: [text(folder, name) for name in ("text.txt", "more.txt")],
        lambda folder: [text(folder, "text.txt", "a cat"), shutil.rmtree(folder / "data" / "more")],
        PREPARED,
    ),
    "token files": Kind(
        "pretrain",
        SIZES | {"data": {"source": "tokens", "format": "datatrove"}},
        "tokens",
        lambda folder: token_files(folder, "tokens"),
        lambda folder: token_files(folder, "tokens", "a cat"),
        ("put that back", "another run", "a branch"),
    ),
    "conversations": Kind(
        "finetune",
        {"data": {"source": "chat.jsonl", "format": "chat"}, "finetune": {"model": "base"}},
        "chat.jsonl",
        lambda folder: rows(folder, "chat.jsonl", chat("c")),
        lambda folder: rows(folder, "chat.jsonl", chat("c"), chat("d")),
        PREPARED,
    ),
    "teacher": Kind(
        "pretrain",
        SIZES | {"data": {"source": "text.txt"}, "distill": {"teacher": "other"}},
        "other",
        lambda folder: [text(folder, "text.txt"), copy_of_base(folder, "other")],
        lambda folder: swap_tokens(folder, "other"),
        ("put back the teacher",),
    ),
    "start model": Kind(
        "finetune",
        {"data": {"source": "text.txt"}, "finetune": {"model": "base"}},
        "base",
        lambda folder: [text(folder, "text.txt"), copy_of_base(folder, "base")],
        lambda folder: swap_tokens(folder, "base"),
        ("put it back",),
    ),
    "pairs": Kind(
        "align",
        {"data": {"source": "p.jsonl"}, "finetune": {"model": "base"}, "align": {"loss": "dpo"}},
        "p.jsonl",
        lambda folder: rows(folder, "p.jsonl", pair("c")),
        lambda folder: rows(folder, "p.jsonl", pair("c"), pair("d")),
        IN_MEMORY,
    ),
    "questions": Kind(
        "rl",
        {"data": {"source": "q.jsonl"}, "finetune": {"model": "base"}, "rl": {"task": "regex"}},
        "q.jsonl",
        lambda folder: rows(folder, "q.jsonl", chat("c")),
        lambda folder: rows(folder, "q.jsonl", chat("c"), chat("d")),
        IN_MEMORY,
    ),
}


def merged(*trees: dict) -> dict:
    found: dict = {}
    for tree in trees:
        for section, knobs in tree.items():
            found.setdefault(section, {}).update(knobs)
    return found


class Begun:
    """A folder with a run of two steps."""

    def __init__(self, folder: Path, kind: Kind, call: Callable[..., int]):
        self.folder = folder
        self.kind = kind
        self.call = call

    def resume(self, *words: str) -> int:
        return self.call("resume", "run", "--train.max_steps", str(2 * STEPS), *words)

    def again(self, *words: str) -> int:
        return self.call(self.kind.command, "recipe.yaml", *words)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, save_chat_model, forget_accelerate):
    """A function to a copy of a run that has taken two steps, and its weights after two more."""
    kept: dict[str, tuple[Path, dict]] = {}

    def call(*words: str) -> int:
        forget_accelerate()
        return main([*words])

    def begin(name: str, place: Path, monkeypatch) -> tuple[Begun, dict]:
        kind = KINDS[name]
        if name not in kept:
            folder = tmp_path_factory.mktemp("begun") / "first"
            save_chat_model(folder / "spare", n_positions=32, n_layer=1, n_head=1, n_embd=16)
            copy_of_base(folder, "base")
            kind.write(folder)
            tree = merged(KNOBS, RL if kind.command == "rl" else {"eval": {"tokens": 64}})
            (folder / "recipe.yaml").write_text(yaml.safe_dump(merged(tree, kind.knobs)))
            monkeypatch.chdir(folder)
            first = Begun(folder, kind, call)
            assert first.again("--run-dir", "run") == 0
            shutil.copytree(folder, folder.with_name("kept"))
            assert first.resume() == 0
            kept[name] = folder.with_name("kept"), weights(RunFolder(folder / "run"))
        shutil.copytree(kept[name][0], place)
        monkeypatch.chdir(place)
        return Begun(place, kind, call), kept[name][1]

    return begin


def put_back(run: Begun) -> int:
    run.kind.write(run.folder)
    return run.resume()


def move_away(run: Begun) -> int:
    (run.folder / run.kind.source).rename(run.folder / "moved")
    return run.resume()


def another_run(run: Begun) -> int:
    return run.again("--run-dir", "other", "--data.dir", "other_data")


def a_branch(run: Begun) -> int:
    words = ["--train.max_steps", str(STEPS), "--data.dir", "other_data"]
    if run.call("branch", "run", "--at", "1", "--run-dir", "other", *words):
        return 1
    return run.call("resume", "other")


def overwrite(run: Begun) -> int:
    return run.again("--run-dir", "run", "--overwrite")


# phrase of the line -> what it advises, and whether the run then ends as an undisturbed one
REMEDIES = {
    "put that back": (put_back, True),
    "move the new one away": (move_away, True),
    "another run": (another_run, False),
    "a branch": (a_branch, False),
    "put back the teacher": (put_back, True),
    "put it back": (put_back, True),
    "use the recipe, the data": (put_back, True),
    "start again with --overwrite": (overwrite, False),
}


@pytest.mark.one_row_per("name", "remedy")
@pytest.mark.parametrize(
    ("name", "remedy"), [(name, remedy) for name, kind in KINDS.items() for remedy in kind.remedies]
)
def test_every_remedy_for_a_changed_source_works(
    name, remedy, begun, tmp_path, monkeypatch, capsys
):
    run, expected = begun(name, tmp_path / "work", monkeypatch)
    run.kind.change(run.folder)
    capsys.readouterr()
    lines = []
    for words in (["--dry-run"], []):
        assert run.resume(*words) == 2
        lines.append(capsys.readouterr().err.splitlines()[-1])
    assert lines[0] == lines[1]
    assert remedy in lines[0], lines[0]
    # It would end the run.
    assert "remove" not in lines[0].replace("if no run is to resume with it, remove", ""), lines[0]
    apply, is_same = REMEDIES[remedy]
    assert apply(run) == 0, capsys.readouterr().err
    if is_same:
        found = weights(RunFolder(run.folder / "run"))
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def other_bytes(path: Path) -> None:
    path.write_bytes(b"damaged")


DAMAGES = {
    "manifest": lambda data: other_bytes(data / "manifest.json"),
    "list of shards": lambda data: (data / "train" / "state.json").unlink(),
    "shard": lambda data: other_bytes(next((data / "train").glob("*.arrow"))),
    "split": lambda data: shutil.copytree(data / "validation", data / "train", dirs_exist_ok=True),
    "tokenizer": lambda data: swap_tokens(data, "tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_is_made_again_if_its_folder_is_removed(
    damage, begun, tmp_path, monkeypatch, capsys
):
    run, expected = begun("text", tmp_path / "work", monkeypatch)
    DAMAGES[damage](run.folder / "data")
    capsys.readouterr()
    assert run.resume() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"remove (the folder|data) to prepare it again", line), line
    shutil.rmtree("data")
    assert run.resume() == 0
    found = weights(RunFolder("run"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("remedy", ["choose another --data.dir", "remove the folder"])
def test_prepared_data_that_the_run_has_not_learned_is_made_again(
    remedy, begun, tmp_path, monkeypatch, capsys
):
    """Data was prepared from a changed text, which was then put back."""
    run, expected = begun("text", tmp_path / "work", monkeypatch)
    run.kind.change(run.folder)
    shutil.rmtree("data")
    assert run.call("prepare", "recipe.yaml") == 0
    capsys.readouterr()
    assert run.resume() == 2
    assert "use the recipe, the data" in capsys.readouterr().err.splitlines()[-1]
    run.kind.write(run.folder)
    assert run.resume() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert remedy in line
    assert "put that back" not in line
    words = ["--data.dir", "other"] if remedy.startswith("choose") else []
    if not words:
        shutil.rmtree("data")
    assert run.resume(*words) == 0
    found = weights(RunFolder("run"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("words", "status"),
    [(["verify", "run"], 1), (["verify", "run", "--steps", "1:2"], 1), (["inspect", "run"], 2)],
)
def test_a_repeated_run_names_the_remedy_of_a_run(
    words, status, begun, tmp_path, monkeypatch, capsys
):
    run, _ = begun("text", tmp_path / "work", monkeypatch)
    words = [*words, *(["--step", "1"] if words[0] == "inspect" else [])]
    run.kind.change(run.folder)
    capsys.readouterr()
    assert run.call(*words) == status
    out, err = capsys.readouterr()
    assert "text.txt has changed since it was prepared; this run has learned the old one" in (
        out + err
    )
    run.kind.write(run.folder)
    assert run.call(*words) == 0


@pytest.mark.parametrize(
    ("words", "reason", "is_saved"),
    [
        ("verify run", "other data: data revision", True),
        ("verify run --steps 0:2", "holds other data than run has learned: revision", True),
        ("inspect run --step 1", "holds other data than run has learned: revision", True),
        ("inspect run --step 1", "holds other data than run has learned: revision", False),
        ("inspect run --find a", "other data: data revision", True),
    ],
)
def test_a_run_is_not_repeated_on_data_that_it_has_not_read(
    words, reason, is_saved, begun, tmp_path, monkeypatch, capsys
):
    words = words.split()
    run, _ = begun("text", tmp_path / "work", monkeypatch)
    if not is_saved:
        # A kill before the first checkpoint leaves the record of the start.
        shutil.rmtree("run/checkpoints")
    Path("data").rename("kept")
    assert run.call(*words) == 2
    assert "data: no prepared data here" in capsys.readouterr().err
    assert not Path("data").exists()
    # Other text in the same place, which is prepared by itself.
    run.kind.change(run.folder)
    assert run.call("prepare", "run/recipe.yaml") == 0
    capsys.readouterr()
    assert run.call(*words) == (1 if words[0] == "verify" else 2)
    out, err = capsys.readouterr()
    assert reason in out + err
    run.kind.write(run.folder)
    shutil.rmtree("data")
    Path("kept").rename("data")
    assert run.call(*words) == 0


def test_a_run_that_starts_may_have_the_changed_text(begun, tmp_path, monkeypatch, capsys):
    run, _ = begun("text", tmp_path / "work", monkeypatch)
    run.kind.change(run.folder)
    for words in (["--run-dir", "other"], ["--run-dir", "other", "--auto-resume"]):
        capsys.readouterr()
        assert run.again(*words) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "choose another --data.dir, or, if no run is to resume with it, remove" in line


@pytest.mark.slow
def test_two_processes_name_the_remedy_of_a_run(begun, tmp_path, monkeypatch, start_warm):
    run, _ = begun("text", tmp_path / "work", monkeypatch)
    run.kind.change(run.folder)

    def refused(status: int, output: str) -> None:
        assert status == 2, output
        (line,) = [line for line in output.splitlines() if "has changed since it was" in line]
        assert "this run has learned the old one: put that back" in line

    words = ["pretrain", "recipe.yaml", "--run-dir", "run"]
    machine = {"machine_options": ["--num_processes=2"], "ends_with": refused}
    # In the folder of the run, whose paths are relative.
    with start_warm() as launch:
        for flag in ("--resume", "--auto-resume"):
            launch("cpu_ddp", *words, flag, **machine)


@pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "lost"])
def test_template_of_the_start_is_no_part_of_a_run_on_prepared_conversations(
    is_lost, begun, tmp_path, monkeypatch
):
    run, expected = begun("conversations", tmp_path / "work", monkeypatch)
    path = run.folder / "base" / "chat_template.jinja"
    before = path.read_text()
    path.unlink() if is_lost else path.write_text(f"{before} ")
    assert run.resume() == 0
    found = weights(RunFolder("run"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert (RunFolder("run").final / path.name).read_text() == before


def test_resume_in_another_precision_is_one_line(begun, tmp_path, monkeypatch, capsys):
    run, _ = begun("text", tmp_path / "work", monkeypatch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    capsys.readouterr()
    assert run.resume() == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "precision" in line]
    assert len(lines) == 1
    assert "precision fp32 -> bf16: losses will agree to rounding only" in lines[0]
