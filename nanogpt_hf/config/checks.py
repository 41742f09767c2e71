"""Rules over knobs that hold on every machine and with all data, each with its message."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from nanogpt_hf.config.compatibility import refused_in_recipe
from nanogpt_hf.config.method_sections import LORA_TARGETS
from nanogpt_hf.config.methods import NEXT_TOKEN, POLICY, recipe_method_of
from nanogpt_hf.config.optim_section import FAMILIES, LARGEST_BETA, MATRIX_FAMILIES, OptimSection
from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.settings import KnobSetting
from nanogpt_hf.config.sources import is_mixture, learns_teacher_alone, sources_of
from nanogpt_hf.config.stages import stage_problem, stages_of
from nanogpt_hf.config.step_size import uneven_step
from nanogpt_hf.formatting import plural

# The name of a repository on the Hub, user/name, by the Hub's own rules: no -- or .. in it, at most
# 96 characters, no .git at its end.
REPO_ID = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))(?=.{3,96}$)[A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII
)


class Conflict(NamedTuple):
    """A rule that is broken. The message is about the first of the knobs that the rule reads."""

    keys: list[str]
    message: str


# The knobs that a rule reads, whether it is broken, and its message.
Rules = Iterator[tuple[str, object, str]]


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Every rule that `config` breaks, in all its stages."""
    found = list(_conflicts(config))
    yield from found
    if stage_problem(config):
        yield from stage_conflicts(config)
        return
    # A later stage repeats most knobs, and so most conflicts. Report a conflict of a stage only if
    # the stage brings it about.
    known = {conflict.message for conflict in found}
    for stage in stages_of(config)[1:]:
        for keys, message in _conflicts(stage.config):
            if message not in known:
                known.add(message)
                yield Conflict(["train.stages", *keys], f"at {stage.first}: {keys[0]}: {message}")


def stage_conflicts(config: Config) -> Iterator[Conflict]:
    """The rules without which the stages of `config` cannot be listed."""
    if problem := stage_problem(config):
        yield Conflict(["train.stages", "train.max_steps", "data.source"], problem)


def _conflicts(config: Config) -> Iterator[Conflict]:
    for rule, message in refused_in_recipe(config).items():
        keys = [setting.key for setting in rule[:2] if isinstance(setting, KnobSetting)]
        yield Conflict(keys, message.removeprefix(f"{keys[0]} "))
    rules = [_data_rules, _model_rules, _schedule_rules, _step_rules, _finetune_rules, _hub_rules]
    method = recipe_method_of(partial(get_value, config))
    if method is POLICY:
        rules.append(_rl_rules)
    if method is NEXT_TOKEN and not config.data.source:
        yield Conflict(["data.source"], "required: the text to train on, for example python-docs")
    for part in rules:
        for keys, broken, message in part(config):
            if broken:
                yield Conflict(keys.split(), message)


def _data_rules(config: Config) -> Rules:
    data = config.data
    for source in sources_of(data):
        yield (
            "data.validation_fraction data.validation_split data.source",
            not source.data.validation_fraction and not source.data.validation_split,
            "must be above 0 if data.validation_split is not given",
        )
    yield (
        "data.vocab_size data.tokenizer",
        data.tokenizer == "bpe" and data.vocab_size is None,
        "required by data.tokenizer bpe, for example 4096",
    )


def _model_rules(config: Config) -> Rules:
    model = config.model
    block_size = config.data.block_size
    start = config.finetune.model
    # Each head has an equal share of the channels.
    yield (
        "model.n_embd model.n_head",
        model.n_embd % model.n_head,
        f"{model.n_embd} is not a multiple of model.n_head {model.n_head}",
    )
    yield (
        "model.n_kv_head model.n_head",
        model.n_kv_head and model.n_head % model.n_kv_head,
        f"{model.n_kv_head} does not divide model.n_head {model.n_head}",
    )
    for name, value in model.extra.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        yield (
            "model.extra model.architecture",
            "drop" in name and is_number and not 0 <= value < 1,
            f"{name} {value} is not from 0 to below 1",
        )
    reason = f": {start} was trained with no more; use a shorter one" if start else ""
    yield (
        "data.block_size model.n_positions finetune.model",
        block_size > model.n_positions,
        f"{block_size} is longer than model.n_positions {model.n_positions}{reason}",
    )


