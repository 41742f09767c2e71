"""Methods: a row of the test trains, resumes bit for bit, and is refused where it cannot run."""

import dataclasses

import pytest
import torch
from torch.nn.functional import logsigmoid

from assertions import column, copy_at, weights
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.layout import Machine, machine_settings
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.loss import evaluate_blocks
from nanogpt_hf.training import methods
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.methods import TEXT, Method, method_of
from nanogpt_hf.training.run import Evaluated
from nanogpt_hf.training.start import prepare_run

BETA = 0.5


class Pairs(Blocks):
    """Blocks of two halves: a text, which is preferred, and the same text backwards."""

    def __init__(self, blocks):
        self.blocks, self.block_size = blocks, blocks.block_size

    def __len__(self):
        return len(self.blocks)

    def batch(self, indices):
        """(pairs, 2, tokens)."""
        ids = self.blocks.batch(indices)["input_ids"][:, : self.block_size // 2]
        pairs = torch.stack([ids, ids.flip(1)], 1)
        return {"input_ids": pairs[..., :-1], "shift_labels": pairs[..., 1:]}

    def num_targets(self, indices):
        return len(indices)


def load_pairs(config):
    data = TEXT.load(config)
    return dataclasses.replace(data, train=Pairs(data.train), validation=Pairs(data.validation))


def preference(model, batch):
    labels = batch["shift_labels"].flatten(0, 1)
    log_probs = model(input_ids=batch["input_ids"].flatten(0, 1)).logits.log_softmax(-1)
    of_targets = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    preferred, other = of_targets.sum(-1).unflatten(0, (-1, 2)).unbind(1)
    margin, counts = preferred - other, batch["shift_labels"][:, 0, 0] != -100
    return -(logsigmoid(BETA * margin) * counts).sum(), {"accuracy": ((margin > 0) * counts).sum()}


def evaluate_pairs(run, stopping):
    loss = evaluate_blocks(
        run.accelerator,
        run.mesh,
        run.model,
        run.objective,
        run.data.validation,
        micro_batch_size=run.batches.micro_batch_size,
        tokens=run.config.eval.tokens,
        bytes_per_token=1.0,
        stopping=stopping,
    ).loss
    return Evaluated(loss, None, {"val/loss": loss}, [f"preference loss {loss:.4f}"], [])


PAIRS = Method(
    "pairs",
    is_chosen=lambda config: config.name == "pairs",
    load=load_pairs,
    objective=lambda config, _: preference,
    evaluate=evaluate_pairs,
    describe_best=lambda score: f"best preference loss {score:.4f}",
)


@pytest.fixture
def config(tmp_path, make_recipe, monkeypatch):
    monkeypatch.setattr(methods, "METHODS", [PAIRS, *methods.METHODS])
    knobs = {"model__dropout": 0.1, "eval__tokens": 160, "checkpoint__keep": 9}
    return load_config(make_recipe(tmp_path / "pairs.yaml", **knobs))


@pytest.mark.long
def test_row_of_another_method_trains_and_resumes_bit_for_bit(config, tmp_path, forget_accelerate):
    assert method_of(config) is PAIRS
    run = train(prepare_run(config, tmp_path / "run"))
    losses = column(run, "val/loss")
    assert losses[6] < losses[0] < 0.8  # log 2 for a model that knows nothing
    assert max(column(run, "train/accuracy").values()) > 0.5
    resumed = copy_at(run, 4, tmp_path / "resumed")
    forget_accelerate()
    train(prepare_run(config, resumed.path, resume=True))
    assert column(run, "train/loss") == column(resumed, "train/loss")
    assert column(run, "val/loss") == losses
    ours, theirs = weights(resumed), weights(run)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"cp_size": 2}])
def test_method_is_refused_on_a_layout_that_cannot_run_it(config, sizes):
    settings = machine_settings(Mesh(0, 2, **sizes), Machine("fsdp"))
    TEXT.check(settings)
    with pytest.raises(UserError, match="training by pairs does not combine with"):
        PAIRS.check(settings)
