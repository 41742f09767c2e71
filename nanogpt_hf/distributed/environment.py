"""The settings that launchers pass on, and the values that each may have: environment variables and
accelerate configs.

Accelerate and torch read them at many places, most of which end in a traceback or ignore a wrong
value. Imports no torch, so that a command can check them before heavy imports.
"""

import os
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from nanogpt_hf.errors import UserError, did_you_mean

SCHEDULES = ("1f1b", "zero_bubble")  # a pipeline's; the first is the default
# for keys and values in ring attention; the first is the default
ROTATIONS = ("allgather", "alltoall")


class _Kind(NamedTuple):
    words: str
    accepts: Callable[[Any], object]  # true if it does


def _number(low: int, high: int = 10**9) -> _Kind:
    def accepts(value: Any) -> bool:
        return bool(re.fullmatch("[0-9]{1,12}", str(value))) and low <= int(value) <= high

    return _Kind(f"a number from {low}" + (f" to {high}" if high < 10**9 else " on"), accepts)


def _one_of(text: str, *, any_case: bool = False) -> _Kind:
    """One of the words of a text."""
    fold, names = str.lower if any_case else str, text.split()
    return _Kind(
        " or ".join([", ".join(names[:-1]), *names[-1:]]).removeprefix(" or "),
        lambda value: fold(str(value)) in map(fold, names),
    )


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(kind.words, lambda value: value is None or kind.accepts(value))


def _all(text: str, kind: _Kind) -> dict[str, _Kind]:
    """The words of a text, of one kind."""
    return dict.fromkeys(text.split(), kind)


_COUNT, _INDEX = _number(1), _number(0)
_FLAG = _one_of("true false", any_case=True)
_PRECISION = _one_of("no bf16 fp16 fp8")
_TYPES = "NO MULTI_CPU MULTI_GPU MULTI_XPU MULTI_NPU MULTI_HPU FSDP DEEPSPEED"

VARIABLES = {
    **_all("RANK LOCAL_RANK", _INDEX),
    **_all(
        "WORLD_SIZE LOCAL_WORLD_SIZE PARALLELISM_CONFIG_PP_SIZE PARALLELISM_CONFIG_TP_SIZE "
        "PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_EP_SIZE "
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE PARALLELISM_CONFIG_DP_SHARD_SIZE",
        _COUNT,
    ),
    "MASTER_PORT": _number(0, 65535),
    **_all(
        "ACCELERATE_USE_CPU ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED "
        "ACCELERATE_USE_PARALLELISM_CONFIG ACCELERATE_DYNAMO_USE_FULLGRAPH "
        "ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION "
        "ACCELERATE_DEEPSPEED_ZERO3_INIT ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL "
        "FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_CPU_RAM_EFFICIENT_LOADING",
        _FLAG,
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": _Kind(
        "true, false, selective, or a number n from 2 on, for one block of n",
        lambda v: (
            _one_of("true false selective", any_case=True).accepts(v) or _number(2).accepts(v)
        ),
    ),
    **_all(
        "ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_SAGEMAKER FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        _one_of("false", any_case=True),
    ),
    "ACCELERATE_TORCH_DEVICE": _Kind(
        "a device such as cpu or cuda:0",
        re.compile(r"(cpu|cuda|mps|xpu|npu|hpu)(:[0-9]{1,3})?").fullmatch,
    ),
    "ACCELERATE_MIXED_PRECISION": _PRECISION,
    "ACCELERATE_FP8_BACKEND": _one_of("AO", any_case=True),
    "ACCELERATE_LOG_LEVEL": _one_of("debug info warning error critical", any_case=True),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _Kind(
        "auto, or a number of steps", lambda v: v == "auto" or _COUNT.accepts(v)
    ),
    "ACCELERATE_DYNAMO_BACKEND": _one_of("no eager aot_eager inductor cudagraphs", any_case=True),
    "ACCELERATE_DYNAMO_MODE": _one_of(
        "default reduce-overhead max-autotune max-autotune-no-cudagraphs"
    ),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": _number(0, 3),
    **_all(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        _one_of("none cpu nvme"),
    ),
    "FSDP_VERSION": _number(1, 2),
    "PARALLELISM_CONFIG_PP_SCHEDULE": _one_of(" ".join(SCHEDULES)),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": _one_of(" ".join(ROTATIONS)),
    "PARALLELISM_CONFIG_DDP_COMM_HOOK": _Kind(
        "no, bf16 or fp16; PowerSGD would not resume, since no checkpoint has its state",
        ["no", "bf16", "fp16"].__contains__,
    ),
    "PARALLELISM_CONFIG_SP_SIZE": _Kind(
        "1; cp_size exchanges heads the same way", lambda v: str(v) == "1"
    ),
}

