"""What does not combine: one table, read by the checks, by docs/machines.md and by the tests.

A rule names two settings that a run cannot have at once. A recipe's settings are its knobs, as
`optim.name muon`, or `lora.rank` for any value but the default. distributed/layout.py names those
of the accelerate config and of a model. The rows of optimizers (optim/optimizer.py) add rules.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import has_conversations, is_mixture, sources_of
from nanogpt_hf.errors import UserError

FSDP2 = "use accelerate_configs/fsdp2.yaml"

# a, the setting to change; b; reason; remedy. `x | y` stands for a row for each of them.
_ROWS = [
    # in a recipe
    (
        "data.tokenizer char | data.tokenizer bpe",
        "several sources",
        "it is made from one text",
        "use gpt2 or a tokenizer's folder, such as data/NAME/tokenizer of another prepared text",
    ),
    (
        "data.tokenizer char | data.tokenizer bpe",
        "data.format datatrove",
        "it is made from text, and datatrove has made the tokens",
        "name the tokenizer that it used",
    ),
    (
        "data.streaming | data.max_tokens",
        "data.tokenizer char | data.tokenizer bpe",
        "this tokenizer is made from the whole text",
        "use gpt2 or a tokenizer's folder",
    ),
    (
        "data.streaming",
        "a slice of a split",
        "streaming reads whole splits",
        "set data.max_tokens to read the first documents only",
    ),
    ("data.max_bad_rows", "data.format datatrove", "its tokens have no rows", "leave it out"),
    ("data.format datatrove", "align.loss", "pairs are rows of text or messages", "leave it out"),
    ("data.tokenizer char", "data.format chat", "no token ends an answer", "use gpt2"),
    ("data.source python-docs", "data.format chat", "it is text", "name a file of conversations"),
    ("data.order random", "data.format chat", "it would cut conversations", "use shuffled"),
    ("data.order random", "data.packing documents", "it would cut documents", "use shuffled"),
    (
        "data.packing documents | data.mask",
        "data.format chat | data.format datatrove | rl.task | align.loss",
        "only rows of text are documents there",
        "leave it out",
    ),
    (
        "optim.state 8bit",
        "optim.name muon",
        "8-bit state is for adamw only",
        "leave one of them out",
    ),
    ("train.stages", "finetune.model", "only pretraining has stages", "leave it out"),
    ("train.stages", "DeepSpeed", "DeepSpeed keeps the batch of its start", FSDP2),
    (
        "train.micro_batch_size auto",
        "DeepSpeed",
        "DeepSpeed keeps the batch of its start",
        "set a number",
    ),
    (
        "lora.rank",
        "finetune.freeze_layers",
        "LoRA freezes the whole model",
        "leave finetune.freeze_layers out",
    ),
    (
        "lora.rank | frozen embeddings",
        "new tokens",
        "the new tokens would not be learned",
        "leave it out",
    ),
    (
        "lora.rank",
        "other positions",
        "an adapter is opened with its base's positions",
        "leave model.n_positions and finetune.rope_theta out",
    ),
    (
        "lora.quantize",
        "lora.merge",
        "an adapter cannot be merged into quantized weights",
        "leave lora.merge out, and merge with cli.py export RUN OUT",
    ),
    (
        "train.micro_batch_size auto",
        "train.stages | finetune.unfreeze_every | rl.task | align.loss | distill.teacher",
        "auto measures a first step on text, of one model",
        "set a number",
    ),
    (
        "data.streaming | data.max_tokens",
        "data.format datatrove | rl.task | align.loss",
        "tokens of datatrove, questions and pairs are read whole",
        "leave it out",
    ),
    ("data.order random", "rl.task", "questions are drawn once per epoch", "use shuffled"),
    ("train.rollback_ratio", "rl.task | align.loss", "its loss has no trend", "leave it out"),
    ("finetune.unfreeze_every", "rl.task | align.loss", "not supported there", "leave it out"),
    (
        "train.gradient_groups",
        "rl.task | align.loss | train.micro_batch_size auto",
        "its sums depend on processes or on free memory",
        "leave it out",
    ),
    (
        "optim.balance_loss",
        "rl.task | align.loss",
        "it is added to the loss of the next token only",
        "leave it out",
    ),
    # with the accelerate config
    (
        "optim.balance_loss",
        "context parallelism | pipeline stages",
        "it is a function of all routers and of whole sequences",
        FSDP2,
    ),
    (
        "rl.task | align.loss | distill.teacher | train.gradient_groups",
        "DeepSpeed | tensor parallelism | context parallelism | pipeline stages | "
        "expert parallelism",
        "it needs whole models or FSDP2's shards, and whole sequences",
        "use accelerate_configs/ddp.yaml or fsdp2.yaml",
    ),
    ("rl.task", "align.loss", "a run trains by one of them", "leave one out"),
    ("distill.teacher", "rl.task | align.loss", "a run trains by one of them", "leave one out"),
    (
        "mixed_precision fp16",
        "tensor parallelism | context parallelism | pipeline stages | expert parallelism | "
        "train.gradient_groups",
        "its loss scaler looks for overflows on each process alone",
        "set bf16 or 'no'",
    ),
    ("mixed_precision fp16", "DeepSpeed", "no checkpoint has its loss scale", "set bf16"),
    (
        "mixed_precision fp8",
        "lora.quantize",
        "bitsandbytes multiplies by its weights",
        "set bf16",
    ),
    (
        "tensor parallelism | context parallelism | pipeline stages | expert parallelism",
        "DeepSpeed",
        "DeepSpeed shards over all processes",
        "take FSDP2, as in accelerate_configs/tp_fsdp2.yaml and the like",
    ),
    (
        "pipeline stages",
        "context parallelism",
        "a stage does not share positions",
        "set cp_size 1",
    ),
    (
        "tensor parallelism",
        "DDP",
        "it does not take split matrices",
        "take accelerate_configs/tp_fsdp2.yaml, with dp_shard_size for dp_replicate_size",
    ),
    (
        "context parallelism",
        "unsharded models",
        "FSDP2 sums the gradients of the parts of a sequence",
        "take accelerate_configs/cp_fsdp2.yaml",
    ),
    (
        "tensor parallelism",
        "FSDP2 over one process",
        "there is nothing to shard over",
        "set distributed_type MULTI_GPU, as in accelerate_configs/tp.yaml, or dp_shard_size",
    ),
    (
        "ddp_comm_hook",
        "FSDP2 | DeepSpeed | tensor parallelism | pipeline stages",
        "only gradients that DDP all-reduces are compressed",
        "set ddp_comm_hook no, or use accelerate_configs/ddp.yaml",
    ),
    (
        "train.gradient_groups",
        "ddp_comm_hook",
        "its sums are those of one process",
        "set ddp_comm_hook no",
    ),
    ("expert parallelism", "no experts", "there is nothing to share", "set ep_size 1"),
    (
        "expert parallelism",
        "tensor parallelism | context parallelism | pipeline stages | HSDP",
        "experts are shared by data-parallel ranks only",
        "set ep_size 1, or the other sizes 1",
    ),
    (
        "expert parallelism",
        "fsdp_cpu_ram_efficient_loading",
        "each process keeps experts of its own model",
        "set fsdp_cpu_ram_efficient_loading false",
    ),
    ("blocks without a plan", "tensor parallelism", "its blocks cannot be split", FSDP2),
    (
        "dynamo_backend",
        "split norms of heads",
        "torch cannot compile them",
        "set dynamo_backend 'NO'",
    ),
    (
        "attention of another kind | a window of attention",
        "context parallelism",
        "only whole causal attention is shared",
        FSDP2,
    ),
    (
        "data.format chat | data.mask",
        "ring attention",
        "its kernels take no masks",
        "set a cp_size that divides the heads, or " + FSDP2,
    ),
    (
        "dropout",
        "tensor parallelism",
        "the masks of a process's heads would be those of the others",
        "set model.dropout 0",
    ),
    (
        "dropout",
        "ring attention",
        "its backward pass would draw other masks",
        "set model.dropout 0",
    ),
    (
        "blocks that are no stages",
        "pipeline stages",
        "a stage passes on one tensor, and computes its part of the loss",
        FSDP2,
    ),
    (
        "dynamo_backend",
        "pp_schedule zero_bubble",
        "a compiled block runs its backward pass as a whole",
        "set dynamo_backend 'NO', or pp_schedule 1f1b",
    ),
    (
        "fsdp_activation_checkpointing selective",
        "dynamo_backend",
        "a compiled block decides itself what it keeps",
        "set it true or a number, or dynamo_backend 'NO'",
    ),
    (
        "fsdp_activation_checkpointing",
        "pp_schedule zero_bubble",
        "the gradients of a block's weights would repeat its forward pass",
        "set fsdp_activation_checkpointing false, or pp_schedule 1f1b",
    ),
    (
        "fsdp_reshard_after_forward",
        "pp_schedule zero_bubble",
        "a stage's weights stay gathered until the end of a step",
        "set fsdp_reshard_after_forward false, or pp_schedule 1f1b",
    ),
    ("lora.rank", "tensor parallelism", "matrices of adapters are not split", FSDP2),
    (
        "lora.rank | finetune.freeze_layers | finetune.layer_decay",
        "pipeline stages",
        "it is not supported there",
        FSDP2,
    ),
    (
        "lora.quantize",
        "FSDP2 | DeepSpeed | expert parallelism",
        "weights in 8 or 4 bits cannot be sharded",
        "use accelerate_configs/ddp.yaml",
    ),
    (
        "lora.quantize 4bit",
        "a CPU",
        "bitsandbytes 0.50 packs the weights at the first evaluation, and cannot unpack them",
        "use 8bit, or a GPU",
    ),
    (
        "finetune.unfreeze_every",
        "DeepSpeed",
        "DeepSpeed has one step count for all parameters, and unfrozen ones start at 0",
        FSDP2,
    ),
    ("tracking.layers", "DeepSpeed", "DeepSpeed gives no access to gradients and weights", FSDP2),
    (
        "train.gradient_groups",
        "FSDP2 in bf16",
        "FSDP2 rounds the parameters, one process the products",
        "use accelerate_configs/ddp.yaml",
    ),
    # on the command line
    ("--auto-resume", "--resume | --overwrite", "it decides whether to resume", "give it alone"),
    ("--overwrite", "--resume", "one continues the run, the other removes it", "give one of them"),
]


class Rule(NamedTuple):
    """Two settings that do not combine: `a` is the one to change."""

    a: str
    b: str
    reason: str
    remedy: str

    def message(self, settings: Mapping[str, str]) -> str:
        """The rule in one line, with the values of a run's settings."""
        named = f"{settings[self.a]} does not combine with {settings[self.b]}"
        return f"{named}: {self.reason}; {self.remedy}"


