"""The optimizers that a recipe can choose, and what each does not combine with.

optim/optimizer.py builds them, a row for each name and precision of the state.
"""

from collections.abc import Mapping
from typing import NamedTuple

from nanogpt_hf.config.settings import FSDP2, AnySetting, Rule, Setting, choice, given, rules


class OptimizerChoice(NamedTuple):
    """A value of `optim.name`."""

    # Its part of the help text of optim.name.
    meaning: str
    # Settings that it does not combine with: for each the reason, and the remedy.
    refuses: Mapping[AnySetting, tuple[str, str]] = {}
    has_betas: bool = False  # whether it reads optim.beta1, optim.beta2 and optim.betas
    states: tuple[str, ...] = ("float32",)  # the values of optim.state that it has


(_LORA,) = given("lora.rank")
OPTIMIZERS = {
    "adamw": OptimizerChoice(
        "adamw for all parameters", has_betas=True, states=("float32", "8bit")
    ),
    "muon": OptimizerChoice(
        "muon for the matrices in the blocks, and adamw for the rest",
        has_betas=True,
        refuses={
            Setting.DEEPSPEED: (
                "ZeRO keeps the matrices in flat buffers that no process can orthogonalize",
                FSDP2,
            ),
            _LORA: ("LoRA trains two factors of a matrix, not the matrix", "use adamw"),
        },
    ),
}

_STATE_8BIT = choice("optim.state", "8bit")
_HAVE_8BIT = [name for name, row in OPTIMIZERS.items() if "8bit" in row.states]
RULES: list[Rule] = [
    *rules(
        _STATE_8BIT,
        choice("optim.name", *(name for name in OPTIMIZERS if name not in _HAVE_8BIT)),
        f"8-bit state is for {' and '.join(_HAVE_8BIT)} only",
        "leave one of them out",
    ),
    *rules(
        _STATE_8BIT,
        Setting.DEEPSPEED,
        "ZeRO keeps the state in flat float32 buffers",
        FSDP2,
    ),
    *rules(
        _STATE_8BIT,
        (Setting.TENSOR_PARALLELISM, Setting.EXPERT_PARALLELISM),
        "it has no 8-bit state of split matrices",
        FSDP2,
    ),
    *rules(_STATE_8BIT, Setting.PIPELINE_STAGES, "it is not supported there", FSDP2),
    *rules(
        _STATE_8BIT,
        given("train.gradient_groups"),
        "its blocks of 256 values are cut at shards",
        "leave it out",
    ),
]
for _name, _optimizer in OPTIMIZERS.items():
    for _setting, (_reason, _remedy) in _optimizer.refuses.items():
        RULES += rules(choice("optim.name", _name), _setting, _reason, _remedy)