def _schedule_rules(config: Config) -> Rules:
    """The rules over times, the schedule and the rates of the optimizer."""
    optim = config.optim
    train = config.train
    for key in ("train.max_time", "train.budget"):
        text = get_value(config, key)
        yield (
            key,
            text is not None and not parse_duration(text),
            f"expected a time such as 11h30m, 45m or 90s, got {text!r:.80}",
        )
    yield (
        "train.epochs data.source",
        train.epochs is not None and is_mixture(config.data),
        f"{train.epochs or 0:g}: a mixture reads each of its sources another number of times; set "
        "train.max_steps",
    )
    # A schedule of its own length may be longer than the run.
    end = "optim.decay_steps" if optim.decay_steps else "train.max_steps"
    last = optim.decay_steps or train.max_steps
    warmup_steps = optim.warmup_in(train.max_steps)
    longest = optim.longest_warmup(last)
    yield (
        "optim.warmup_steps",
        warmup_steps != round(warmup_steps),
        f"{warmup_steps} is neither a number of steps nor a share below 1",
    )
    yield (
        f"optim.warmup_steps {end}",
        # With train.budget and train.epochs the steps are compared when the run starts.
        train.steps_from is None and warmup_steps > last,
        f"{warmup_steps} is more than {end} {last}; below 1 it is a share of the steps, like 0.05",
    )
    yield (
        f"optim.warmup_steps optim.decay_fraction {end}",
        train.steps_from is None and longest < warmup_steps <= last,
        f"{plural(round(warmup_steps), 'step')} of warm-up and {last - longest} of decay are more "
        f"than {end} {last}: the rate would fall at once; lower optim.warmup_steps or "
        "optim.decay_fraction",
    )
    lowest = optim.lowest_learning_rate
    yield (
        "optim.min_learning_rate optim.learning_rate",
        SCHEDULES[optim.schedule].ends and lowest > optim.learning_rate,
        f"{lowest} is above optim.learning_rate {optim.learning_rate}; null is a tenth of that",
    )
    yield (
        "optim.learning_rate optim.name",
        optim.name == "muon" and not optim.learning_rate,
        "must be above 0 with muon, whose learning rate follows the same schedule",
    )
    yield from _family_rules(optim)


def _family_rules(optim: OptimSection) -> Rules:
    """The rules over what the optimizer sets for some kinds of parameters."""
    for name, noun in (("rates", "factors"), ("weight_decays", "decays")):
        for family, value in getattr(optim, name).items():
            yield (
                f"optim.{name}",
                family not in FAMILIES or not _is_number(value, 1000),
                f"expected {noun} of 0 to 1000 for {', '.join(FAMILIES)}, got {family!r:.80}: "
                f"{value!r:.80}",
            )
    for family, betas in optim.betas.items():
        is_pair = isinstance(betas, list | tuple) and len(betas) == 2
        yield (
            "optim.betas",
            family not in FAMILIES
            or not is_pair
            or not all(_is_number(beta, LARGEST_BETA) for beta in betas),
            f"expected two numbers of 0 to {LARGEST_BETA} for {', '.join(FAMILIES)}, got "
            f"{family!r:.80}: {betas!r:.80}",
        )
        yield (
            "optim.betas optim.name",
            optim.name == "muon" and family in MATRIX_FAMILIES,
            f"Muon updates {family}, with optim.muon_momentum and without betas; leave {family} "
            "out",
        )


