"""Settings of a run that a rule can name: the members of an enumeration, and values of knobs.

A rule (config/compatibility.py) names two settings. The settings of a run are a mapping from each
setting that it has to the words for it in messages.
"""

from enum import Enum
from typing import NamedTuple

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import has_conversations, is_mixture
from nanogpt_hf.config.values import convert


class Setting(Enum):
    """A setting that is not the value of one knob. The value of a member is its name in messages
    and in docs/machines.md.
    """

    # of a recipe
    SEVERAL_SOURCES = "several sources"
    SLICE_OF_A_SPLIT = "a slice of a split"
    FROZEN_EMBEDDINGS = "frozen embeddings"
    # of a recipe and the model to start from
    NEW_TOKENS = "new tokens"
    OTHER_POSITIONS = "other positions"
    # of the accelerate config
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
    # of a model under a layout
    BLOCKS_WITHOUT_A_PLAN = "blocks without a plan"
    SPLIT_NORMS_OF_HEADS = "split norms of heads"
    NO_EXPERTS = "no experts"
    OTHER_ATTENTION = "attention of another kind"
    WINDOW_OF_ATTENTION = "a window of attention"
    RING_ATTENTION = "ring attention"
    DROPOUT = "dropout"
    BLOCKS_THAT_ARE_NO_STAGES = "blocks that are no stages"
    # of the command line
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
    """Each of these knobs with any value but its default. Raises ValueError if there is none of
    that name.
    """
    if unknown := [key for key in keys if key not in KNOBS]:
        raise ValueError(f"there is no knob {unknown[0]}")
    return tuple(KnobSetting(key) for key in keys)


def choice(key: str, *values: str) -> tuple[KnobSetting, ...]:
    """A knob with each of these values. Raises ValueError if it cannot have one of them."""
    given(key)
    return tuple(KnobSetting(key, convert(KNOBS[key], value)) for value in values)


def recipe_settings(config: Config) -> Settings:
    """The settings of a recipe, with their values."""
    settings: Settings = {}
    for key, knob in KNOBS.items():
        value = get_value(config, key)
        words = f"{key} {str(value).lower() if isinstance(value, bool) else value}"
        if isinstance(value, str):
            settings[KnobSetting(key, value)] = words
        if value != knob.default:
            settings[KnobSetting(key)] = words
    data = config.data
    finetune = config.finetune
    if config.train.stages is not None:
        settings[KnobSetting("train.stages")] = "train.stages"  # without the list
    if has_conversations(data):
        settings[KnobSetting("data.format", "chat")] = "data.format chat"
    if is_mixture(data):
        settings[Setting.SEVERAL_SOURCES] = "data.source of several texts"
    for key in ("split", "validation_split"):
        split = getattr(data, key) or ""
        if "[" in split:
            settings[Setting.SLICE_OF_A_SPLIT] = f"data.{key} {split}"
    if finetune.freeze_layers is not None and finetune.unfreeze_every is None:
        # without gradual unfreezing they are frozen until the end
        frozen = settings[KnobSetting("finetune.freeze_layers")]
        settings[Setting.FROZEN_EMBEDDINGS] = frozen
    return settings
