"""Resolve a recipe as the command that trains it does: from scratch, from a model, by a method."""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import NEXT_TOKEN, RecipeMethod, start_method_of
from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.config.schema import Config, get_value
from nanogpt_hf.config.stated import Overrides, stated_knobs
from nanogpt_hf.data.manifest import OTHER_FOLDER, find_manifest
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.methods.finetuning import check_tokenizer, finetune_config, start_defaults

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Resolved(NamedTuple):
    """A resolved recipe, and the command that trains it."""

    command: str
    config: Config
    # The configuration of the model to start from; None from scratch.
    base: "PreTrainedConfig | None" = None


def resolve(recipe: str | None, overrides: Overrides) -> Resolved:
    """Resolve a recipe for the command that its knobs choose. Raises what that command raises."""
    method = start_method_of(stated_knobs(recipe, overrides).get)
    if method is None:
        return Resolved("pretrain", load_config(recipe, overrides))
    return Resolved(method.command, *resolve_from_model(recipe, overrides, method))


def defaults_of(recipe: str | None, overrides: Overrides) -> dict[str, Any]:
    """The defaults of the knobs that recipe and overrides do not state, where they differ from the
    schema's: the defaults of fine-tuning or of a method. Raises UserError without the model.
    """
    method = start_method_of(stated_knobs(recipe, overrides).get)
    return start_defaults(recipe, overrides, method) if method else {}


def resolve_from_model(
    recipe: str | None, overrides: Overrides, method: RecipeMethod
) -> tuple[Config, "PreTrainedConfig"]:
    """Resolve the recipe of a run that starts from a model, and check that tokenizer and prepared
    data are the model's; return it with the configuration of the model.
    """
    config, base = finetune_config(recipe, overrides, method)
    vocabulary = check_tokenizer(config, base)
    # The ids in data that was prepared with another tokenizer mean other tokens to this model.
    # Other methods prepare data of their own.
    manifest = find_manifest(config.data) if method is NEXT_TOKEN else None
    if manifest and manifest.tokenizer_hash != vocabulary:
        raise DataError(
            f"{config.data.dir}: prepared with another tokenizer than {config.data.tokenizer}; if "
            f"that has changed, put it back, else {OTHER_FOLDER}"
        )
    return config, base


def missing_path(config: Config) -> str | None:
    """The first knob of a recipe whose path does not exist here, with its value; None if all do."""
    for key in ("finetune.model", "distill.teacher"):
        name = get_value(config, key)
        try:
            # A name that may be on the Hub is looked up where it is loaded.
            if name is not None:
                folder_or_hub_id(name)
        except UserError:
            return f"{key} {name}"
    files = [("rl.tools", tool, tool) for tool in config.rl.tools if tool.endswith(".py")]
    if config.rl.reward:
        files.append(("rl.reward", config.rl.reward, config.rl.reward.rpartition(":")[0]))
    for key, value, file in files:
        if not os.path.isfile(os.path.expanduser(file)):
            return f"{key} {value}"
    return None