# what every launcher sets beside LOCAL_RANK
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_GPUS = _Kind("all, or numbers in quotes such as '0,1'", lambda v: isinstance(v, str) and v != "")
# Keys of an accelerate config that are no variables, and the sections, whose keys are variables
# with a prefix.
_KEYS = {
    "compute_environment": _one_of("LOCAL_MACHINE"),
    # YAML reads NO as false
    "distributed_type": _Kind(
        _one_of(_TYPES).words, lambda v: v is False or _one_of(_TYPES).accepts(v)
    ),
    **_all("num_processes num_machines", _COUNT),
    "machine_rank": _INDEX,
    "main_process_port": _or_null(_number(0, 65535)),
    "gpu_ids": _or_null(_GPUS),
    "mixed_precision": _or_null(_PRECISION),
    "fp8_config": _Kind(
        "{backend: AO}, torchao, or leave it out",
        lambda v: str(v).upper() in ("NONE", "{}", "{'BACKEND': 'AO'}"),
    ),
    **_all("use_cpu debug same_network enable_cpu_affinity tpu_use_cluster", _FLAG),
}
_SECTIONS = {
    "dynamo_config": ("dynamo_", "ACCELERATE_DYNAMO_"),
    "deepspeed_config": ("", "ACCELERATE_DEEPSPEED_"),
    "fsdp_config": ("fsdp_", "FSDP_"),
    "parallelism_config": ("parallelism_config_", "PARALLELISM_CONFIG_"),
}


def check_environment() -> None:
    """Raises UserError if an environment variable of torch or accelerate has a wrong value, or
    lacks its others.
    """
    given = os.environ
    for name in given:
        if re.fullmatch("PARALLELISM_CONFIG_.*_SIZE", name) and name not in VARIABLES:
            raise UserError(f"{name}: there is no such size{did_you_mean(name, VARIABLES)}")
    for name in VARIABLES.keys() & given.keys():
        if not VARIABLES[name].accepts(given[name]):
            raise UserError(
                f"{name} is {given[name]!r:.60}; set {VARIABLES[name].words}, or unset it"
            )
    if "LOCAL_RANK" in given and (missing := [name for name in _LAUNCHED if name not in given]):
        raise UserError(
            f"LOCAL_RANK is set, but not {', '.join(missing)}; use `python cli.py "
            "launch`, or unset it"
        )
    rank, size = given.get("RANK", "0"), given.get("WORLD_SIZE", "1")
    if int(rank) >= int(size):
        raise UserError(f"RANK is {rank}, not below WORLD_SIZE {size}; use `python cli.py launch`")


def check_accelerate_config(
    file: str, settings: dict[str, Any], options: Collection[str] = ()
) -> None:
    """Raises UserError if a value of an accelerate config is wrong.

    `options` are the names that `accelerate launch` knows; it ignores any other key of a section.
    """
    for key, value in settings.items():
        if key in _SECTIONS and value is not None:
            if not isinstance(value, dict):
                raise UserError(
                    f"--config_file {file}: {key} is {value!r:.60}; set keys with values under it"
                )
            prefix, variables = _SECTIONS[key]
            for name, part in value.items():
                option = f"{prefix}{str(name).removeprefix(prefix)}"
                ignored = key == "parallelism_config" and option != name
                if options and (ignored or option not in options):
                    near = did_you_mean(option, options)
                    raise UserError(f"--config_file {file}: {key}: {name} is no key of it{near}")
                upper = option.removeprefix(prefix).upper().removesuffix("_FLAG")
                kind = VARIABLES.get(f"{variables}{upper}") or VARIABLES.get(f"ACCELERATE_{upper}")
                _check(file, f"{key}: {name}", part, kind)
        else:
            _check(file, key, value, _KEYS.get(key))


def _check(file: str, key: str, value: Any, kind: _Kind | None) -> None:
    if kind and not kind.accepts(value):
        quotes = (
            "; YAML reads a bare no as false: quote it"
            if value is False and "no" in kind.words
            else ""
        )
        raise UserError(f"--config_file {file}: {key} is {value!r:.60}; set {kind.words}{quotes}")
