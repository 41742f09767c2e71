"""Settings that launchers pass on, and the values that each may have: environment variables and
accelerate configs.

Accelerate and torch read them at many places, most of which end in a traceback or ignore a wrong
value. Imports no torch, so that a command can check them before heavy imports.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nanogpt_hf.compiler import BACKENDS, MODES, compiler_text
from nanogpt_hf.config.values import SettingsLoader, parse_settings, read_settings
from nanogpt_hf.errors import UserError, did_you_mean, one_line
from nanogpt_hf.program import program

SCHEDULES = ("1f1b", "zero_bubble")  # a pipeline's; the first is the default
# for keys and values in ring attention; the first is the default
ROTATIONS = ("allgather", "alltoall")

# the sizes of a parallelism_config, as accelerate names them, by the variables that state them
SIZE_VARIABLES = {
    f"PARALLELISM_CONFIG_{name.upper()}": name
    for name in (
        "pp_size",
        "dp_replicate_size",
        "dp_shard_size",
        "ep_size",
        "cp_size",
        "sp_size",
        "tp_size",
    )
}

# Patterns of values. Those that are no list of words are described by _WORDS.
_COUNT = "[1-9][0-9]{0,8}"
_INDEX = "[0-9]{1,9}"
# A port is a number up to 65535.
_PORT = "[0-9]{1,4}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5])))"
_FLAG = "(?i:true|false)"
_PRECISION = "no|bf16|fp16|fp8"
_CHECKPOINTING = "(?i:true|false|selective)|[2-9]|[1-9][0-9]+"
_DEVICE = "(cpu|cuda|mps|xpu|npu|hpu)(:[0-9]{1,3})?"
_STEPS = f"auto|{_COUNT}"
_COMPRESSION = "no|bf16|fp16"
_GPUS = "'.+'"  # the repr of a text
_MODE = "|".join(MODES)
_FP8 = r"(?i:\{\}|\{'backend': 'AO'\})"
_WORDS = {
    _COUNT: "a number from 1 on",
    _INDEX: "a number from 0 on",
    _PORT: "the number of a port, from 0 to 65535",
    _CHECKPOINTING: "true, false, selective, or a number n from 2 on, for one block of n",
    _DEVICE: "a device such as cpu or cuda:0",
    _STEPS: "auto, or a number of steps",
    _COMPRESSION: (
        "no, bf16 or fp16; PowerSGD would not resume, since no checkpoint has its state"
    ),
    _MODE: (
        "default or max-autotune-no-cudagraphs; CUDA graphs overwrite results that a step still "
        "reads"
    ),
    _GPUS: "all, or numbers in quotes such as '0,1'",
    _FP8: "{backend: AO}, torchao, or leave it out",
}


def _all(names: str, pattern: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), pattern)


VARIABLES = {
    **_all("RANK LOCAL_RANK", _INDEX),
    **_all(
        "WORLD_SIZE LOCAL_WORLD_SIZE PARALLELISM_CONFIG_PP_SIZE PARALLELISM_CONFIG_TP_SIZE "
        "PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_EP_SIZE "
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE PARALLELISM_CONFIG_DP_SHARD_SIZE",
        _COUNT,
    ),
    "MASTER_PORT": _PORT,
    **_all(
        "ACCELERATE_USE_CPU ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED "
        "ACCELERATE_USE_PARALLELISM_CONFIG ACCELERATE_DYNAMO_USE_FULLGRAPH "
        "ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION "
        "ACCELERATE_DEEPSPEED_ZERO3_INIT ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL "
        "FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_CPU_RAM_EFFICIENT_LOADING",
        _FLAG,
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": _CHECKPOINTING,
    **_all(
        "ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_SAGEMAKER FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "(?i:false)",
    ),
    "ACCELERATE_TORCH_DEVICE": _DEVICE,
    "ACCELERATE_MIXED_PRECISION": _PRECISION,
    "ACCELERATE_FP8_BACKEND": "(?i:AO)",
    "ACCELERATE_LOG_LEVEL": "(?i:debug|info|warning|error|critical)",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _STEPS,
    "ACCELERATE_DYNAMO_BACKEND": f"(?i:{'|'.join(BACKENDS)})",
    "ACCELERATE_DYNAMO_MODE": _MODE,
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0|1|2|3",
    **_all(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "none|cpu|nvme",
    ),
    "FSDP_VERSION": "1|2",
    "PARALLELISM_CONFIG_PP_SCHEDULE": "|".join(SCHEDULES),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "|".join(ROTATIONS),
    "PARALLELISM_CONFIG_DDP_COMM_HOOK": _COMPRESSION,
    "PARALLELISM_CONFIG_SP_SIZE": "1",  # cp_size exchanges heads the same way
}

# Every launcher sets these with LOCAL_RANK.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Keys of an accelerate config that are no variables, and the sections, whose keys are variables
# with a prefix.
_KEYS = {
    "compute_environment": "LOCAL_MACHINE",
    # YAML reads NO as false
    "distributed_type": "NO|False|MULTI_CPU|MULTI_GPU|MULTI_XPU|MULTI_NPU|MULTI_HPU|FSDP|DEEPSPEED",
    **_all("num_processes num_machines", _COUNT),
    "machine_rank": _INDEX,
    "main_process_port": _PORT,
    "gpu_ids": _GPUS,
    "mixed_precision": _PRECISION,
    "fp8_config": _FP8,
    **_all("use_cpu debug same_network enable_cpu_affinity tpu_use_cluster", _FLAG),
}
_MAY_BE_NULL = ("main_process_port", "gpu_ids", "mixed_precision", "fp8_config")
_SECTIONS = {
    "dynamo_config": ("dynamo_", "ACCELERATE_DYNAMO_"),
    "deepspeed_config": ("", "ACCELERATE_DEEPSPEED_"),
    "fsdp_config": ("fsdp_", "FSDP_"),
    "parallelism_config": ("parallelism_config_", "PARALLELISM_CONFIG_"),
}


def is_true(stated: object) -> bool:
    """Whether a setting says true, as YAML, accelerate and its launcher write it."""
    return str(stated).lower() == "true"


def level_of(stated: object) -> str:
    """Level of activation checkpointing that a setting states, such as `true`; an empty one
    for false or none.
    """
    level = str(stated).lower()
    return "" if level in ("false", "none") else level


def stated_compiler(given: Mapping[str, str], default: str = "") -> str:
    """The compiler (compiler.py) that the launcher's variables state. `default` is the backend if
    they state none.
    """
    return compiler_text(
        given.get("ACCELERATE_DYNAMO_BACKEND") or default,
        given.get("ACCELERATE_DYNAMO_MODE") or MODES[0],
        is_regional=is_true(given.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
    )


def states_cpu(given: Mapping[str, str]) -> bool:
    """Whether the launcher's variables say that the launch runs on CPUs."""
    return is_true(given.get("ACCELERATE_USE_CPU")) or given.get("ACCELERATE_TORCH_DEVICE") == "cpu"


