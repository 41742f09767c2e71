"""GGUF files: weights, tokens of both kinds of tokenizer, and refusals."""

import pytest
import torch

from nanogpt_hf.data.tokenizer import char_tokenizer, gpt2_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from nanogpt_hf.export.gguf import export_gguf  # noqa: E402


def make(**changes) -> GPTForCausalLM:
    small = {"vocab_size": 6, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPTForCausalLM(GPTConfig(**small | {"bos_token_id": None, "eos_token_id": None} | changes))


def reader_of(folder) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(folder / "model.gguf").fields.items()}


def test_export_gguf_writes_characters_with_escapes(tmp_path):
    difference, tanh_difference = export_gguf(tmp_path, make(tie_word_embeddings=False), TOKENIZER, torch.float32)
    assert difference < 1e-5
    assert tanh_difference is None  # the model has gelu_new, as GGUF's readers
    facts = reader_of(tmp_path)
    assert facts["general.architecture"] == "gpt2"
    assert facts["gpt2.context_length"] == 12
    assert facts["tokenizer.ggml.model"] == "rwkv"
    assert facts["tokenizer.ggml.tokens"] == [r"\t", r"\n", " ", r"\\", "é", "日"]
    assert facts["tokenizer.ggml.unknown_token_id"] == 2
    assert "tokenizer.ggml.eos_token_id" not in facts
    assert "output.weight" in {tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}


TOKENIZER = char_tokenizer(sorted("é日\\\n\t ")).hf


def test_export_gguf_writes_gpt2_tokens_and_padding(tmp_path):
    model = make(vocab_size=50304, eos_token_id=50256, activation_function="gelu")
    export_gguf(tmp_path, model, gpt2_tokenizer().hf, torch.bfloat16)
    facts = reader_of(tmp_path)
    assert facts["tokenizer.ggml.model"] == "gpt2"
    tokens = facts["tokenizer.ggml.tokens"]
    assert [len(tokens), tokens[262], tokens[50256], tokens[50257]] == [50304, "Ġthe", "<|endoftext|>", "[PAD50257]"]
    assert facts["tokenizer.ggml.merges"][0] == "Ġ t"
    assert facts["tokenizer.ggml.eos_token_id"] == 50256


def test_export_gguf_refuses_what_the_format_lacks(tmp_path):
    for model, tokenizer, message in (
        (make(activation_function="relu"), TOKENIZER, "its gpt2 has no relu activation, only GELU"),
        (make(), None, "a GGUF file contains the tokenizer, and this model has none"),
        (make(vocab_size=5), TOKENIZER, "6 tokens in the tokenizer, 5 in the model"),
        (make(vocab_size=60000), other_tokenizer(), "can only write GPT-2's tokenizer or one of characters"),
    ):
        with pytest.raises(UserError, match=message):
            export_gguf(tmp_path, model, tokenizer, torch.float32)


def other_tokenizer():
    tokenizer = char_tokenizer(list("abc")).hf
    tokenizer.add_tokens(["whole"])
    return tokenizer
