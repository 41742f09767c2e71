"""Table of the methods of training; the first one that a recipe chooses is its method."""

from nanogpt_hf.config.schema import Config
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.on_policy import ON_POLICY, TAUGHT_POLICY
from nanogpt_hf.methods.policy import POLICY
from nanogpt_hf.methods.preferences import KTO, PREFERENCES
from nanogpt_hf.methods.text import DISTILLATION, TEXT

# A teacher makes another method of reinforcement learning, so such rows are before it. The next
# token of text is last, since every recipe could choose it.
METHODS = [ON_POLICY, TAUGHT_POLICY, POLICY, KTO, PREFERENCES, DISTILLATION, TEXT]


def method_of(config: Config) -> Method:
    """Find the method that a recipe chooses; config/compatibility.py refuses a recipe with two."""
    return next(method for method in METHODS if method.is_chosen(config))
