"""The table of what does not combine: its names."""

from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.distributed.layout import Machine, machine_settings
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.optim.optimizer import all_rules

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
