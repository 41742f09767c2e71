"""GGUF files: weights, tokens of both kinds of tokenizer, and refusals."""

import json
import re

import jinja2
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, pre_tokenizers

from assertions import refusal
from nanogpt_hf.data.bpe import GPT4_PATTERN, QWEN_PATTERN
from nanogpt_hf.data.chat_examples import answer_finder
from nanogpt_hf.data.tokenizer import (
    char_tokenizer,
    train_bpe_tokenizer,
)
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.layout_gpt import gpt2_state_dict

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from nanogpt_hf.export.gguf import export_gguf  # noqa: E402


def make(**changes) -> GPTForCausalLM:
    small = {"vocab_size": 6, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPTForCausalLM(
        GPTConfig(**small | {"bos_token_id": None, "eos_token_id": None} | changes)
    )


def read(folder) -> tuple[dict, dict]:
    """The facts and the tensors of the file, by name."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def test_export_gguf_writes_characters_with_escapes(tmp_path):
    assert export_gguf(tmp_path, make(tie_word_embeddings=False), TOKENIZER, "float32") < 1e-5
    facts, tensors = read(tmp_path)
    assert facts["general.architecture"] == "gpt2"
    assert facts["gpt2.context_length"] == 12
    assert facts["tokenizer.ggml.model"] == "rwkv"
    assert facts["tokenizer.ggml.tokens"] == [r"\t", r"\n", " ", r"\\", "é", "日"]
    assert facts["tokenizer.ggml.unknown_token_id"] == 2
    assert "tokenizer.ggml.eos_token_id" not in facts
    assert "output.weight" in tensors


@pytest.mark.parametrize(("width", "kind"), [(32, "Q8_0"), (16, "F16")])
def test_export_gguf_in_8_bits(tmp_path, width, kind):
    """A weight differs by at most half a step, which is the largest of its 32 weights / 127,
    stored in float16.
    """
    model = make(n_embd=width)
    assert 0 < export_gguf(tmp_path, model, TOKENIZER, "q8_0") < 0.02
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert tensors["blk.0.attn_qkv.weight"].tensor_type.name == kind
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q8_0"  # 4 x width
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    stored = tensors["blk.0.ffn_down.weight"]
    weights = gpt2_state_dict(model.config, model.state_dict())
    weight = weights["transformer.h.0.mlp.c_proj.weight"].T
    error = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type)) - weight
    scales = weight.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
    assert (error.unflatten(1, (-1, 32)).abs() <= scales * (1 / 254 + 1 / 2048) + 1e-7).all()


TOKENIZER = char_tokenizer(sorted("é日\\\n\t ")).hf


def test_export_gguf_writes_byte_level_tokens_and_padding(tmp_path):
    model = make(vocab_size=264, eos_token_id=258, activation_function="gelu")
    export_gguf(tmp_path, model, train_bpe_tokenizer(["the the the"], 259).hf, "bf16")
    facts, _ = read(tmp_path)
    assert facts["tokenizer.ggml.model"] == "gpt2"
    tokens = facts["tokenizer.ggml.tokens"]
    merge = facts["tokenizer.ggml.merges"][0]
    assert (len(tokens), tokens[256]) == (264, merge.replace(" ", ""))
    assert tokens[258:260] == ["<|endoftext|>", "[PAD259]"]
    assert facts["tokenizer.ggml.eos_token_id"] == 258


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 264}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": None}
LLAMA_31 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_31 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def decoder(model_type: str, **changes):
    names = {"bos_token_id": 256, "eos_token_id": 256}
    config = transformers.AutoConfig.for_model(model_type, **SIZES | names | changes)
    return architecture_of(config).model_class(config)


def byte_tokenizer_with_pattern(pattern: str | None = None, whole_words: bool = False):
    hf = train_bpe_tokenizer([], 257, "gpt2" if pattern is None else "gpt4").hf
    rust = hf.backend_tokenizer
    if pattern is not None:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    rust.model.ignore_merges = whole_words
    return hf


@pytest.mark.parametrize(
    ("model_type", "changes", "special"),
    [
        ("llama", {"head_dim": 16, "tie_word_embeddings": False}, {"rope.dimension_count": 16}),
        ("llama", {"rope_parameters": LLAMA_31}, {"rope.freq_base": 5e5}),
        ("qwen3", {"head_dim": 16}, {"attention.layer_norm_rms_epsilon": 1e-6}),
    ],
)
def test_export_gguf_of_decoders(tmp_path, model_type, changes, special):
    model = decoder(model_type, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokenizer = byte_tokenizer_with_pattern(QWEN_PATTERN)
    assert export_gguf(tmp_path, model, tokenizer, "float32") < 1e-5
    (facts, tensors) = read(tmp_path)
    head_dim = changes.get("head_dim", 8)
    expected = {"block_count": 4, "context_length": 64, "attention.head_count_kv": 2}
    expected |= {"attention.key_length": head_dim, "feed_forward_length": 48}
    for name, value in (expected | special).items():
        assert facts[f"{model_type}.{name}"] == pytest.approx(value), name
    assert [facts["general.architecture"], facts["tokenizer.ggml.pre"]] == [model_type, "qwen2"]
    assert ("output.weight" in tensors) == (not model.config.tie_word_embeddings)
    assert ("rope_freqs.weight" in tensors) == ("rope_parameters" in changes)
    # llama.cpp rotates neighboring rows of a head for Llama, and its two halves for Qwen3.
    query = model.get_submodule("model.layers.1.self_attn.q_proj").weight.detach().numpy()
    head = query.shape[0] // 4
    if model_type == "llama":
        query = query.reshape(4, 2, head // 2, -1).swapaxes(1, 2).reshape(query.shape)
    np.testing.assert_array_equal(tensors["blk.1.attn_q.weight"], query)


def test_export_gguf_of_llama_31_scales_wavelengths_as_its_config_says(tmp_path):
    model = decoder("llama", rope_parameters=LLAMA_31, head_dim=32)
    export_gguf(tmp_path, model, byte_tokenizer_with_pattern(), "float32")
    factors = read(tmp_path)[1]["rope_freqs.weight"]
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(16) / 16)
    assert factors[wavelengths < 64 / 4] == pytest.approx(1)
    assert factors[wavelengths > 64 / 1] == pytest.approx(8)
    assert {1, 8} < {round(float(factor), 3) for factor in factors}


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (byte_tokenizer_with_pattern(), "gpt-2"),
        (byte_tokenizer_with_pattern(GPT4_PATTERN), "dbrx"),
        (byte_tokenizer_with_pattern(GPT4_PATTERN, whole_words=True), "llama-bpe"),
        (byte_tokenizer_with_pattern(QWEN_PATTERN), "qwen2"),
    ],
)
def test_export_gguf_names_the_split_of_the_tokenizer(tmp_path, tokenizer, name):
    tokenizer.chat_template = None
    export_gguf(tmp_path, decoder("qwen3", num_hidden_layers=1), tokenizer, "bf16")
    assert read(tmp_path)[0]["tokenizer.ggml.pre"] == name


def test_export_gguf_writes_chat_template_and_end_of_turn(tmp_path):
    tokenizer = byte_tokenizer_with_pattern(QWEN_PATTERN)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    ) + ("{% if add_generation_prompt %}assistant{% endif %}")
    export_gguf(tmp_path, decoder("qwen3", num_hidden_layers=1), tokenizer, "float32")
    facts, _ = read(tmp_path)
    assert facts["tokenizer.chat_template"] == tokenizer.chat_template
    assert facts["tokenizer.ggml.eot_token_id"] == 257
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert lines[2] == 'PARAMETER stop "<|im_end|>"'
    assert lines[3].startswith("# chat template: ")
    # normal, control twice, user defined, unused
    assert facts["tokenizer.ggml.token_type"][255:260] == [1, 3, 3, 4, 5]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


def go_text(template: str, messages: list[dict]) -> str:
    """What Go writes for a template of `range`, `if eq`, fields and texts: Jinja's text for the
    same template in its syntax.
    """
    blocks = []

    def in_jinja(match: re.Match) -> str:
        action = match[1]
        if action == "end":
            return "{% end" + blocks.pop() + " %}"
        if action == "range .Messages":
            blocks.append("for")
            return "{% for message in messages %}"
        if action.startswith("if eq .Role "):
            blocks.append("if")
            return "{% if message.role == " + action.removeprefix("if eq .Role ") + " %}"
        return {"else": "{% else %}", ".Content": "{{ message.content }}"}.get(action, match[0])

    return jinja2.Template(re.sub(r"{{ (.*?) }}", in_jinja, template)).render(messages=messages)


@pytest.mark.parametrize("chat", [True, False])
def test_modelfile_has_our_chat_template(tmp_path, chat):
    tokenizer = train_bpe_tokenizer(["the the the"], 259).hf
    if chat:
        answer_finder(tokenizer, "bpe")
    export_gguf(tmp_path, make(vocab_size=264), tokenizer, "float32")
    head, _, template = (tmp_path / "Modelfile").read_text().partition("TEMPLATE ")
    if not chat:
        assert (head, template) == ("FROM ./model.gguf\nPARAMETER num_ctx 12\n", "")
        return
    assert head.splitlines()[1:] == ["PARAMETER num_ctx 12", 'PARAMETER stop "<|endoftext|>"']
    template = template.strip().removeprefix('"""').removesuffix('"""')
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    for count in range(1, len(roles) + 1):
        messages = [{"role": r, "content": f"{r} {n}"} for n, r in enumerate(roles[:count])]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert go_text(template, messages) == expected


WHOLE_WORD = char_tokenizer(list("abc")).hf
WHOLE_WORD.add_tokens(["whole"])
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("model", "tokenizer", "value"),
    [
        (make(activation_function="relu"), TOKENIZER, "relu"),
        (make(vocab_size=5), TOKENIZER, "6 tokens"),
        (make(), WHOLE_WORD, "byte-level BPE"),
        (decoder("olmo2"), TOKENIZER, "olmo2 is not supported"),
        (decoder("llama", hidden_act="gelu"), TOKENIZER, "hidden_act gelu"),
        (decoder("llama", attention_bias=True), TOKENIZER, "biases"),
        (decoder("qwen3", rope_parameters=LLAMA_31), TOKENIZER, "rope_type llama3"),
        (decoder("qwen3", **WINDOWS), TOKENIZER, "sliding windows"),
    ],
)
def test_export_gguf_refuses_what_its_readers_compute_otherwise(tmp_path, model, tokenizer, value):
    message = refusal(export_gguf, tmp_path, model, tokenizer, "float32", error=UserError)
    assert message.startswith("--format gguf: ")
    assert value in message