def _is_number(value: Any, limit: float) -> bool:
    """Whether a value of a mapping is a number of 0 to `limit`. NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit


def _step_rules(config: Config) -> Rules:
    """The rules over the micro-batches of a step."""
    train = config.train
    # The groups of micro-batches are the leaves of a binary tree of sums, so their number is a
    # power of two: a number n without a second bit has n & (n - 1) == 0. Each group has the same
    # number of micro-batches.
    groups = train.gradient_groups or 1
    sequences = train.tokens_per_step // config.data.block_size
    micro_batches = sequences // train.min_micro_batch_size
    uneven_tree = groups & (groups - 1)
    # Only if the sequences would do.
    lower = "" if sequences % groups else "lower train.micro_batch_size, or "
    yield (
        "train.gradient_groups",
        uneven_tree,
        f"{groups} is no power of two; nearest: "
        f"{2 ** (groups.bit_length() - 1)} or {2 ** groups.bit_length()}",
    )
    yield (
        "train.gradient_groups train.tokens_per_step train.micro_batch_size",
        not uneven_tree and micro_batches % groups,
        f"{groups} does not divide the {micro_batches} micro-batches of a step; {lower}set "
        "other train.tokens_per_step",
    )
    uneven = uneven_step(config)
    yield "train.tokens_per_step train.micro_batch_size data.block_size", uneven, uneven


def _finetune_rules(config: Config) -> Rules:
    model = config.model
    finetune = config.finetune
    lora = config.lora
    yield (
        "finetune.freeze_layers finetune.model model.n_layer",
        finetune.model and (finetune.freeze_layers or 0) > model.n_layer,
        f"{finetune.freeze_layers} is more than the model's {model.n_layer} blocks",
    )
    # methods/finetuning.py checks those of another architecture
    unknown = model.architecture == "gpt2" and not set(lora.targets) <= set(LORA_TARGETS)
    yield (
        "lora.targets model.architecture",
        not lora.targets or unknown,
        f"expected some of {', '.join(LORA_TARGETS)}",
    )


def _hub_rules(config: Config) -> Rules:
    hub = config.hub
    yield (
        "hub.repo",
        hub.repo is not None and not REPO_ID.fullmatch(hub.repo),
        f"expected user/name, got {hub.repo!r:.80}",
    )
    yield (
        "hub.license",
        hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license),
        f"expected the Hub's name of a license, such as mit, got {hub.license!r:.80}",
    )


def _rl_rules(config: Config) -> Rules:
    """The rules over the knobs of reinforcement learning."""
    rl = config.rl
    block_size = config.data.block_size
    # A completion takes one sequence of the step, and all completions of a question are in the
    # same step: their mean reward is the baseline of their advantages.
    sequences = config.train.tokens_per_step // block_size
    for knob, size in (("rl.samples", rl.samples), ("rl.batch_size", rl.batch_size or 1)):
        yield (
            f"{knob} train.tokens_per_step data.block_size",
            sequences % size,
            f"{size} does not divide the {plural(sequences, 'sequence')} of a step; set a divisor, "
            "or other train.tokens_per_step",
        )
    # A teacher alone needs no baseline, and nothing that shapes the rewards' part of the loss.
    only_taught = learns_teacher_alone(config)
    yield (
        "rl.samples distill.weight",
        rl.samples == 1 and not only_taught,
        "1 is its own baseline, so that every advantage is 0; set 2 or more, or distill.teacher "
        "with distill.weight 1",
    )
    for name in ("rl.kl", "rl.clip", "rl.scale_advantages"):
        value = get_value(config, name)
        yield (
            f"{name} distill.weight",
            only_taught and value != KNOBS[name].default,
            f"{str(value).lower()} is read only with rewards, and distill.weight 1 leaves them "
            "out; leave it out, or lower distill.weight",
        )
    yield (
        "rl.max_new_tokens data.block_size",
        rl.max_new_tokens >= block_size,
        f"{rl.max_new_tokens} leaves no room for a question in data.block_size {block_size}; lower "
        "it, or set longer blocks",
    )


def parse_duration(text: str) -> int | None:
    """Seconds of a duration: `11h30m` -> 41400; None if it is not a duration."""
    # More digits would be longer than a lifetime.
    parts = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text, re.ASCII)
    if parts is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return hours * 3600 + minutes * 60 + seconds
