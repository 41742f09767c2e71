"""Settings of a run that a rule can name, and rules: two settings that do not combine.

A setting is a member of an enumeration or the value of a knob. The settings of a run are a mapping
from each setting that it has to the words for it in messages. This file knows no knobs, so that a
feature can state its rules where it is declared; config/compatibility.py collects them.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

# The remedy of many rules: FSDP2 shards a model without splitting its matrices or sequences, so it
# combines with nearly everything.
FSDP2 = "use accelerate_configs/fsdp2.yaml"


class Setting(Enum):
    """A setting that is not the value of one knob. The value of a member is its name in messages
    and in docs/machines.md.
    """

    # Of a recipe.
    SEVERAL_SOURCES = "several sources"
    SLICE_OF_A_SPLIT = "a slice of a split"
    FROZEN_EMBEDDINGS = "frozen embeddings"
    # Of a recipe and the model to start from.
    NEW_TOKENS = "new tokens"
    OTHER_POSITIONS = "other positions"
    # Of the accelerate config.
    TENSOR_PARALLELISM = "tensor parallelism"
    CONTEXT_PARALLELISM = "context parallelism"
    PIPELINE_STAGES = "pipeline stages"
    EXPERT_PARALLELISM = "expert parallelism"
    ZERO_BUBBLE = "pp_schedule zero_bubble"
    UNSHARDED = "unsharded models"
    DDP = "DDP"
    FSDP2 = "FSDP2"
    FSDP2_IN_BF16 = "FSDP2 in bf16"
    FSDP2_OVER_ONE_PROCESS = "FSDP2 over one process"
    HSDP = "HSDP"
    DEEPSPEED = "DeepSpeed"
    FP16 = "mixed_precision fp16"
    FP8 = "mixed_precision fp8"
    COMPILATION = "dynamo_backend"
    ACTIVATION_CHECKPOINTING = "fsdp_activation_checkpointing"
    SELECTIVE_CHECKPOINTING = "fsdp_activation_checkpointing selective"
    RESHARDING = "fsdp_reshard_after_forward"
    SENT_WEIGHTS = "fsdp_cpu_ram_efficient_loading"
    GRADIENT_COMPRESSION = "ddp_comm_hook"
    CPU = "a CPU"
    # Of a model under a layout.
    BLOCKS_WITHOUT_A_PLAN = "blocks without a plan"
    SPLIT_NORMS_OF_HEADS = "split norms of heads"
    NO_EXPERTS = "no experts"
    OTHER_ATTENTION = "attention of another kind"
    WINDOW_OF_ATTENTION = "a window of attention"
    RING_ATTENTION = "ring attention"
    DROPOUT = "dropout"
    BLOCKS_THAT_ARE_NO_STAGES = "blocks that are no stages"
    # Of the command line.
    AUTO_RESUME = "--auto-resume"
    RESUME = "--resume"
    OVERWRITE = "--overwrite"

    def describe(self, value: str = "") -> str:
        """The setting in a message, with its value: `tensor parallelism (tp_size 2)`."""
        return f"{self.value} ({value})" if value else self.value


class KnobSetting(NamedTuple):
    """A knob that has this value, or, without one, any value but its default."""

    key: str
    value: str | None = None

    def describe(self) -> str:
        return f"{self.key} {self.value}" if self.value else self.key


AnySetting = Setting | KnobSetting
Settings = dict[AnySetting, str]


def given(*keys: str) -> tuple[KnobSetting, ...]:
    """Each of these knobs with any value but its default."""
    return tuple(KnobSetting(key) for key in keys)


def choice(key: str, *values: str) -> tuple[KnobSetting, ...]:
    """A knob with each of these values."""
    return tuple(KnobSetting(key, value) for value in values)


class Rule(NamedTuple):
    """Two settings that do not combine: `a` is the one to change."""

    a: AnySetting
    b: AnySetting
    reason: str
    remedy: str

    def message(self, settings: Mapping[AnySetting, str]) -> str:
        """The rule in one line, with the values of a run's settings."""
        named = f"{settings[self.a]} does not combine with {settings[self.b]}"
        return f"{named}: {self.reason}; {self.remedy}"


Several = AnySetting | tuple[AnySetting, ...]


def _each(settings: Several) -> tuple[AnySetting, ...]:
    return (settings,) if isinstance(settings, Setting | KnobSetting) else settings


def rules(a: Several, b: Several, reason: str, remedy: str) -> list[Rule]:
    """A rule for each setting of `a`, the ones to change, with each of `b`."""
    return [Rule(first, second, reason, remedy) for first in _each(a) for second in _each(b)]
