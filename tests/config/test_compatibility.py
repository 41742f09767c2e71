"""The table of what does not combine: its settings are those that a run can have."""

import pytest

from nanogpt_hf.config import optimizers
from nanogpt_hf.config.compatibility import RULES
from nanogpt_hf.config.schema import KNOBS, kind_options
from nanogpt_hf.config.settings import KnobSetting, Rule, Setting
from nanogpt_hf.config.values import convert
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import launch_settings
from nanogpt_hf.optim.optimizer import OPTIMIZERS

# found in a recipe, a model, a tokenizer and on the command line
OF_NO_MACHINE = {
    Setting.SEVERAL_SOURCES,
    Setting.SLICE_OF_A_SPLIT,
    Setting.FROZEN_EMBEDDINGS,
    Setting.NEW_TOKENS,
    Setting.OTHER_POSITIONS,
    Setting.BLOCKS_WITHOUT_A_PLAN,
    Setting.SPLIT_NORMS_OF_HEADS,
    Setting.NO_EXPERTS,
    Setting.OTHER_ATTENTION,
    Setting.WINDOW_OF_ATTENTION,
    Setting.RING_ATTENTION,
    Setting.DROPOUT,
    Setting.BLOCKS_THAT_ARE_NO_STAGES,
    Setting.AUTO_RESUME,
    Setting.RESUME,
    Setting.OVERWRITE,
}


def test_every_setting_is_one_that_a_run_can_have_and_a_rule_names():
    several = [
        Launch(
            8,
            pp_size=2,
            pp_schedule="zero_bubble",
            sharding="fsdp",
            dp_replicate_size=4,
            precision="bf16",
        ),
        Launch(2, sharding="zero", precision="fp8", compression="bf16"),
        Launch(2, precision="fp16", compiler="inductor", checkpointing="selective", reshards=True),
        Launch(4, cp_size=2, tp_size=2, sharding="fsdp"),
        Launch(2, tp_size=2, sharding="fsdp", device="cpu"),
        Launch(2, ep_size=2, sharding="fsdp", sends_weights=True),
    ]
    of_machine = {setting for launch in several for setting in launch_settings(launch)}
    assert of_machine | OF_NO_MACHINE == set(Setting)
    named = {setting for rule in RULES for setting in (rule.a, rule.b)}
    assert {setting for setting in named if isinstance(setting, Setting)} == set(Setting)


def misspelt(rules):
    """The knobs of rules that do not exist or cannot have the value."""
    found = []
    for rule in rules:
        for setting in (rule.a, rule.b):
            if isinstance(setting, KnobSetting):
                try:
                    assert setting.value is None or convert(KNOBS[setting.key], setting.value)
                except (KeyError, ValueError):
                    found.append(setting)
    return found


def test_every_knob_of_a_rule_exists_and_can_have_its_value():
    assert sum(isinstance(rule.a, KnobSetting) for rule in RULES) > 20
    assert misspelt(RULES) == []


@pytest.mark.parametrize(
    "words", ["optim.name muonn", "data.format chatt", "optim.state 8bits", "data.fromat chat"]
)
def test_a_misspelt_knob_or_value_is_found(words):
    wrong = KnobSetting(*words.split())
    assert misspelt([Rule(wrong, Setting.DEEPSPEED, "", "")]) == [wrong]
    assert misspelt([Rule(Setting.DEEPSPEED, wrong, "", "")]) == [wrong]


def test_every_choice_of_an_optimizer_can_be_built():
    assert {name for name, _ in OPTIMIZERS} == set(optimizers.OPTIMIZERS)
    assert {state for _, state in OPTIMIZERS} == set(kind_options(KNOBS["optim.state"].kind))
