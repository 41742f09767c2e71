"""What a person with one GPU and no accelerate config gets, by the capability of the card."""

import os
from unittest import mock

import pytest
import torch

from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.accelerate_config import (
    STEPS_WORTH_COMPILING,
    CheckedLaunch,
    check_launch,
    requested_precision,
    settled,
)
from nanogpt_hf.distributed.accelerator import _start, compiler_of
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.training import start
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.start import prepare_run


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
@pytest.mark.parametrize("before", ["no", "inductor"])
def test_run_that_goes_on_keeps_its_compiler(card, write_recipe, before, steps):
    """Also if a resume has more steps, or states the number that a budget or epochs had given."""
    card(8, 9)
    config = load_config(write_recipe(train__max_steps=steps))
    assert check_launch(config, Mesh(), before).mesh.compiles == (before == "inductor")


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
    assert launch_of(longer, overwrite=True).mesh.compiles


def test_accelerator_compiles_by_the_chosen_compiler(monkeypatch, forget_accelerate):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    accelerator = _start(Mesh(compiles=True))
    assert compiler_of(accelerator) == "inductor"
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ
    forget_accelerate()


def test_stated_compiler_stays(card, write_recipe, monkeypatch):
    card(8, 9)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    launch = check_launch(load_config(write_recipe(train__max_steps=10_000)), Mesh())
    assert not launch.mesh.compiles


def test_emulated_bfloat16_is_refused(card, monkeypatch):
    card(7, 5)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match=r"bf16, .* capability 7\.5 only emulates: .*; set fp16"):
        settled(Mesh())
    card(8, 0)
    settled(Mesh())
