"""Runs on documents: they resume exactly, say what is padding, and refuse models that leak."""

import json
import random

import pytest

from assertions import column, copy_at, same_weights


@pytest.fixture
def rows_file(tmp_path):
    draw, path = random.Random(0), tmp_path / "rows.jsonl"
    words = ["the", "cat", "sat", "on", "a", "mat"]
    texts = (" ".join(draw.choices(words, k=draw.randrange(1, 12))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("packing", "mask"), [("documents", None), ("documents", "documents"), ("packed", "documents")]
)
def test_run_resumes_exactly_and_prints_the_padding(
    train, rows_file, byte_tokenizer, tmp_path, caplog, packing, mask
):
    options = {"data__source": str(rows_file), "data__tokenizer": str(byte_tokenizer)}
    options |= {"data__packing": packing, "data__mask": mask, "data__order": "shuffled"}
    options |= {"train__max_steps": 6, "checkpoint__every": 2, "checkpoint__keep": 9}
    with caplog.at_level("INFO", "nanogpt_hf"):
        run = train(tmp_path / "run", **options)
    assert ("blocks of whole documents, " in caplog.text) == (packing == "documents")
    resumed = copy_at(run, 2, tmp_path / "resumed")
    train(resumed.path, resume=True, **options)
    assert same_weights(run, resumed)
    assert column(run, "train/loss") == column(resumed, "train/loss")


def test_decoder_that_leaks_is_refused(pretrain, rows_file, byte_tokenizer):
    knobs = {"data.source": rows_file, "data.tokenizer": byte_tokenizer, "data.mask": "documents"}
    knobs |= {"model.architecture": "opt", "model.n_head": 2}
    options = [word for key, value in knobs.items() for word in (f"--{key}", value)]
    ended = pretrain(*options)
    assert ended.status == 2
    assert "attend to those of others" in ended.line
