"""The metric for the `evaluate` library, loaded by path and offline."""

import pytest
from accelerate import Accelerator

from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation.corpus import corpus_of
from nanogpt_hf.evaluation.loss import evaluate_text
from nanogpt_hf.model.build import load_model


def test_hf_metric_loads_by_path_and_equals_the_command(root, letter_model, monkeypatch, tmp_path):
    import evaluate  # takes long, and collection imports every test file

    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    metric = evaluate.load(str(root / "nanogpt_hf" / "evaluation" / "hf_metric.py"), cache_dir=str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    texts = ["abc fed hag bed?" * 4, "cab"]
    computed = metric.compute(predictions=texts, model=str(letter_model), stride=8)
    corpus = corpus_of(texts, build_tokenizer(str(letter_model), ()), "texts", "given")
    model = load_model(str(letter_model))
    expected = evaluate_text(Accelerator(), Mesh(), model, corpus, block_size=32, stride=8, batch_size=8)
    assert computed == pytest.approx(expected.figures())
    assert computed["perplexity"] > 1
    assert computed["tokens_predicted"] == 66
