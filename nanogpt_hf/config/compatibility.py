"""What does not combine: one table, read by the checks, by docs/machines.md and by the tests.

A rule (config/settings.py) names two settings that a run cannot have at once. `recipe_settings`
finds the settings of a recipe; distributed/layout.py finds the settings of the accelerate config
and of a model.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from nanogpt_hf.config import data_section, method_sections, optimizers, run_sections
from nanogpt_hf.config.formats import FORMATS, rules_of
from nanogpt_hf.config.methods import RECIPE_METHODS, objective_rules
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.settings import (
    FSDP2,
    AnySetting,
    KnobSetting,
    Rule,
    Setting,
    Settings,
    given,
    rules,
)
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.errors import UserError

RULES = [
    # Each feature of a recipe states what it refuses, where it is declared.
    *data_section.RULES,
    *(rule for name, row in FORMATS.items() for rule in rules_of(name, row)),
    *run_sections.RULES,
    *optimizers.RULES,
    *method_sections.RULES,
    *objective_rules(
        RECIPE_METHODS,
        {key: knob.layouts for key, knob in KNOBS.items() if knob.layouts is not None},
    ),
    # What the layouts of the accelerate config and the models do not combine with.
    *rules(
        Setting.FP16,
        (
            Setting.TENSOR_PARALLELISM,
            Setting.CONTEXT_PARALLELISM,
            Setting.PIPELINE_STAGES,
            Setting.EXPERT_PARALLELISM,
            *given("train.gradient_groups"),
        ),
        "its loss scaler looks for overflows on each process alone",
        "set bf16 or 'no'",
    ),
    *rules(
        Setting.FP16,
        Setting.DEEPSPEED,
        "no checkpoint has its loss scale",
        "set bf16",
    ),
    *rules(
        Setting.FP8,
        given("lora.quantize"),
        "bitsandbytes multiplies by its weights",
        "set bf16",
    ),
    *rules(
        (
            Setting.TENSOR_PARALLELISM,
            Setting.CONTEXT_PARALLELISM,
            Setting.PIPELINE_STAGES,
            Setting.EXPERT_PARALLELISM,
        ),
        Setting.DEEPSPEED,
        "DeepSpeed shards over all processes",
        "take FSDP2, as in accelerate_configs/tp_fsdp2.yaml and the like",
    ),
    *rules(
        Setting.PIPELINE_STAGES,
        Setting.CONTEXT_PARALLELISM,
        "a stage does not share positions",
        "set cp_size 1",
    ),
    *rules(
        Setting.TENSOR_PARALLELISM,
        Setting.DDP,
        "it does not take split matrices",
        "take accelerate_configs/tp_fsdp2.yaml, with dp_shard_size for dp_replicate_size",
    ),
    *rules(
        Setting.CONTEXT_PARALLELISM,
        Setting.UNSHARDED,
        "FSDP2 sums the gradients of the parts of a sequence",
        "take accelerate_configs/cp_fsdp2.yaml",
    ),
    *rules(
        Setting.TENSOR_PARALLELISM,
        Setting.FSDP2_OVER_ONE_PROCESS,
        "there is nothing to shard over",
        "set distributed_type MULTI_GPU, as in accelerate_configs/tp.yaml, or dp_shard_size",
    ),
    *rules(
        Setting.GRADIENT_COMPRESSION,
        (Setting.FSDP2, Setting.DEEPSPEED, Setting.TENSOR_PARALLELISM, Setting.PIPELINE_STAGES),
        "only gradients that DDP all-reduces are compressed",
        "set ddp_comm_hook no, or use accelerate_configs/ddp.yaml",
    ),
    *rules(
        Setting.EXPERT_PARALLELISM,
        Setting.NO_EXPERTS,
        "there is nothing to share",
        "set ep_size 1",
    ),
    *rules(
        Setting.EXPERT_PARALLELISM,
        (
            Setting.TENSOR_PARALLELISM,
            Setting.CONTEXT_PARALLELISM,
            Setting.PIPELINE_STAGES,
            Setting.HSDP,
        ),
        "experts are shared by data-parallel ranks only",
        "set ep_size 1, or the other sizes 1",
    ),
    *rules(
        Setting.EXPERT_PARALLELISM,
        Setting.SENT_WEIGHTS,
        "each process keeps experts of its own model",
        "set fsdp_cpu_ram_efficient_loading false",
    ),
    *rules(
        Setting.BLOCKS_WITHOUT_A_PLAN,
        Setting.TENSOR_PARALLELISM,
        "its blocks cannot be split",
        FSDP2,
    ),
    *rules(
        Setting.COMPILATION,
        Setting.SPLIT_NORMS_OF_HEADS,
        "torch cannot compile them",
        "set dynamo_backend 'NO'",
    ),
    *rules(
        (Setting.OTHER_ATTENTION, Setting.WINDOW_OF_ATTENTION),
        Setting.CONTEXT_PARALLELISM,
        "only whole causal attention is shared",
        FSDP2,
    ),
    *rules(
        Setting.DROPOUT,
        Setting.TENSOR_PARALLELISM,
        "each process would draw the same masks for its heads",
        "set model.dropout 0",
    ),
    *rules(
        Setting.DROPOUT,
        Setting.RING_ATTENTION,
        "its backward pass would draw other masks",
        "set model.dropout 0",
    ),
    *rules(
        Setting.BLOCKS_THAT_ARE_NO_STAGES,
        Setting.PIPELINE_STAGES,
        "a stage passes on one tensor, and computes its part of the loss",
        FSDP2,
    ),
    *rules(
        Setting.COMPILATION,
        Setting.ZERO_BUBBLE,
        "a compiled block runs its backward pass as a whole",
        "set dynamo_backend 'NO', or pp_schedule 1f1b",
    ),
    *rules(
        Setting.SELECTIVE_CHECKPOINTING,
        Setting.COMPILATION,
        "a compiled block decides itself what it keeps",
        "set it true or a number, or dynamo_backend 'NO'",
    ),
    *rules(
        Setting.ACTIVATION_CHECKPOINTING,
        Setting.ZERO_BUBBLE,
        "the gradients of a block's weights would repeat its forward pass",
        "set fsdp_activation_checkpointing false, or pp_schedule 1f1b",
    ),
    *rules(
        Setting.RESHARDING,
        Setting.ZERO_BUBBLE,
        "a stage's weights stay gathered until the end of a step",
        "set fsdp_reshard_after_forward false, or pp_schedule 1f1b",
    ),
    # Rules of the command line.
    *rules(
        Setting.AUTO_RESUME,
        (Setting.RESUME, Setting.OVERWRITE),
        "it decides whether to resume",
        "give it alone",
    ),
    *rules(
        Setting.OVERWRITE,
        Setting.RESUME,
        "one continues the run, the other removes it",
        "give one of them",
    ),
]


def recipe_settings(config: Config) -> Settings:
    """The settings of a recipe, with their values."""
    settings: Settings = {}
    for key, knob in KNOBS.items():
        value = get_value(config, key)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        # A value may be as long as a file.
        words = f"{key} {shown:.80}"
        if isinstance(value, str):
            settings[KnobSetting(key, value)] = words
        if value != knob.default:
            settings[KnobSetting(key)] = words
    data = config.data
    finetune = config.finetune
    if config.train.stages is not None:
        # The list itself would not fit into a line.
        settings[KnobSetting("train.stages")] = "train.stages"
    # A mixture has the settings of each of its formats with a mask.
    for source in sources_of(data):
        if FORMATS[source.data.format].learned:
            setting = KnobSetting("data.format", source.data.format)
            settings[setting] = setting.describe()
    if is_mixture(data):
        settings[Setting.SEVERAL_SOURCES] = "data.source of several texts"
    for key in ("split", "validation_split"):
        split = getattr(data, key) or ""
        if "[" in split:
            settings[Setting.SLICE_OF_A_SPLIT] = f"data.{key} {split}"
    if finetune.freeze_layers is not None and finetune.unfreeze_every is None:
        # Gradual unfreezing reaches the embeddings at last; without it they stay frozen.
        frozen = settings[KnobSetting("finetune.freeze_layers")]
        settings[Setting.FROZEN_EMBEDDINGS] = frozen
    return settings


def refused(settings: Container[AnySetting]) -> Iterator[Rule]:
    """The rules that a run with these settings breaks."""
    return (rule for rule in RULES if rule.a in settings and rule.b in settings)


def refused_in_recipe(config: Config) -> dict[Rule, str]:
    """The rules that a recipe breaks on every machine, with their messages."""
    found = {}
    for data in (config.data, *(source.data for source in sources_of(config.data))):
        settings = recipe_settings(replace(config, data=data))
        found |= {rule: rule.message(settings) for rule in refused(settings)}
    return found


def check_settings(settings: Mapping[AnySetting, str]) -> None:
    """Raises UserError if a run cannot have these settings at once."""
    for rule in refused(settings):
        raise UserError(rule.message(settings))
