"""Resolve a fine-tuning recipe: sizes and tokenizer of the model to start from, and
fine-tuning's defaults.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.compatibility import check_settings, recipe_settings
from nanogpt_hf.config.finetune import finetune_defaults, rates_after
from nanogpt_hf.config.load import check_knobs, load_config
from nanogpt_hf.config.methods import NEXT_TOKEN, POLICY, RecipeMethod, recipe_method_of
from nanogpt_hf.config.names import (
    GPT2_NAMES,
    MADE_TOKENIZERS,
    data_folder,
    short_name,
    text_name,
)
from nanogpt_hf.config.schema import KNOBS, Config, get_value, replace_knobs
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.config.stated import Overrides, stated_knobs
from nanogpt_hf.config.values import convert
from nanogpt_hf.errors import ConfigError, DataError, UserError
from nanogpt_hf.own_files import notice_once
from nanogpt_hf.program import program
from nanogpt_hf.runs.find import find_model
from nanogpt_hf.runs.recipe import recipe_that_trained
from nanogpt_hf.tasks.task import check_name, is_generated

# Tokens of a block: a model of 131,072 positions should not start with blocks that long.
_LONGEST_DEFAULT = 1024

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def finetune_config(
    recipe: str | None, overrides: Overrides, method: RecipeMethod = NEXT_TOKEN
) -> tuple[Config, "PreTrainedConfig"]:
    """Resolve the recipe of a fine-tuning run; return it with the configuration of the model that
    it starts from.

    Sizes and tokenizer come from that model; other defaults are fine-tuning's, or the `method`'s.
    Raises UserError if there is no such model, and ConfigError if recipe or command line are wrong
    or contradict the model.
    """
    from nanogpt_hf.model.architecture import architecture_of
    from nanogpt_hf.model.checks import check_balance

    start = _find_start(recipe, overrides, method)
    stated = start.stated
    name = start.model
    base = start.base
    generated = is_generated(start.task)
    source = start.task if generated else _stated_value(stated, "data.source") or ""
    defaults = _defaults(start, method)
    config = load_config(recipe, overrides, defaults, f"{short_name(name)}-{text_name(source)}")
    if wrong := _contradictions(config, name, base):
        raise ConfigError(wrong)
    # An adapter is opened with the positions of its base, so LoRA does not combine with others.
    grows = config.model.n_positions > base.max_position_embeddings
    if grows or config.finetune.rope_theta is not None:
        other = {Setting.OTHER_POSITIONS: Setting.OTHER_POSITIONS.value}
        check_settings(recipe_settings(config) | other)
    check_balance(config, base)
    for key, rate in start.rates.items():
        if start.before and key not in stated:
            was = get_value(start.before, key)
            notice_once(f"{key} {rate:g}: the default for a model trained with {was:g}")
    # The recipe of the run folder names the exact commit, so that a resume starts from the same.
    resolved = {"finetune.model": name, "finetune.revision": start.revision}
    if generated:
        resolved["data.source"] = start.task
    # Learned positions beyond a block would not be trained.
    sizes = architecture_of(base).recipe_knobs(base)
    learned_positions = sizes.get("model.architecture", "gpt2") == "gpt2"
    if "model.n_positions" not in stated and learned_positions:
        resolved["model.n_positions"] = config.data.block_size
    if "data.dir" not in stated:
        resolved["data.dir"] = data_folder(source, config.data.tokenizer)
    return replace_knobs(config, resolved), base


def start_defaults(
    recipe: str | None, overrides: Overrides, method: RecipeMethod
) -> dict[str, Any]:
    """The defaults of a run that `finetune_config` resolves. Raises UserError without its model."""
    return _defaults(_find_start(recipe, overrides, method), method)


@dataclass(frozen=True)
class _Start:
    """What recipe and command line state, and the model that they start from."""

    stated: dict[str, Any]
    # The task of reinforcement learning, or ''.
    task: str
    # A model folder or Hub id, its commit (None for a folder) and its configuration.
    model: str
    revision: str | None
    base: "PreTrainedConfig"
    # The recipe of the run that trained it, if that is known, and the default rates that follow.
    before: Config | None
    rates: dict[str, float]


def _find_start(recipe: str | None, overrides: Overrides, method: RecipeMethod) -> _Start:
    from nanogpt_hf.model.load import load_base_config

    stated = stated_knobs(recipe, overrides)
    task = _check_stated(stated, method)
    name = str(stated["finetune.model"])
    # The Hub may take long to answer. A folder does not, so all its mistakes are reported at once.
    if not os.path.exists(os.path.expanduser(name)):
        check_knobs(recipe, overrides)
    try:
        model = find_model(name)
    except UserError as error:
        raise UserError(f"finetune.model: {error}") from None
    revision = stated.get("finetune.revision")
    base, commit = load_base_config(model, revision)
    # A method with a rate of its own does not follow that run.
    follows = "optim.learning_rate" not in method.defaults
    before = recipe_that_trained(model) if follows else None
    rates: dict[str, float] = {}
    if before:
        rates = rates_after(
            before,
            _value_or_default(stated, "optim.name"),
            lora=_stated_value(stated, "lora.rank") is not None,
            muon_scale=_value_or_default(stated, "optim.muon_scale"),
        )
    return _Start(stated, task, model, commit or revision, base, before, rates)


def _defaults(found: _Start, method: RecipeMethod) -> dict[str, Any]:
    """Collect the defaults of a run from a model, with its sizes and its tokenizer."""
    from nanogpt_hf.model.adapter_targets import lora_targets
    from nanogpt_hf.model.architecture import architecture_of

    stated = found.stated
    start = found.model
    base = found.base
    architecture = architecture_of(base)
    positions = base.max_position_embeddings
    # A recipe that states more positions than the model has wants blocks that long.
    longest = _stated_value(stated, "model.n_positions") or positions
    block_size = longest if longest > positions else min(positions, _LONGEST_DEFAULT)
    defaults = finetune_defaults(
        architecture.recipe_knobs(base),
        block_size=_stated_value(stated, "data.block_size") or block_size,
        max_steps=_stated_value(stated, "train.max_steps"),
        epochs=_stated_value(stated, "train.epochs"),
        lora=_stated_value(stated, "lora.rank") is not None,
        method=method,
        # A model that has learned without dropout starts worse with it.
        dropout=getattr(base, "dropout", None),
        muon_scale=_value_or_default(stated, "optim.muon_scale"),
        rates=found.rates,
    )
    defaults["data.tokenizer"] = "gpt2" if start in GPT2_NAMES else start
    defaults["lora.targets"] = list(lora_targets(architecture, base))
    return defaults


def _contradictions(config: Config, start: str, base: "PreTrainedConfig") -> list[str]:
    """A line for each knob that the model `start` cannot have."""
    from nanogpt_hf.model.adapter_targets import lora_targets
    from nanogpt_hf.model.architecture import architecture_of

    architecture = architecture_of(base)
    sizes = architecture.recipe_knobs(base) | {"model.pad_vocab_to_multiple_of": 1}
    wrong = [
        f"{key}: {start} has {value}; leave it out, fine-tuning changes no sizes"
        for key, value in sizes.items()
        if key != "model.n_positions" and get_value(config, key) != value
    ]
    targets = lora_targets(architecture, base)
    if not set(config.lora.targets) <= set(targets):
        experts = "; experts get no adapters" if architecture.sizes(base).idle else ""
        wrong.append(f"lora.targets: expected some of {', '.join(targets)}{experts}")
    try:
        architecture.resized_rope(base, config.model.n_positions, config.finetune.rope_theta)
    except ValueError as error:
        wrong.append(str(error))
    return wrong


def _check_stated(stated: dict[str, Any], method: RecipeMethod) -> str:
    """Return the task of reinforcement learning, or ''.

    Raises UserError if no model, text or task is stated, or if the recipe is for another command.
    """
    start = stated.get("finetune.model")
    command = f"{program()} {method.command}"
    if not start:
        raise UserError(
            f"{command}: needs a model to start from: --from gpt2, a model folder or a run folder"
        )
    other = recipe_method_of(stated.get)
    if other not in (NEXT_TOKEN, method):
        raise UserError(f"{command}: {other.knob} is for `{program()} {other.command}`")
    task = str(stated.get(POLICY.knob) or "") if method is POLICY else ""
    if method is POLICY and not task:
        raise UserError(f"{command}: no task: give --task arithmetic, or another {POLICY.knob}")
    if task:
        check_name(task)
    # A run records the name of the task as its source.
    if is_generated(task) and stated.get("data.source") not in (None, "", task):
        raise UserError(
            f"data.source: {task} generates its questions, so nothing reads "
            f"{stated['data.source']!r:.80}; leave it out, or choose a task on conversations"
        )
    if not stated.get("data.source") and not is_generated(task):
        raise UserError(f"{command}: needs {method.data} to train on: --data my.txt")
    return task


def _stated_value(stated: dict[str, Any], key: str) -> Any:
    """Read the value that recipe or command line state; None without one. A wrong value is None,
    too: `load_config` reports it.
    """
    try:
        return convert(KNOBS[key], stated[key])
    except (KeyError, ValueError):
        return None


def _value_or_default(stated: dict[str, Any], key: str) -> Any:
    """Read a stated value, or the default of every recipe."""
    value = _stated_value(stated, key)
    return KNOBS[key].default if value is None else value


def check_tokenizer(config: Config, base: "PreTrainedConfig") -> str:
    """Check that the recipe's tokenizer fits the model to start from, and return the hash of its
    vocabulary.

    It is the model's own tokenizer, or one with more tokens after the same ones: then `base`, the
    configuration of the model, gets their number. Raises UserError for any other tokenizer.
    """
    from nanogpt_hf.data.hf_tokenizer import vocabulary_hash
    from nanogpt_hf.data.tokenizer import build_tokenizer

    start = config.finetune.model
    name = config.data.tokenizer
    assert start is not None, "a recipe of fine-tuning names a model"
    own = None
    try:
        own = _own_tokenizer(start)
    except DataError:
        if name == start:
            raise UserError(
                f"{start}: has no tokenizer beside it; give the one that it was trained with, as a "
                "folder or Hub id: --data.tokenizer NAME"
            ) from None
    if name in MADE_TOKENIZERS:
        # These make a vocabulary of the new text, whose ids mean other tokens.
        given = None
    else:
        given = own if name == start and own is not None else build_tokenizer(name, ()).hf
    learned = own.get_vocab() if own is not None else {}
    # Every token that the model has learned must keep its id.
    if given is None or not learned.items() <= given.get_vocab().items():
        raise UserError(
            f"data.tokenizer: {name} is not the tokenizer of {start}, whose tokens the model "
            "has learned; leave it out, or add tokens to that one"
        )
    new = len(given) - len(learned) if learned else 0
    # A model may have more rows than its tokenizer has tokens, for padding, but not fewer.
    if len(given) - new > base.vocab_size:
        # Without data.tokenizer the model's own one would be compared, and refused.
        one = "the tokenizer that it was trained with"
        remedy = f"name {one}" if own is None else f"put {one} into {start}"
        raise UserError(
            f"data.tokenizer: {name} has {len(given):,} tokens, {start} only {base.vocab_size:,}; "
            f"{remedy}"
        )
    if new:
        settings = {Setting.NEW_TOKENS: f"data.tokenizer {name}, with {new} new tokens"}
        check_settings(recipe_settings(config) | settings)
    base.vocab_size = max(base.vocab_size, len(given))
    return vocabulary_hash(given)


def _own_tokenizer(start: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model to start from. Raises DataError if its folder has none."""
    from nanogpt_hf.data.hf_tokenizer import load_tokenizer
    from nanogpt_hf.data.tokenizer import build_tokenizer

    if start in GPT2_NAMES:
        return build_tokenizer("gpt2", ()).hf
    return load_tokenizer(start, "finetune.model")


def learned_ids(config: Config, data: Any) -> list[int] | None:
    """Find the ids of the tokens that the model to start from has learned, if the tokenizer of the
    prepared `data`, which `check_tokenizer` has accepted, has more; else None.
    """
    start = config.finetune.model
    # Synthetic data has no tokenizer.
    if start is None or start == config.data.tokenizer or data.tokenizer is None:
        return None
    try:
        own = _own_tokenizer(start)
    except DataError:
        return None
    return sorted(own.get_vocab().values()) if len(data.tokenizer) > len(own) else None
