"""cli.py launch: which sizes that accelerate does not know it passes on to its processes."""

import os
import signal

import pytest
from accelerate.commands import launch as accelerate_launch

from nanogpt_hf.commands.launch import run

SIZE, SCHEDULE = "PARALLELISM_CONFIG_PP_SIZE", "PARALLELISM_CONFIG_PP_SCHEDULE"


@pytest.fixture
def passed_on(monkeypatch, tmp_path):
    """A function that launches with these options, and a config with this parallelism_config:
    size and schedule.
    """
    monkeypatch.setattr(accelerate_launch, "launch_command", lambda arguments: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def launch(*options: str, layout: str = "") -> tuple[str | None, str | None]:
        config = tmp_path / "machine.yaml"
        config.write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: "
            f"4\n{layout}"
        )
        monkeypatch.setattr(
            os, "environ", {k: v for k, v in os.environ.items() if k not in (SIZE, SCHEDULE)}
        )
        assert (
            run(["--config_file", str(config), *options, "pretrain", "recipe.yaml"], ["pretrain"])
            == 0
        )
        return os.environ.get(SIZE), os.environ.get(SCHEDULE)

    return launch


def test_share_of_experts_and_compression_are_passed_on(passed_on, monkeypatch):
    monkeypatch.delenv("PARALLELISM_CONFIG_EP_SIZE", raising=False)
    monkeypatch.delenv("PARALLELISM_CONFIG_DDP_COMM_HOOK", raising=False)
    layout = "parallelism_config:\n  parallelism_config_ep_size: 2\n"
    layout += "  parallelism_config_ddp_comm_hook: bf16\n"
    for options, size in (([], "2"), (["--parallelism_config_ep_size=4"], "4")):
        passed_on(*options, layout=layout)
        assert os.environ["PARALLELISM_CONFIG_EP_SIZE"] == size
        assert os.environ["PARALLELISM_CONFIG_DDP_COMM_HOOK"] == "bf16"


@pytest.mark.parametrize(
    ("stated", "options", "expected"),
    [
        ("fsdp_activation_checkpointing: true", [], "True"),
        ("activation_checkpointing: selective", [], "selective"),
        ("fsdp_activation_checkpointing: 2", ["--fsdp_activation_checkpointing=true"], "true"),
        ("fsdp_offload_params: false", [], None),
    ],
)
def test_checkpointing_without_fsdp_is_passed_on(stated, options, expected, passed_on, monkeypatch):
    name = "FSDP_ACTIVATION_CHECKPOINTING"
    monkeypatch.delenv(name, raising=False)
    passed_on(*options, layout=f"fsdp_config:\n  {stated}\n")
    assert os.environ.get(name) == expected


def test_pipeline_of_the_config_and_of_options_is_passed_on(passed_on):
    layout = (
        "parallelism_config:\n  parallelism_config_pp_size: 2\n  "
        "parallelism_config_pp_schedule: zero_bubble\n"
    )
    assert passed_on() == (None, None)
    assert passed_on(layout=layout) == ("2", "zero_bubble")
    assert passed_on("--parallelism_config_pp_size=4", layout=layout) == ("4", "zero_bubble")
