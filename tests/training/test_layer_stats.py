"""Per-layer norms, which have no effect on the run; test_loop.py compares them with PyTorch."""

import pytest
import torch
from safetensors.torch import load_file

from nanogpt_hf.training.tracking import read_metrics

NAMES = ["embedding", "0", "1", "head"]


@pytest.mark.long
def test_layer_stats_change_no_number(start):
    options = {"model__dropout": 0.2, "train__max_steps": 5, "tracking__every": 2, "eval__every": 3}
    options["checkpoint__every"] = 9
    plain, measured = start("plain", **options), start("measured", tracking__layers=True, **options)
    first, second = (load_file(run.final / "model.safetensors") for run in (plain, measured))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    names = ("step", "train/loss", "train/grad_norm", "val/loss")
    rows = [
        [{k: event.get(k) for k in names} for event in read_metrics(run)]
        for run in (plain, measured)
    ]
    assert len(rows[0]) == 2 + 3
    assert rows[0] == rows[1]
    keys_by_event = [
        {key for key in event if key.startswith("layers/")} for event in read_metrics(measured)
    ]
    step_keys = {
        f"layers/{n}/{kind}" for n in NAMES for kind in ("grad_norm", "weight_norm", "update_ratio")
    }
    assert [keys for keys in keys_by_event if keys] == [step_keys, step_keys]
    assert not [key for event in read_metrics(plain) for key in event if key.startswith("layers/")]


def test_frozen_layers_have_no_norms(start, tiny_base, text_file):
    run = start(
        "tuned",
        model__n_layer=4,
        model__bias=True,
        model__activation_function="gelu_new",
        data__tokenizer=str(tiny_base),
        finetune__model=str(tiny_base),
        finetune__freeze_layers=2,
        tracking__layers=True,
        train__max_steps=2,
    )
    (last, _) = read_metrics(run)[-2:]
    norms = {key.split("/")[1] for key in last if key.startswith("layers/")}
    assert norms == {"2", "3", "head"}