def check_environment() -> None:
    """Raises UserError if an environment variable of torch or accelerate has a wrong value, or
    lacks its others.
    """
    given = os.environ
    # A misspelt size would be ignored, and the run would have another layout.
    for name in given:
        if re.fullmatch("PARALLELISM_CONFIG_.*_SIZE", name) and name not in VARIABLES:
            raise UserError(f"{name}: there is no such size{did_you_mean(name, VARIABLES)}")
    for name in VARIABLES.keys() & given.keys():
        if not re.fullmatch(VARIABLES[name], given[name]):
            raise UserError(
                f"{name} is {given[name]!r:.60}; set {_words(VARIABLES[name])}, or unset it"
            )
    if "LOCAL_RANK" in given and (missing := [name for name in _LAUNCHED if name not in given]):
        raise UserError(
            f"LOCAL_RANK is set, but not {', '.join(missing)}; use "
            f"`{program()} launch`, or unset it"
        )
    # A rank that is out of range waits for ever for processes that do not exist.
    world_size = given.get("WORLD_SIZE", "1")
    local_size = given.get("LOCAL_WORLD_SIZE", world_size)
    sizes = {"RANK": ("WORLD_SIZE", world_size), "LOCAL_RANK": ("LOCAL_WORLD_SIZE", local_size)}
    for name, (size_name, size) in sizes.items():
        rank = given.get(name, "0")
        if int(rank) >= int(size):
            raise UserError(
                f"{name} is {rank}, not below {size_name} {size}; use `{program()} launch`"
            )


def read_accelerate_config(file: str) -> dict[str, Any]:
    """Read the settings of an accelerate config. Raises UserError if the file has none."""
    try:
        text = read_settings(Path(file))
        # Accelerate, too, reads all other endings as YAML.
        is_json = file.endswith(".json")
        settings = json.loads(text) if is_json else parse_settings(text, SettingsLoader)
        if not isinstance(settings, dict):
            raise ValueError("expected an accelerate config, such as accelerate_configs/cpu.yaml")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        raise UserError(f"--config_file {file}: cannot be read: {reason}") from None
    return settings


def check_accelerate_config(
    file: str, settings: dict[str, Any], options: Collection[str] = ()
) -> None:
    """Raises UserError if a value of an accelerate config is wrong.

    `options` are the names that `accelerate launch` knows; it ignores any other key of a section.
    """
    where = f"--config_file {file}: "
    for key, value in settings.items():
        if key not in _SECTIONS:
            if value is not None or key not in _MAY_BE_NULL:
                _check(where, key, value, _KEYS.get(key))
            continue
        if not isinstance(value, dict | None):
            raise UserError(f"{where}{key} is {value!r:.60}; set keys with values under it")
        prefix, variables = _SECTIONS[key]
        for name, part in (value or {}).items():
            option = f"{prefix}{str(name).removeprefix(prefix)}"
            ignored = key == "parallelism_config" and option != name
            if options and (ignored or option not in options):
                near = did_you_mean(option, options)
                raise UserError(f"{where}{key}: {name} is no key of it{near}")
            upper = option.removeprefix(prefix).upper().removesuffix("_FLAG")
            pattern = VARIABLES.get(f"{variables}{upper}") or VARIABLES.get(f"ACCELERATE_{upper}")
            _check(where, f"{key}: {name}", part, pattern)


def check_launch_options(options: Mapping[str, Any]) -> None:
    """Raises UserError if an option of `launch` has a value that the key of the config may not."""
    for key, value in options.items():
        _check("launch: --", key, value, _KEYS.get(key))


def _check(where: str, key: str, value: Any, pattern: str | None) -> None:
    if pattern and not any(re.fullmatch(pattern, text) for text in (str(value), repr(value))):
        words = _words(pattern)
        if value is False and "no" in words:
            words += "; YAML reads a bare no as false: quote it"
        raise UserError(f"{where}{key} is {value!r:.60}; set {words}")


def _words(pattern: str) -> str:
    words = pattern.removeprefix("(?i:").removesuffix(")").replace("|", " or ")
    return _WORDS.get(pattern, words)
