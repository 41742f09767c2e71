"""Methods: a row of the test trains and resumes bit for bit."""

import dataclasses

import pytest
from torch.nn.functional import cross_entropy

from assertions import column, copy_at, same_weights
from nanogpt_hf.config import methods
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import RecipeMethod
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.evaluation.loss import evaluate_blocks
from nanogpt_hf.methods import method, table
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.run import Evaluated
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.methods.text import TEXT
from nanogpt_hf.planning.estimate import estimate
from nanogpt_hf.planning.estimate_lines import estimate_lines
from nanogpt_hf.reports.comparison import score_of
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.start import prepare_run


class Halves(Blocks):
    """The first half of each block, each of which counts as one target."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.block_size = blocks.block_size // 2

    def __len__(self):
        return len(self.blocks)

    def batch(self, indices):
        batch = self.blocks.batch(indices)
        return {name: tensor[:, : self.block_size] for name, tensor in batch.items()}

    def num_targets(self, indices):
        return len(indices)


def load_halves(config):
    data = TEXT.load(config)
    return dataclasses.replace(data, train=Halves(data.train), validation=Halves(data.validation))


def last_token_loss(model, batch):
    """The loss of the last token of a sequence, and how often it is the most probable one."""
    logits = model(input_ids=batch["input_ids"]).logits[:, -1]
    labels = batch["shift_labels"][:, -1]
    right = (logits.argmax(-1) == labels).sum()
    return cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), {"accuracy": right}


def evaluate_halves(run, stopping):
    loss = evaluate_blocks(
        run.accelerator,
        run.model,
        run.objective,
        run.data.validation,
        micro_batch_size=run.batches.micro_batch_size,
        tokens=run.config.eval.tokens,
        bytes_per_token=1.0,
        stopping=stopping,
    ).loss
    return Evaluated(loss, None, {"val/loss": loss}, [f"loss of the last token {loss:.4f}"], [])


RECIPE = RecipeMethod("data.max_epochs", "halves", {}, 16, "text")


def halves() -> Method:
    return Method(
        "halves",
        recipe=RECIPE,
        load=load_halves,
        objective=lambda config, _: last_token_loss,
        evaluate=evaluate_halves,
        describe_best=lambda score: f"best loss of the last token {score:.4f}",
    )


@pytest.fixture
def config(tmp_path, make_recipe, monkeypatch):
    for module in (methods, method):
        monkeypatch.setattr(module, "RECIPE_METHODS", [RECIPE])
    monkeypatch.setattr(table, "METHODS", [halves(), *table.METHODS])
    knobs = {
        "data__max_epochs": 99,
        "model__dropout": 0.1,
        "eval__tokens": 160,
        "checkpoint__keep": 9,
    }
    return load_config(make_recipe(tmp_path / "halves.yaml", **knobs))


def test_estimate_compares_tokens_of_text_alone(config):
    on_halves = replace_knobs(config, {"data.tokenizer": "gpt2"})
    on_text = replace_knobs(on_halves, {"data.max_epochs": None})
    lines = []
    for each in (on_halves, on_text):
        figures = estimate(each, Launch())
        lines.append("\n".join(estimate_lines(figures, Launch())))
    assert [text.count("not prepared yet") for text in lines] == [0, 1]
    assert [text.count("compute-optimal") for text in lines] == [0, 1]


@pytest.mark.long
def test_row_of_another_method_trains_and_resumes_bit_for_bit(config, tmp_path, forget_accelerate):
    assert method_of(config).name == "halves"
    run = train(prepare_run(config, tmp_path / "run"))
    losses = column(run, "val/loss")
    assert losses[6] < losses[0] - 0.1
    assert 0 <= min(column(run, "train/accuracy").values()) < 1
    resumed = copy_at(run, 4, tmp_path / "resumed")
    forget_accelerate()
    train(prepare_run(config, resumed.path, resume=True))
    assert column(run, "train/loss") == column(resumed, "train/loss")
    assert column(run, "val/loss") == losses
    assert same_weights(resumed, run)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"distill.teacher": "big"},
        {"align.loss": "dpo"},
        {"align.loss": "kto"},
        {"rl.task": "arithmetic"},
        {"rl.task": "arithmetic", "distill.teacher": "big"},
        {"rl.task": "arithmetic", "distill.teacher": "big", "distill.weight": 1.0},
    ],
    ids=str,
)
def test_reports_know_the_score_of_each_method(knobs):
    config = replace_knobs(Config(), knobs)
    assert score_of(config) == method_of(config).score.metric
