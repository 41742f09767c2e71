"""The table of what does not combine: its names, and rules that no cell of a layout shows."""

import pytest

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.distributed.layout import Machine, check_layout, machine_settings
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import ConfigError, UserError
from nanogpt_hf.optim.optimizer import all_rules

TUNED = {"finetune.model": "gpt2"}
RL = TUNED | {"rl.task": "arithmetic"}
# of a recipe, a model, a tokenizer and the command line
DERIVED = {"several sources", "a slice of a split", "frozen embeddings", "new tokens"}
DERIVED |= {"blocks without a plan", "split norms of heads", "attention of another kind"}
DERIVED |= {"a window of attention", "dropout", "ring attention", "blocks that are no stages"}
DERIVED |= {"no experts", "other positions", "--auto-resume", "--resume", "--overwrite"}


def test_every_name_in_the_table_is_one_that_a_run_can_have():
    whole = {"pp_size": 2, "pp_schedule": "zero_bubble", "stated_sizes": {"dp_replicate_size": 4}}
    copied = Machine("none", "fp16", compiles=True, checkpoints="selective", reshards=True)
    of_machine = machine_settings(Mesh(0, 8, **whole), Machine("fsdp", "bf16")).keys()
    of_machine |= machine_settings(Mesh(0, 2), Machine("zero", "fp8", compression="bf16")).keys()
    of_machine |= machine_settings(Mesh(0, 2), copied).keys()
    of_machine |= machine_settings(Mesh(0, 4, cp_size=2, tp_size=2), Machine("fsdp")).keys()
    of_machine |= machine_settings(Mesh(0, 2, tp_size=2), Machine("fsdp")).keys()
    sends = Machine("fsdp", sends_weights=True)
    of_machine |= machine_settings(Mesh(0, 2, ep_size=2), sends).keys()
    named = {name for rule in all_rules() for name in (rule.a, rule.b)}
    unknown = {name for name in named if name.partition(" ")[0] not in KNOBS}
    assert unknown <= of_machine | DERIVED


@pytest.mark.parametrize(
    ("knobs", "sharding", "names"),
    [
        ({"optim.state": "8bit"}, "zero", ("optim.state 8bit", "DeepSpeed")),
        (
            TUNED | {"finetune.freeze_layers": 2, "finetune.unfreeze_every": 3},
            "zero",
            ("finetune.unfreeze_every 3", "DeepSpeed"),
        ),
        (TUNED | {"lora.rank": 4, "lora.quantize": "8bit"}, "fsdp", ("lora.quantize", "FSDP2")),
        (TUNED | {"lora.rank": 4, "lora.quantize": "4bit"}, "none", ("lora.quantize", "a CPU")),
        (TUNED | {"lora.rank": 4, "optim.name": "muon"}, "none", ("lora.rank 4", "muon")),
    ],
)
def test_recipe_that_a_machine_cannot_train_is_refused(knobs, sharding, names):
    config = load_config(None, {"data.source": "x", "data.block_size": 1024} | knobs, name="x")
    check_layout(load_config(None, {"data.source": "x"}, name="x"), Mesh(), Machine(sharding))
    with pytest.raises(UserError) as error:
        check_layout(config, Mesh(), Machine(sharding))
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("knobs", "keys"),
    [
        (RL | {"train.micro_batch_size": "auto"}, ["train.micro_batch_size: auto"]),
        (
            {"data.tokenizer": "bpe", "data.vocab_size": 300, "data.streaming": "true"},
            ["data.streaming: true"],
        ),
        ({"optim.state": "8bit", "optim.name": "muon"}, ["optim.state: 8bit"]),
        (
            {"data.format": "chat", "data.order": "random", "data.tokenizer": "char"},
            ["data.tokenizer: char", "data.order: random"],
        ),
    ],
)
def test_recipe_that_contradicts_itself_is_refused_with_all_problems(knobs, keys):
    values = {"data.source": "x", "data.order": "shuffled"} | knobs
    with pytest.raises(ConfigError) as error:
        load_config(None, values, name="x")
    found = [problem.partition(" does")[0].lstrip("-") for problem in error.value.problems]
    assert found == keys
