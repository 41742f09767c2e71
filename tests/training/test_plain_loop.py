"""The plain loop (examples/plain_loop.py) computes what the package's loop does, bit for bit."""

import runpy

import pytest

import nanogpt_hf
from assertions import column
from nanogpt_hf.config.load import load_config
from nanogpt_hf.model import GPTForCausalLM
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run

pytestmark = pytest.mark.long


# As the quickstart; and with what it does not have: AdamW, two micro-batches, no clipping.
@pytest.mark.parametrize(
    "knobs",
    [{}, {"optim.name": "adamw", "train.micro_batch_size": 4, "optim.max_grad_norm": 0.0}],
)
def test_plain_loop_equals_the_package(monkeypatch, capsys, tmp_path, text_file, root, knobs):
    short = {"train.max_steps": 10, "eval.every": 5, "tracking.every": 1, "model.n_embd": 32}
    files = {"data.source": str(text_file), "data.dir": str(tmp_path / "data")}
    config = load_config("quickstart", short | files | knobs)
    run = loop.train(prepare_run(config, tmp_path / "run"))

    monkeypatch.setattr(nanogpt_hf, "load_config", lambda recipe: config)
    plain = runpy.run_path(str(root / "examples" / "plain_loop.py"))

    assert plain["losses"] == list(column(run, "train/loss").values())
    assert plain["final_loss"] == column(run, "val/loss")[10]
    trained = plain["model"].state_dict()
    saved = GPTForCausalLM.from_pretrained(run.final).state_dict()
    assert [name for name in trained if not trained[name].equal(saved[name])] == []
    assert "step 10: validation loss" in capsys.readouterr().out
