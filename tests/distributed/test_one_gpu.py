"""What a person with one GPU and no accelerate config gets, by the capability of the card."""

import json
import os
import shutil
from unittest import mock

import pytest
import torch

from nanogpt_hf.compiler import MODES, compiler_parts
from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed import accelerate_config
from nanogpt_hf.distributed.accelerate_config import (
    STEPS_WORTH_COMPILING,
    CheckedLaunch,
    check_launch,
    keep_compiler,
    requested_precision,
    settled,
)
from nanogpt_hf.distributed.accelerator import actual_settings
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.replay import verify
from nanogpt_hf.replay.repeatable import check_repeatable
from nanogpt_hf.replay.verify import recipe_of, run_at
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import add_start
from nanogpt_hf.runs.recipe import recipe_text
from nanogpt_hf.training import build, start
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.start import prepare_run

COMPILERS = ["no", "inductor", "eager", "aot_eager", f"inductor, {MODES[1]}, regional"]


@pytest.fixture
def card(monkeypatch):
    """A function that makes torch see one CUDA GPU of a capability."""
    with mock.patch.dict(os.environ):

        def card(*capability: int) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
            monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
            monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
            device = torch.device("cuda")
            monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)

        yield card


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16"), ((12, 0), "bf16")],
)
def test_precision_without_a_config_is_that_of_the_card(card, capability, precision):
    card(*capability)
    assert requested_precision() == precision
    assert settled(Mesh()).precision == precision


@pytest.mark.parametrize(
    "stated",
    [{"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1"}, {"ACCELERATE_USE_CPU": "true"}],
    ids=str,
)
def test_config_launcher_or_cpu_decides_itself(card, monkeypatch, stated):
    card(9, 0)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    assert requested_precision() == "no"


@pytest.mark.parametrize(
    ("steps", "compiles"), [(STEPS_WORTH_COMPILING - 1, False), (STEPS_WORTH_COMPILING, True)]
)
def test_long_run_is_compiled(card, write_recipe, steps, compiles):
    card(8, 9)
    config = load_config(write_recipe(train__max_steps=steps))
    assert check_launch(config, Mesh()).mesh.compiles == compiles


@pytest.mark.parametrize("steps", [STEPS_WORTH_COMPILING - 1, STEPS_WORTH_COMPILING])
@pytest.mark.parametrize("before", COMPILERS)
def test_run_that_continues_keeps_its_compiler(card, write_recipe, before, steps):
    """A resume keeps it also with more steps, or if it states the number of a budget or epochs."""
    card(8, 9)
    config = load_config(write_recipe(train__max_steps=steps))
    mesh = keep_compiler(Mesh(), {"dynamo": before})
    assert check_launch(config, mesh).mesh.compiler == before
    # An older version has recorded none.
    chosen = "inductor" if steps == STEPS_WORTH_COMPILING else "no"
    assert check_launch(config, keep_compiler(Mesh(), {})).mesh.compiler == chosen
    # The accelerate config wins.
    assert keep_compiler(Mesh(compiler="no"), {"dynamo": before}).compiler == "no"


def test_stated_mode_is_the_mode_of_the_chosen_compiler(card, write_recipe, monkeypatch):
    card(8, 9)
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", MODES[1])
    config = load_config(write_recipe(train__max_steps=STEPS_WORTH_COMPILING))
    mesh = check_launch(config, Mesh.from_environment()).mesh
    assert mesh.compiler == f"inductor, {MODES[1]}"


@pytest.mark.parametrize("knobs", [{"epochs": 0.1}, {"epochs": 9}, {"budget": "1m"}, {}], ids=str)
def test_selective_checkpointing_is_not_refused_by_the_choice(
    launch_of, write_recipe, monkeypatch, knobs
):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "selective")
    knobs = {f"train__{name}": value for name, value in knobs.items()}
    recipe = write_recipe(**knobs)
    steps = f"max_steps: {STEPS_WORTH_COMPILING}" if not knobs else ""
    recipe.write_text(recipe.read_text().replace("max_steps: 6", steps))
    assert launch_of(load_config(recipe)).mesh.compiler == "no"


def test_choice_of_a_run_is_none_of_the_next(card, write_recipe):
    """A sweep checks its runs in one process, and starts each with its environment."""
    card(8, 9)
    before = dict(os.environ)
    for steps, compiles in ((STEPS_WORTH_COMPILING, True), (10, False)):
        config = load_config(write_recipe(train__max_steps=steps))
        assert check_launch(config, Mesh()).mesh.compiles == compiles
    assert os.environ == before


@pytest.fixture
def launch_of(card, tmp_path, monkeypatch):
    """The launch with which `prepare_run` would build an Accelerator on one GPU."""

    class BuiltError(Exception):
        pass

    def launch_of(config, **options) -> CheckedLaunch:
        def build(launch, *_):
            raise BuiltError(launch)

        monkeypatch.setattr(start, "build_accelerator", build)
        card(8, 9)
        with pytest.raises(BuiltError) as built:
            prepare_run(config, tmp_path / "run", **options)
        return built.value.args[0]

    return launch_of


# The tiny text has 140 steps in an epoch.
@pytest.mark.parametrize(("epochs", "compiles"), [(0.1, False), (3, False), (4, True)])
def test_steps_of_epochs_decide_whether_a_run_is_compiled(
    launch_of, write_recipe, epochs, compiles
):
    recipe = write_recipe(train__epochs=epochs)
    recipe.write_text(recipe.read_text().replace("max_steps: 6", ""))
    assert launch_of(load_config(recipe)).mesh.compiles == compiles


