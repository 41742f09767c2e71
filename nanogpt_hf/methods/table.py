"""Table of the methods of training, and the one of a recipe."""

from functools import partial

from nanogpt_hf.config.methods import recipe_method_of
from nanogpt_hf.config.schema import Config, get_value
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.on_policy import ON_POLICY, TAUGHT_POLICY
from nanogpt_hf.methods.policy import POLICY
from nanogpt_hf.methods.preferences import KTO, PREFERENCES
from nanogpt_hf.methods.text import DISTILLATION, TEXT

# Variants of a method are before it, the most special one first.
METHODS = [ON_POLICY, TAUGHT_POLICY, POLICY, KTO, PREFERENCES, DISTILLATION, TEXT]


def method_of(config: Config) -> Method:
    """Find the method that a recipe chooses; config/compatibility.py refuses a recipe with two."""
    recipe = recipe_method_of(partial(get_value, config))
    variants = [method for method in METHODS if method.recipe is recipe]
    return next(method for method in variants if method.is_meant(config))
