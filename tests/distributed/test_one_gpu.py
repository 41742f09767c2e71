"""What a person with one GPU and no accelerate config gets, by the capability of the card."""

import os
from unittest import mock

import pytest
import torch

from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.accelerate_config import (
    STEPS_WORTH_COMPILING,
    check_launch,
    requested_precision,
    settled,
)
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError


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