RULES = [
    Rule(a, b, reason, remedy)
    for left, right, reason, remedy in _ROWS
    for a in left.split(" | ")
    for b in right.split(" | ")
]


def recipe_settings(config: Config) -> dict[str, str]:
    """The settings of a recipe by name, with their values."""
    settings = {}
    for key, knob in KNOBS.items():
        value = get_value(config, key)
        named = f"{key} {str(value).lower() if isinstance(value, bool) else value}"
        settings[named] = named
        if value != knob.default:
            settings[key] = named
    if "train.stages" in settings:
        settings["train.stages"] = "train.stages"  # without the list
    data, finetune = config.data, config.finetune
    if has_conversations(data):
        settings["data.format chat"] = "data.format chat"
    if is_mixture(data):
        settings["several sources"] = "data.source of several texts"
    for key in ("split", "validation_split"):
        if "[" in (split := getattr(data, key) or ""):
            settings["a slice of a split"] = f"data.{key} {split}"
    if finetune.freeze_layers is not None and finetune.unfreeze_every is None:
        settings["frozen embeddings"] = settings["finetune.freeze_layers"]
    return settings


def refused(settings: Mapping[str, str], rules: Iterable[Rule] = RULES) -> Iterator[Rule]:
    """The rules that a run with these settings breaks."""
    return (rule for rule in rules if rule.a in settings and rule.b in settings)


def refused_in_recipe(config: Config) -> dict[Rule, str]:
    """The rules that a recipe breaks on every machine, with their messages."""
    found = {}
    for data in (config.data, *(source.data for source in sources_of(config.data))):
        settings = recipe_settings(replace(config, data=data))
        found |= {rule: rule.message(settings) for rule in refused(settings)}
    return found


def check_settings(settings: Mapping[str, str], rules: Iterable[Rule] = RULES) -> None:
    """Raises UserError if a run cannot have these settings at once."""
    for rule in refused(settings, rules):
        raise UserError(rule.message(settings))
