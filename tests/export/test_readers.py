"""Exported files in the programs they are for, llama.cpp and vLLM, where they are installed: here,
or in the environment whose Python LLAMA_CPP_PYTHON or VLLM_PYTHON names.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from nanogpt_hf.data.tokenizer import train_bpe_tokenizer
from nanogpt_hf.export.model_folder import export_model_folder
from nanogpt_hf.model import GPTConfig, GPTForCausalLM

# what a file's model answers to token ids, by llama.cpp: the logits of all places
LLAMA_CPP = """
import os
os.environ["LLAMA_CPP_BACKEND"] = "cpu"
import json, sys
from llama.llama_cpp import ffi, lib
path, ids = sys.argv[1], json.loads(sys.argv[2])
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
assert model != ffi.NULL, "llama.cpp refuses the file"
parameters = lib.llama_context_default_params()
parameters.n_ctx, parameters.n_threads = len(ids), 1
context = lib.llama_init_from_model(model, parameters)
batch = lib.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for place, token in enumerate(ids):
    batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
    batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
assert lib.llama_decode(context, batch) == 0
tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
rows = [ffi.unpack(lib.llama_get_logits_ith(context, n), tokens) for n in range(len(ids))]
print("RESULT" + json.dumps(rows))
"""
# greedy tokens after token ids, and their log-probabilities, by vLLM
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=48)
greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
[answer] = model.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], greedy)
[found] = answer.outputs
steps = zip(found.token_ids, found.logprobs, strict=True)
print("RESULT" + json.dumps([(token, step[token].logprob) for token, step in steps]))
"""


def ask(module: str, script: str, path: Path, ids: list[int]):
    """What `script` prints of the model at `path`; skips without a Python that has `module`."""
    variable = {"llama": "LLAMA_CPP_PYTHON", "vllm": "VLLM_PYTHON"}[module]
    python = os.environ.get(variable) or (find_spec(module) and sys.executable)
    if not python:
        pytest.skip(f"{module} is not installed, and {variable} names no Python that has it")
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [python, "-c", script, str(path), json.dumps(ids)],
        env=os.environ | offline | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


def with_large_weights(model):
    """The model with logits that differ by more than rounding."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "allowed", "same"), [("float32", 0.02, 47), ("q8_0", 0.3, 43)])
def test_llama_cpp_computes_the_logits_of_a_gguf_file(tmp_path, dtype, allowed, same):
    """In float32, too, llama.cpp keeps keys and values in 16 bits."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from nanogpt_hf.export.gguf import export_gguf

    sizes = {"vocab_size": 264, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    names = {"bos_token_id": None, "eos_token_id": 258, "activation_function": "gelu_new"}
    model = with_large_weights(GPTForCausalLM(GPTConfig(**sizes, **names)))
    ids = (torch.arange(48) * 7919 % 259).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    export_gguf(tmp_path, model, train_bpe_tokenizer(["the the the"], 259).hf, dtype)
    found = torch.tensor(ask("llama", LLAMA_CPP, tmp_path / "model.gguf", ids))
    assert expected.abs().max() > 5
    assert (found - expected).abs().max() < allowed
    # There are 48 positions.
    assert (found.argmax(-1) == expected.argmax(-1)).sum() >= same


def qwen3():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 96, "max_position_embeddings": 64}
    names = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None, "vocab_size": 264}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **names))


def gpt2():
    sizes = {"vocab_size": 264, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return GPTForCausalLM(GPTConfig(**sizes, bos_token_id=None, eos_token_id=256))


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, qwen3])
def test_vllm_answers_as_the_model_of_an_exported_folder(tmp_path, build):
    model = with_large_weights(build())
    ids = list(range(40, 52))
    export_model_folder(tmp_path, model, train_bpe_tokenizer([], 257, "gpt4").hf, torch.float32)
    found = ask("vllm", VLLM, tmp_path, ids)
    for token, log_prob in found:
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert token == expected.argmax()
        assert log_prob == pytest.approx(expected[token].item(), abs=1e-3)
        ids.append(token)
    assert len({token for token, _ in found}) > 2
