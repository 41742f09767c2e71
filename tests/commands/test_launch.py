"""nanogpt-hf launch: which settings that accelerate does not know it passes on to its processes."""

import os
import signal

import pytest
from accelerate.commands import launch as accelerate_launch

from nanogpt_hf.commands.launch import run

STAGES = "parallelism_config: {parallelism_config_pp_size: 2}"
BUBBLE = "parallelism_config: {parallelism_config_pp_schedule: zero_bubble}"
EXPERTS = "parallelism_config: {parallelism_config_ep_size: 2}"
HOOK = "parallelism_config: {parallelism_config_ddp_comm_hook: bf16}"
CHECKPOINTING = "fsdp_config: {fsdp_activation_checkpointing: true}"


@pytest.mark.parametrize(
    ("section", "options", "variable", "value"),
    [
        ("", [], "PARALLELISM_CONFIG_PP_SIZE", None),
        (STAGES, [], "PARALLELISM_CONFIG_PP_SIZE", "2"),
        (STAGES, ["--parallelism_config_pp_size=4"], "PARALLELISM_CONFIG_PP_SIZE", "4"),
        (BUBBLE, [], "PARALLELISM_CONFIG_PP_SCHEDULE", "zero_bubble"),
        (EXPERTS, [], "PARALLELISM_CONFIG_EP_SIZE", "2"),
        (HOOK, [], "PARALLELISM_CONFIG_DDP_COMM_HOOK", "bf16"),
        ("", [], "FSDP_ACTIVATION_CHECKPOINTING", None),
        (CHECKPOINTING, [], "FSDP_ACTIVATION_CHECKPOINTING", "True"),
        (
            CHECKPOINTING,
            ["--fsdp_activation_checkpointing=2"],
            "FSDP_ACTIVATION_CHECKPOINTING",
            "2",
        ),
    ],
)
def test_setting_is_passed_on(section, options, variable, value, monkeypatch, tmp_path):
    monkeypatch.setattr(accelerate_launch, "launch_command", lambda arguments: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != variable})
    config = tmp_path / "machine.yaml"
    config.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 4\n{section}\n")
    assert run(["--config_file", str(config), *options, "pretrain", "r.yaml"], ["pretrain"]) == 0
    assert os.environ.get(variable) == value
