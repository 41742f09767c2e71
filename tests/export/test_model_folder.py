"""Model folders: loading with transformers, atomic replacement."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.export.model_folder import replaced_folder, write_model_folder
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

CONFIG = GPTConfig(
    vocab_size=4,
    n_positions=8,
    n_embd=8,
    n_layer=1,
    n_head=2,
    bias=False,
    bos_token_id=None,
    eos_token_id=None,
)


def save(folder, seed: int = 0) -> GPTForCausalLM:
    torch.manual_seed(seed)
    model = GPTForCausalLM(CONFIG)
    tokenizer = char_tokenizer(list("abcd")).hf
    with replaced_folder(folder) as partial:
        weights = dict(model.named_parameters())
        write_model_folder(partial, CONFIG, weights, tokenizer, f"card {seed}")
    return model.eval()


def test_save_model_folder_loads_as_plain_gpt2(tmp_path):
    model = save(tmp_path / "best")
    opened, tokenizer = (
        auto.from_pretrained(tmp_path / "best") for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    tokens = torch.tensor([tokenizer("badcab")["input_ids"]])
    assert tokens.tolist() == [[1, 0, 3, 2, 0, 1]]
    torch.testing.assert_close(
        opened.eval()(tokens).logits, model(tokens).logits, atol=1e-6, rtol=0
    )
    assert (tmp_path / "best" / "README.md").read_text() == "card 0"


def test_save_model_folder_replaces_older_model(tmp_path):
    save(tmp_path / "best")
    (tmp_path / "best" / "left-over.txt").write_text("from the first save")
    second = save(tmp_path / "best", seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert not (tmp_path / "best" / "left-over.txt").exists()
    loaded = GPTForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(loaded.transformer.wte.weight, second.transformer.wte.weight)


def test_failed_save_keeps_older_model(tmp_path, monkeypatch):
    first = save(tmp_path / "best")
    monkeypatch.setattr(GPTForCausalLM, "save_pretrained", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "best", seed=1)
    monkeypatch.undo()
    loaded = GPTForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(loaded.transformer.wte.weight, first.transformer.wte.weight)
    save(tmp_path / "best", seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
