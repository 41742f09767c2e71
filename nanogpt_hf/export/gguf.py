"""Export a model to GGUF for llama.cpp. Needs the package `gguf`.

GGUF's gpt2 has one activation function, the tanh form of GELU; for a model with exact GELU the difference is reported.
"""

import json
from pathlib import Path

import gguf
import torch
import transformers
from transformers.activations import ACT2FN

from nanogpt_hf.data.tokenizer import save_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.export.model_folder import cast_weights, finite_logits_of, logits_of, max_difference
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT, gpt2_state_dict
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

FILE = "model.gguf"
_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_LINEAR = tuple(f".{layer}.weight" for layer in GPT2_LAYOUT)


def export_gguf(
    folder: Path, model: GPTForCausalLM, tokenizer: transformers.PreTrainedTokenizerBase | None, dtype: torch.dtype
) -> tuple[float, float | None]:
    """Write `model` as GGUF with config.json and tokenizer, and load it with transformers.

    Returns the largest difference of the logits with the model's activation function, and, if that is not the tanh GELU
    of GGUF's readers, with theirs. Raises UserError if GGUF has no format for the model or the tokenizer.
    """
    config = model.config
    if config.activation_function not in ("gelu", "gelu_new"):
        raise UserError(f"--format gguf: its gpt2 has no {config.activation_function} activation, only GELU")
    if tokenizer is None:
        raise UserError("--format gguf: a GGUF file contains the tokenizer, and this model has none")
    cast_weights(model, dtype)  # raises if a weight is too large
    writer = gguf.GGUFWriter(folder / FILE, "gpt2")
    _write_metadata(writer, config, _TYPES[dtype][1])
    _write_tokenizer(writer, config, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, weight in gpt2_state_dict(config, model.state_dict()).items():
        array = (weight.T if name.endswith(_LINEAR) else weight).contiguous().numpy()
        # llama.cpp reads biases, LayerNorms and positions only in float32.
        small = array.ndim == 1 or name == "transformer.wpe.weight"
        kind = _TYPES[torch.float32 if small else dtype][0]
        stored = gguf.quants.quantize(array, kind)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, f"gguf has no name for {name}"
        writer.add_tensor(gguf_name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = config.to_gpt2()
    plain.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)

    # With its config: transformers 5.23 reads neither the number of positions nor an activation from GGUF.
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, config=plain, dtype=torch.float32, trust_remote_code=False
    )
    original = finite_logits_of(model)
    difference = max_difference(logits_of(opened), original, exact=dtype == torch.float32)
    if config.activation_function == "gelu_new":
        return difference, None
    for layer in range(config.n_layer):
        opened.get_submodule(f"transformer.h.{layer}.mlp").act = ACT2FN["gelu_new"]
    return difference, max_difference(logits_of(opened), original, exact=False)


def _write_metadata(writer: gguf.GGUFWriter, config: GPTConfig, file_type: gguf.LlamaFileType) -> None:
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.inner_size)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)


def _write_tokenizer(
    writer: gguf.GGUFWriter, config: GPTConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Write GPT-2's tokens and merges, or characters. Raises UserError for any other tokenizer."""
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"--format gguf: {len(tokenizer)} tokens in the tokenizer, {config.vocab_size} in the model")
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(names))]
    if isinstance(tokenizer, transformers.GPT2Tokenizer):
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    elif not special and all(len(name) == 1 for name in names):
        # llama.cpp's RWKV tokenizer takes the longest matching token and has no special tokens: with one token per
        # character it equals ours. Its tokens are written with escapes.
        writer.add_tokenizer_model("rwkv")
        # Without a token for unknown characters llama.cpp would abort. Ours raises an error for them.
        writer.add_unk_token_id(names.index(" ") if " " in names else 0)
        names = [_ESCAPES.get(name, name) for name in names]
    else:
        raise UserError("--format gguf: can only write GPT-2's tokenizer or one of characters")
    unused = config.vocab_size - len(names)
    writer.add_token_list([*names, *(f"[PAD{len(names) + i}]" for i in range(unused))])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * unused])
    if isinstance(tokenizer.eos_token_id, int):
        writer.add_bos_token_id(tokenizer.eos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\"}