def test_resume_reads_the_compiler_of_the_run(launch_of, write_recipe, tmp_path, forget_accelerate):
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        forget_accelerate()
        train(prepare_run(load_config(write_recipe()), tmp_path / "run"))
    longer = load_config(write_recipe(train__max_steps=STEPS_WORTH_COMPILING))
    assert not launch_of(longer, resume=True).mesh.compiles
    assert not launch_of(longer, auto_resume=True).mesh.compiles
    assert launch_of(longer, overwrite=True).mesh.compiles


def test_start_does_not_read_the_compiler_of_a_killed_one(launch_of, write_recipe, tmp_path):
    """`--auto-resume` starts at step 0 if the killed start has saved no checkpoint."""
    config = load_config(write_recipe(train__max_steps=STEPS_WORTH_COMPILING))
    folder = RunFolder(tmp_path / "run")
    folder.lock()
    folder.start(recipe_text(config))
    folder.unlock()
    add_start(folder, {"step": 0, "dynamo": "no"})
    assert launch_of(config, auto_resume=True).mesh.compiler == "inductor"


@pytest.mark.parametrize("compilers", [("eager", "no"), ("no", "eager"), tuple(COMPILERS)], ids=str)
def test_each_run_of_a_process_has_its_own_compiler(
    write_recipe, tmp_path, monkeypatch, forget_accelerate, compilers
):
    """Accelerate's state of a process keeps the plugin of the first Accelerator."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: compiled.append(options))
    # No kernel is built: inductor's linker does not take a path with a space.
    monkeypatch.setattr(build, "dry_run_step", lambda *_: None)
    config = load_config(write_recipe())
    for number, compiler in enumerate(compilers):
        compiled.clear()
        run = prepare_run(config, tmp_path / str(number), mesh=Mesh(compiler=compiler))
        run.folder.unlock()
        backend, mode, is_regional = compiler_parts(compiler)
        mode = None if mode == MODES[0] else mode
        # The base model, or each block.
        count = 0 if backend == "no" else len(run.model.transformer.h) if is_regional else 1
        assert compiled == [{"backend": backend, "mode": mode}] * count
        assert actual_settings(run.accelerator)["dynamo"] == compiler
    forget_accelerate()


@pytest.fixture
def compiled_run(write_recipe, tmp_path, monkeypatch, forget_accelerate):
    """A run of six steps with three checkpoints, which counts as a long one."""
    monkeypatch.setattr(accelerate_config, "STEPS_WORTH_COMPILING", 6)
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        forget_accelerate()
        config = load_config(write_recipe(checkpoint__every=2, checkpoint__keep=9))
        run = train(prepare_run(config, tmp_path / "compiled"))
    forget_accelerate()
    return run


def _record(folder, *starts):
    entries = [{"precision": "bf16"} | start for start in starts]
    folder.machine.write_text(json.dumps({"starts": entries}))


STARTS = {
    "older version": ([{"step": 0}], "inductor"),
    "no starts": ([], "inductor"),
    **{name: ([{"step": 0, "dynamo": name}], name) for name in COMPILERS},
    "older version, resumed": ([{"step": 0}, {"step": 4, "dynamo": "inductor"}], "inductor"),
    "resumed": ([{"step": 0, "dynamo": "eager"}, {"step": 4, "dynamo": "eager"}], "eager"),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("starts", "compiler"), STARTS.values(), ids=STARTS)
def test_verify_repeats_with_the_compiler_of_the_run(
    compiled_run, card, monkeypatch, starts, compiler, first
):
    _record(compiled_run, *starts)
    meshes = []

    def prepare(*_, mesh, **__):
        meshes.append(settled(mesh, config))
        raise UserError("prepared")

    monkeypatch.setattr(verify, "prepare_run", prepare)
    card(8, 9)
    config = recipe_of(compiled_run)
    check_repeatable(compiled_run, config, Mesh(), [(first, 6)])
    with pytest.raises(UserError, match="prepared"), run_at(compiled_run, config, first, Mesh()):
        pass
    assert [mesh.compiler for mesh in meshes] == [compiler]


def test_starts_with_several_compilers_are_repeated_apart(compiled_run, card):
    _record(compiled_run, {"step": 0, "dynamo": "inductor"}, {"step": 4, "dynamo": "no"})
    card(8, 9)
    config = recipe_of(compiled_run)
    problem = (
        "steps 4 to 6 were computed with dynamo_backend no, and would be repeated with inductor, "
        "which rounds differently; repeat them by --steps 4:6$"
    )
    with pytest.raises(UserError, match=problem):
        check_repeatable(compiled_run, config, Mesh(), [(0, 6)])
    check_repeatable(compiled_run, config, Mesh(), [(0, 2), (2, 4), (4, 6)])
    # Under a config the compiler is stated.
    stated = Mesh(compiler="eager")
    with pytest.raises(UserError, match="repeat them under an accelerate config with it, by laun"):
        check_repeatable(compiled_run, config, stated, [(4, 6)])
    with pytest.raises(UserError, match="by --steps 4:6 under an accelerate config with it"):
        check_repeatable(compiled_run, config, stated, [(2, 6)])
    # Without the checkpoint at which the run was resumed, no segment has its steps only.
    shutil.rmtree(compiled_run.checkpoint(4))
    with pytest.raises(UserError, match=r"4 to 6 were .*; no two checkpoints are left of them, "):
        check_repeatable(compiled_run, config, Mesh(), [(0, 6)])


def test_stated_compiler_stays(card, write_recipe, monkeypatch):
    card(8, 9)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    config = load_config(write_recipe(train__max_steps=10_000))
    assert not check_launch(config, Mesh.from_environment()).mesh.compiles


def test_emulated_bfloat16_is_refused(card, monkeypatch):
    card(7, 5)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match=r"bf16, .* capability 7\.5 only emulates: .*; set fp16"):
        settled(Mesh())
    card(8, 0)
    settled(Mesh())
