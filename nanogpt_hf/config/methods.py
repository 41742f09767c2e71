"""The methods of training as a recipe knows them: what chooses a method, its defaults, the layouts
that honour its objective. The package methods/ has how they train.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from nanogpt_hf.config.settings import Rule, Setting, given, rules

# Layouts that do not have the whole model, or not whole sequences, on a process: some compute the
# loss of the next token by themselves. DDP and FSDP2 honour every objective.
LAYOUTS = (
    Setting.DEEPSPEED,
    Setting.TENSOR_PARALLELISM,
    Setting.CONTEXT_PARALLELISM,
    Setting.PIPELINE_STAGES,
    Setting.EXPERT_PARALLELISM,
)


class RecipeMethod(NamedTuple):
    """What a method of training changes in recipes."""

    knob: str  # a recipe that states it chooses the method; empty for the next token
    command: str
    defaults: dict[str, Any]  # they replace the defaults of fine-tuning
    sequences_per_step: int
    data: str  # what it trains on
    layouts: tuple[Setting, ...] = ()  # members of LAYOUTS that honour its objective
    terms: tuple[str, ...] = ()  # knobs of terms of the loss on text that its objective has, too


# A step of reinforcement learning has new completions, and its gradient is noisy.
_POLICY_DEFAULTS = {
    "data.order": "shuffled",
    # TRL's default for GRPO. Small models want a higher one.
    "optim.learning_rate": 1e-6,
    # As far below the default of fine-tuning as AdamW's rate is.
    "optim.muon_learning_rate": 3e-5,
    "optim.min_learning_rate": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0.0,
    "model.dropout": 0.0,
    "train.max_steps": 200,
    "train.micro_batch_size": 8,
    "eval.every": 20,
    "eval.patience": None,
    "checkpoint.every": 20,
    "tracking.every": 1,
}
# Rates are TRL's for DPO; small models want higher ones.
_PREFERENCE_DEFAULTS = {
    "align.loss": "dpo",
    "data.order": "shuffled",
    "optim.learning_rate": 1e-6,
    "optim.muon_learning_rate": 3e-5,
    "optim.min_learning_rate": 0.0,
    "optim.schedule": "linear",
    "optim.weight_decay": 0.0,
    "model.dropout": 0.0,
    "eval.patience": None,
}
# nanoGPT's config/finetune_shakespeare.py
SEQUENCES_PER_STEP = 32
# A recipe that states the knob of no method trains on the next token of text.
NEXT_TOKEN = RecipeMethod("", "finetune", {}, SEQUENCES_PER_STEP, "text", LAYOUTS)
POLICY = RecipeMethod(
    "rl.task", "rl", _POLICY_DEFAULTS, 64, "questions", terms=("distill.teacher",)
)
PREFERENCES = RecipeMethod("align.loss", "align", _PREFERENCE_DEFAULTS, 16, "pairs")
RECIPE_METHODS = [POLICY, PREFERENCES]


def recipe_method_of(value_of: Callable[[str], Any]) -> RecipeMethod:
    """The method that a recipe chooses, from a function that gives the values of its knobs."""
    chosen = (method for method in RECIPE_METHODS if value_of(method.knob))
    return next(chosen, NEXT_TOKEN)


def start_method_of(value_of: Callable[[str], Any]) -> RecipeMethod | None:
    """The method by which a recipe trains a model further; None if it trains from scratch."""
    method = recipe_method_of(value_of)
    return method if method is not NEXT_TOKEN or value_of("finetune.model") else None


def objective_rules(
    methods: Iterable[RecipeMethod], terms: Mapping[str, tuple[Setting, ...]]
) -> list[Rule]:
    """The layouts and the other methods that each method and each term of the loss on text does
    not combine with. `terms` has the layouts that honour a term, by its knob.
    """
    methods = list(methods)
    honoured = {method.knob: method.layouts for method in methods} | dict(terms)
    found: list[Rule] = []
    for key, layouts in honoured.items():
        found += rules(
            given(key),
            tuple(layout for layout in LAYOUTS if layout not in layouts),
            "its loss needs whole models or FSDP2's shards, and whole sequences",
            "use accelerate_configs/ddp.yaml or fsdp2.yaml",
        )
    for first, second in combinations(methods, 2):
        found += rules(
            given(first.knob), given(second.knob), "a run trains by one of them", "leave one out"
        )
    for key in terms:
        found += rules(
            given(key),
            given(*(method.knob for method in methods if key not in method.terms)),
            "it is added to the loss of the next token only",
            "leave it out",
        )
    return found
