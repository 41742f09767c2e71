"""SIGKILL before each change to the files of a run folder: no checkpoint and no model is lost."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import operations
from assertions import load_newest
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer, set_learning_rate
from nanogpt_hf.place import replaced_folder
from nanogpt_hf.runs.files import write_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import MeasuredLoss, TrainState

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}
CONFIG = GPTConfig(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2, **NO_SPECIAL_TOKENS)
LAST = 8  # its newest step


def new_training():
    torch.manual_seed(0)
    model = GPTForCausalLM(CONFIG)
    accelerator = Accelerator()
    return accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))


def train(parts, first: int, last: int) -> None:
    """Train the steps after `first` up to `last`, each on other tokens."""
    accelerator, model, optimizer = parts
    # Each step of a run sets the rate.
    set_learning_rate(optimizer.optimizer, 1e-3)
    model.eval()
    for step in range(first, last):
        tokens = (torch.arange(8)[None] * (step + 1) + step) % 4
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def weights(parts) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parts[1].parameters()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forget_accelerate, save_checkpoint):
    """A run folder with checkpoints of steps 2, 4, 6 and 8, and the weights of step 8."""
    run = RunFolder(tmp_path_factory.mktemp("trained") / "run")
    parts = new_training()
    run.start("name: before\n")
    for step in range(2, LAST + 1, 2):
        train(parts, step - 2, step)
        save_checkpoint(*parts, TrainState(step=step, last_finite_step=step), run, keep=9)
    yield run, weights(parts)
    forget_accelerate()


def build_folder(run: RunFolder, source: RunFolder, steps: tuple[int, ...], condition: str) -> None:
    """Build the run folder with checkpoints of `steps`; the newest may be damaged or half
    replaced.
    """
    shutil.rmtree(run.path, ignore_errors=True)
    run.start("name: before\n")
    for step in steps:
        shutil.copytree(source.checkpoint(step), run.checkpoint(step))
    newest = run.checkpoint(steps[-1])
    if condition == "damaged":
        (newest / "optimizer.safetensors").write_bytes(b"")
    elif condition == "half replaced":  # between its two renames
        shutil.copytree(newest, newest.with_name(f".{newest.name}.partial"))
        newest.rename(newest.with_name(f".{newest.name}.old"))


def count_sound_checkpoints(run: RunFolder, damaged: int = 0) -> int:
    """Lock the folder and count its sound checkpoints; at most `damaged` others may be left."""
    run.lock()
    assert run.check(resume=True, overwrite=False)
    sound = 0
    for folder in run.checkpoint_folders():
        with contextlib.suppress(RunFolderError):
            read_checkpoint(folder)
            sound += 1
    run.unlock()
    assert not [
        path.name for path in run.checkpoints.iterdir() if path.name.endswith((".partial", ".old"))
    ]
    assert len(run.checkpoint_folders()) - sound <= damaged
    return sound


def each_kill(folder: Path, prepare: Callable, action: Callable, least: int) -> Iterator:
    """Kill `action` at each of its changes below `folder`, which `prepare` fills each time.

    Yield the change and whether `action` was killed. There are more than `least` changes.
    """
    was_killed = True
    point = 0
    while was_killed:
        point += 1
        prepare()
        was_killed = operations.killed(folder, point, action)
        yield point, was_killed
    assert point > least


@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("steps", "saved", "keep", "condition", "min_sound"),
    [
        ((2, 4), 6, 2, "", 2),
        # the new one and the newest of before
        ((2, 4, 6), 8, 1, "", 2),
        ((4,), 4, 1, "", 1),
        ((2, 4), 4, 2, "damaged", 1),
        ((4,), 4, 1, "half replaced", 1),
        ((2, 4), 6, 2, "half replaced", 2),
    ],
)
def test_killed_save_loses_no_checkpoint(
    tmp_path, trained, steps, saved, keep, condition, min_sound, save_checkpoint
):
    source, expected = trained
    run = RunFolder(tmp_path / "run")
    parts = new_training()
    load = RunFolder(tmp_path / "load")
    build_folder(load, source, (saved,), "")
    state = load_newest(load, *parts)
    # A resume leaves the state so.
    state.evaluation = MeasuredLoss(1.0, 7, 1.5)
    state.evaluated_step = saved

    def save() -> None:
        run = RunFolder(tmp_path / "run")  # a lock is not inherited by a fork
        run.lock()
        save_checkpoint(*parts, state, run, keep)

    def prepare() -> None:
        build_folder(run, source, steps, condition)

    for point, _ in each_kill(tmp_path, prepare, save, 12):
        assert count_sound_checkpoints(run, damaged=condition == "damaged") >= min_sound, (
            f"killed at {point}"
        )
        resumed = new_training()
        train(resumed, load_newest(run, *resumed).step, LAST)
        assert all(map(torch.equal, weights(resumed), expected)), f"killed at {point}"
    assert load_newest(run, *resumed).evaluated_step == saved


@pytest.mark.one_row_per
@pytest.mark.parametrize("links", [False, True])
def test_killed_model_replacement_leaves_old_or_new(tmp_path, links):
    tokenizer = char_tokenizer(list("abcd")).hf
    run = RunFolder(tmp_path / "run")

    def write(seed: int) -> None:
        run = RunFolder(tmp_path / "run")  # a lock is not inherited by a fork
        run.lock()
        torch.manual_seed(seed)
        weights = dict(GPTForCausalLM(CONFIG).named_parameters())
        with replaced_folder(run.best.resolve()) as partial:
            write_model_folder(partial, CONFIG, weights, tokenizer, f"card {seed}")
        run.unlock()

    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in run.best.iterdir()}

    run.start("name: before\n")
    if links:
        (tmp_path / "larger" / "best").mkdir(parents=True)
        run.best.symlink_to(tmp_path / "larger" / "best")
    versions = []
    for seed in range(2):
        write(seed)
        versions.append(content())

    def restore() -> None:
        if content() == versions[1]:
            write(0)

    for point, was_killed in each_kill(tmp_path, restore, lambda: write(1), 15):
        run.lock()
        assert run.check(resume=False, overwrite=True) is False
        run.unlock()
        assert content() == versions[not was_killed] or content() == versions[1], (
            f"killed at {point}"
        )
        assert not list(tmp_path.rglob(".best*"))
        assert run.best.is_symlink() == links


def test_killed_start_never_mixes_two_runs(tmp_path, trained):
    source, _ = trained
    run = RunFolder(tmp_path / "run")

    def start() -> None:
        run = RunFolder(tmp_path / "run")
        run.lock()
        run.start("name: after\n")

    def prepare() -> None:
        build_folder(run, source, (2, 4), "")
        run.best.mkdir()
        (run.best / "config.json").write_text("{}")
        run.metrics.write_text('{"step": 4}\n')

    outcomes = set()
    for point, _ in each_kill(tmp_path, prepare, start, 12):
        run.lock()
        resumes = run.check(resume=False, overwrite=False, auto_resume=True)
        run.unlock()
        recipe = run.recipe.read_text()
        assert recipe == "name: before\n" or (recipe == "name: after\n" and not resumes), (
            f"killed at {point}"
        )
        if resumes:
            count_sound_checkpoints(run)
        outcomes.add(resumes)
    assert outcomes == {True, False}
    assert recipe == "name: after\n"
    assert not run.best.exists()


@pytest.mark.one_row_per
@pytest.mark.parametrize("has_recipe", [True, False])
def test_killed_recipe_update_leaves_old_or_new(tmp_path, has_recipe):
    run = RunFolder(tmp_path / "run")

    def write() -> None:
        run = RunFolder(tmp_path / "run")
        run.lock()
        write_whole(run.recipe, "name: after\n") if has_recipe else run.start("name: after\n")

    def prepare() -> None:
        shutil.rmtree(run.path, ignore_errors=True)
        if has_recipe:
            run.start("name: before\n")

    for point, _ in each_kill(tmp_path, prepare, write, 4):
        run.lock()
        assert run.check(resume=False, overwrite=False, auto_resume=True) is False
        run.unlock()
        allowed = {"name: after\n"} | ({"name: before\n"} if has_recipe else set())
        assert not run.recipe.exists() or run.recipe.read_text() in allowed, f"killed at {point}"
    assert run.recipe.read_text() == "name: after\n"


def test_every_file_change_is_counted(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("b")

    def change() -> None:
        Path(tmp_path / "c").write_text("c")  # 1 before it, 2 when the file is empty
        Path(tmp_path / "c").rename(tmp_path / "d")  # 3
        shutil.rmtree(tmp_path / "a")  # 4 the file, 5 the folder

    states = []
    for point in range(1, 7):
        was_killed = operations.killed(tmp_path, point, change)
        states.append(
            sorted(
                (path.name, path.read_text() if path.is_file() else "")
                for path in tmp_path.rglob("*")
            )
        )
        assert was_killed == (point < 6)
    before = [("a", ""), ("b", "b")]
    assert states[:3] == [before, [*before, ("c", "")], [*before, ("c", "c")]]
    assert states[3:] == [[*before, ("d", "c")], [("a", ""), ("d", "c")], [("d", "c")]]
