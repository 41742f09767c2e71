"""Stages of a run: other knobs from a step on, and a resume at any step."""

import os
import shutil
import signal

import pytest

from arguments import argv
from assertions import at_step, column, file_contents, numbers
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.errors import RunFolderError, Stopped
from nanogpt_hf.optim.optimizer import learning_rate_at
from nanogpt_hf.runs.folder import RunFolder, step_of

pytestmark = pytest.mark.long
STAGES = [
    {"at": 3, "data.block_size": 8, "optim.max_grad_norm": 0.1},
    {"at": 5, "train.tokens_per_step": 256, "optim.schedule": "linear", "optim.weight_decay": 100},
]
KNOBS = {
    "model__dropout": 0.1,
    "train__stages": STAGES,
    "train__max_steps": 8,
    "checkpoint__keep": 9,
    "optim__warmup_steps": 1,
}


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory) -> RunFolder:
    return train(tmp_path_factory.mktemp("stages") / "run", **KNOBS)


@pytest.fixture
def knobs() -> dict:
    return KNOBS


def tensors(run: RunFolder) -> dict[str, bytes]:
    """All checkpoints and models, as they are on the disk."""
    files = file_contents(run.path)
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def test_each_step_has_the_knobs_of_its_stage(undisturbed):
    config = load_config(undisturbed.recipe)
    assert config.train.stages == STAGES
    rates = [learning_rate_at(step, config.optim, 8) for step in range(5)]
    late = load_config(undisturbed.recipe, {"optim.schedule": "linear"}).optim
    rates += [learning_rate_at(step, late, 8) for step in range(5, 8)]
    assert list(column(undisturbed, "train/learning_rate").values()) == rates
    tokens = [event["tokens"] for event in numbers(undisturbed) if "train/loss" in event]
    assert tokens == [128, 256, 384, 512, 640, 896, 1152, 1408]
    assert list(column(undisturbed, "val/loss")) == [0, 3, 6, 8]
    clipped = column(undisturbed, "train/clipped_share")
    assert [clipped[step] for step in (3, 4)] == [0, 1]
    saved = [step_of(folder) for folder in undisturbed.checkpoint_folders()]
    assert saved == [2, 3, 4, 5, 6, 8]
    head = [read_checkpoint(undisturbed.checkpoint(step)).weights for step in (4, 5, 6)]
    before, border, after = (weights["transformer.wpe.weight"].norm() for weights in head)
    assert border / before > 0.9 > 0.7 > after / border
    assert '"stages":[[3,"stage 2"],[5,"stage 3"]]' in undisturbed.report.read_text()


@pytest.mark.parametrize(
    "step", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5, 6))]
)
def test_stopped_and_resumed_run_ends_with_the_same_bytes(undisturbed, start, monkeypatch, step):
    with monkeypatch.context() as patch:
        at_step(patch, step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match=f"stopped at step {step}, saved"):
            start()
    run = start(resume=True)
    ours = tensors(run)
    theirs = tensors(undisturbed)
    extra = f"checkpoints/step_{step:08d}/"  # where it stopped
    assert {name for name in ours.keys() - theirs.keys() if not name.startswith(extra)} == set()
    assert {name: ours[name] for name in theirs} == theirs
    assert numbers(run) == numbers(undisturbed)


def test_other_stages_are_refused_at_a_resume(undisturbed, start, tmp_path):
    run = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "run"))
    before = file_contents(run.path)
    for stages in (STAGES[:1], None, [STAGES[0], STAGES[1] | {"at": 6}]):
        with pytest.raises(RunFolderError, match=r"the recipe has changed: train\.stages: .* -> "):
            start(resume=True, train__stages=stages)
    after = file_contents(run.path)
    assert {name: after[name] for name in before} == before


def test_text_too_short_for_a_later_block_is_refused_before_the_start(pretrain, tmp_path):
    (tmp_path / "few.txt").write_text("to be or not to be, that is")
    knobs = {"data__block_size": 8, "train__stages": [{"at": 3, "data.block_size": 16}]}
    data = {"data__source": str(tmp_path / "few.txt"), "data__validation_fraction": 0.5}
    ended = pretrain(**knobs, **data)
    assert (ended.status, ended.run.path.exists()) == (2, False)
    assert ended.line.startswith("train.stages: at 3: data.block_size: ")


def test_repeated_inspected_and_branched(undisturbed, tmp_path, capsys, forget_accelerate):
    run = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "run"))

    def out(line: str, *values: object) -> list[str]:
        forget_accelerate()
        capsys.readouterr()
        assert main(argv(line, run.path, *values)) == 0
        return capsys.readouterr().out.splitlines()

    assert out("verify {} --steps 0:8")[-1] == "steps 0 to 8: equal"
    shutil.rmtree(run.checkpoint(5))
    assert len(out("inspect {} --step 6")[1:]) == 256 // 8
    assert len(out("inspect {} --step 4")[1:]) == 128 // 8
    new = RunFolder(tmp_path / "new")
    out("branch {} --at 3 --run-dir {}", new.path)
    forget_accelerate()
    assert main(argv("pretrain {} --run-dir {} --resume", new.recipe, new.path)) == 0
    ours = tensors(new)
    theirs = tensors(undisturbed)
    assert {name: theirs[name] for name in ours} == ours
    assert "final/model.safetensors" in ours
    words = argv("branch {} --at 4 --run-dir {} --data.block_size 4", run.path, tmp_path / "no")
    assert main(words) == 2
    assert "a stage has set it before step 4" in capsys.readouterr().err


def test_plot_names_the_stages(undisturbed, monkeypatch):
    from matplotlib.axes import Axes

    from nanogpt_hf.reports.curves import draw_run
    from nanogpt_hf.runs.metrics import read_metrics

    texts = []
    write = Axes.text
    monkeypatch.setattr(
        Axes,
        "text",
        lambda self, x, y, text, **style: texts.append(text) or write(self, x, y, text, **style),
    )
    draw_run(undisturbed, load_config(undisturbed.recipe), read_metrics(undisturbed))
    assert {" stage 2", " stage 3"} <= set(texts)
