"""Training on a mixture: it reports each source, and refuses other weights."""

import random

import numpy as np
import pytest
import torch

from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.summary import repetition_warnings
from nanogpt_hf.errors import DataError, RunFolderError
from nanogpt_hf.reports.comparison import compare_runs, summarize
from nanogpt_hf.runs.metrics import read_metrics

pytestmark = pytest.mark.long
WORDS = {
    "web": "the cat sat on a mat",
    "code": "def x return y if z",
    "math": "one plus two is three",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, (name, words) in enumerate(WORDS.items()):
        draw = random.Random(number)
        lines = (
            " ".join(draw.choices(words.split(), k=6)) + "\n" for _ in range(200 - 60 * number)
        )
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def knobs(texts, byte_tokenizer):
    return {"data__source": sources(texts), "data__tokenizer": str(byte_tokenizer)}


def sources(texts, weights=(7, 2, 1)) -> list[dict]:
    names = zip(WORDS, weights, strict=True)
    return [{"source": f"{texts}/{name}.txt", "weight": weight} for name, weight in names]


@pytest.fixture
def recipe(write_recipe, knobs):
    return lambda **overrides: write_recipe(**knobs | overrides)


@pytest.mark.one_row_per
@pytest.mark.parametrize("weights", [(14, 4, 2), (0.7, 0.2, 0.1), ("0.35", 0.1, 0.05)])
def test_equal_proportions_of_other_weights_resume(start, texts, weights):
    start(train__max_steps=2)
    run = start(resume=True, train__max_steps=3, data__source=sources(texts, weights))
    assert read_metrics(run)[-1]["step"] == 3


def test_losses_and_epochs_of_each_source_are_logged_and_compared(start):
    run = start()
    events = read_metrics(run)
    last = next(event for event in reversed(events) if "val/loss" in event)
    parts = [last[f"val/loss/{name}"] for name in WORDS]
    assert last["val/loss"] == pytest.approx(np.dot(parts, [0.7, 0.2, 0.1]), rel=1e-12)
    assert len(set(parts)) == 3
    epochs = [event["train/epochs/web"] for event in events if "train/loss" in event]
    data = load_prepared(load_config(run.recipe))
    per_step = 128 // 16
    counts = [data.train.interleave.counts(per_step * step)[0] for step in range(1, 7)]
    np.testing.assert_allclose(epochs, np.array(counts) / len(data.train.parts[0]))
    summary = summarize(events, "val/loss", "val/loss")
    table = compare_runs(dict.fromkeys(("one", "other"), summary), "val/loss")
    assert f"{last['val/loss/math']:.4f}" in table


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_a_source_has_the_order_and_the_blocks_that_it_has_alone(recipe, order):
    config = load_config(recipe(data__order=order))
    prepare(config)
    blocks = load_prepared(config).train
    options = {"order": order, "seed": 5, "micro_batch_size": 20}
    mixed = Batches(blocks, accumulation=1, **options)
    starts = np.cumsum([0, *blocks.lengths])
    sources, numbers = blocks.interleave(np.arange(80, 100))
    assert len(set(sources.tolist())) == 3
    (batch,) = mixed.micro_batches(4)
    for row, (source, number) in enumerate(zip(sources, numbers, strict=True)):
        index = mixed.indices(4)[row : row + 1] - starts[source]
        if order == "shuffled":  # the other order draws for each step
            alone = Batches(blocks.parts[source], accumulation=100, **options)
            assert index == alone.indices(0)[number]
        for name, tensor in blocks.parts[source].batch(index).items():
            assert torch.equal(batch[name][row], tensor[0])
    assert mixed.num_targets(4) == (batch["shift_labels"] != -100).sum()


def test_other_weights_need_no_other_tokens_and_are_refused_on_resume(start, recipe, texts):
    run = start(train__max_steps=2)
    other = {"data__source": sources(texts, (3, 2, 1))}
    equal = load_config(recipe(data__source=sources(texts, (1, 1, 1))))
    _, prepared_now = prepare(equal)
    assert not prepared_now
    with pytest.raises(RunFolderError, match=r"data.source: .*weight.*7.* -> .*3"):
        start(resume=True, **other)
    run.recipe.write_text(recipe(**other).read_text())  # a checkpoint records the weights too
    with pytest.raises(RunFolderError, match="weights: web 7, code 2, math 1 -> web 3"):
        start(resume=True, **other)


def test_a_source_read_too_often_is_named_before_the_run(recipe):
    config = load_config(recipe(data__max_epochs=0.1, train__max_steps=20))
    prepare(config)
    data = load_prepared(config)
    (line,) = [line for line in repetition_warnings(config, data) if "math" in line]
    count = data.train.interleave.counts(20 * 128 // 16)[2] / data.train.lengths[2]
    assert f"data.max_epochs: math is read {count:,.2f} times in 20 steps" in line
    assert repetition_warnings(load_config(recipe(data__max_epochs=1000)), data) == []


def test_folders_of_one_source_and_of_a_mixture_are_not_confused(
    recipe, write_recipe, texts, byte_tokenizer
):
    single = load_config(
        write_recipe(data__source=f"{texts}/web.txt", data__tokenizer=str(byte_tokenizer))
    )
    prepare(single)
    with pytest.raises(
        DataError, match="holds the prepared data of one source, and the recipe mixes several"
    ):
        prepare(load_config(recipe()))


def test_a_source_prepared_by_another_recipe_is_used_where_it_is(
    recipe, write_recipe, texts, byte_tokenizer, tmp_path
):
    single = {"data__tokenizer": str(byte_tokenizer), "data__dir": str(tmp_path / "web")}
    prepare(load_config(write_recipe(data__source=f"{texts}/web.txt", **single)))
    source = [
        {"source": f"{texts}/web.txt", "weight": 1, "dir": str(tmp_path / "web")},
        {"source": f"{texts}/code.txt", "weight": 1},
    ]
    config = load_config(recipe(data__source=source))
    prepare(config)
    assert not (tmp_path / "data" / "web").exists()
    assert len(load_prepared(config).train.lengths) == 2
