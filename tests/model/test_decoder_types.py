"""Every type that docs/recipes.md lists: loss, gradients and logits of its folder are those of
transformers, no token sees a later one, what gets no gradient is frozen. No other type is accepted.
"""

import copy

import decoder_types as types
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from decoder_batch import batch, gradients
from nanogpt_hf.config.schema import Config
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import meta_model
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.load import load_model

PAGE = types.PAGE.read_text(encoding="utf-8")
pytestmark = [
    pytest.mark.slow,  # two minutes in all
    pytest.mark.skipif(
        not transformers.__version__.startswith("5.23."),
        reason="another version of transformers than the table's",
    ),
]


@pytest.mark.parametrize("architecture", types.accepted_types())
def test_type_of_the_table(architecture, tmp_path):
    model = types.tiny(architecture)
    twin = dict(meta_model(Config(), model.config).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(twin[name].requires_grad)
    row = architecture_of(model)
    row.write_model(tmp_path, model.config, model.state_dict())
    standard = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    if experts_of(standard):
        standard.set_experts_implementation("eager")
    inputs = batch(length=32) | {"num_items_in_batch": 7}
    ids = inputs["input_ids"]
    theirs = standard(**inputs, labels=ids, use_cache=False).loss
    ours = model(**inputs, skip_logits=True).loss
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    found = gradients(model, ours)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (found[name] is not None), name
    torch.testing.assert_close(found, gradients(standard, theirs), atol=1e-5, rtol=1e-5)
    # Labels of the last positions alone are enough for their loss.
    last = torch.full_like(ids, -100)
    last[:, -1] = ids[:, 0]
    losses = [
        model(**inputs | {"shift_labels": labels}, skip_logits=True).loss
        for labels in (last, last[:, -1:])
    ]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    again = load_model(str(tmp_path)).eval()
    torch.testing.assert_close(again(ids).logits, standard.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    # Also where the class computes those of all positions.
    two = standard(ids).logits[:, -2:]
    torch.testing.assert_close(again(ids, logits_to_keep=2).logits, two, atol=1e-5, rtol=1e-5)
    rows = again.logits_of_rows(2, input_ids=ids)(slice(None))
    torch.testing.assert_close(rows, two.flatten(0, 1), atol=1e-5, rtol=1e-5)
    assert row.recipe_knobs(copy.deepcopy(again.config)) == row.recipe_knobs(model.config)


def test_no_other_type_is_accepted():
    assert types.updated() == PAGE, "run `make docs`"
