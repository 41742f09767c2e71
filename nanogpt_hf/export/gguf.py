"""Export a model to GGUF for llama.cpp, with the tensor names of the package `gguf`.

GGUF's gpt2 has one activation function, the tanh form of GELU, also for a model with exact GELU.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from nanogpt_hf.data.bpe import GPT4_PATTERN, QWEN_PATTERN
from nanogpt_hf.data.chat_examples import AnswerFinder
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.hf_tokenizer import save_tokenizer, start_of_text_id_of
from nanogpt_hf.data.own_template import chat_template
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.export.model_folder import (
    cast_weights,
    logits_of,
    max_difference,
    write_generation_config,
)
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT, gpt2_state_dict

FILE = "model.gguf"
MODELFILE = "Modelfile"
_F32 = gguf.GGMLQuantizationType.F32
_Q8 = gguf.GGMLQuantizationType.Q8_0
# --dtype -> dtype of the weights before they are stored, type of the tensors, type of the file.
_TYPES = {
    "float32": (torch.float32, _F32, gguf.LlamaFileType.ALL_F32),
    "fp16": (torch.float16, gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (torch.bfloat16, gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (torch.float32, _Q8, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# model_type -> GGUF's number of the architecture.
_ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_LINEAR = tuple(f".{layer}.weight" for layer in GPT2_LAYOUT)

# How text is split before BPE, and whether a whole word that is a token is found without its merges
# -> the name of this in GGUF.
_SPLITS = {
    ("GPT-2", False): "gpt-2",
    ("digits", "GPT-2", False): "smollm",
    (GPT4_PATTERN, True): "llama-bpe",
    (GPT4_PATTERN, False): "dbrx",
    (QWEN_PATTERN, False): "qwen2",
}
# Our chat template for ollama, in Go's syntax; END is the end-of-text token.
_GO_TEMPLATE = (
    '{{ range .Messages }}{{ if eq .Role "assistant" }}### Assistant:{{ "\\n" }}{{ .Content }}'
    '{{ END }}{{ else }}### {{ if eq .Role "system" }}System{{ else }}User{{ end }}:{{ "\\n" }}'
    '{{ .Content }}{{ "\\n\\n" }}{{ end }}{{ end }}### Assistant:{{ "\\n" }}'
)
_ESCAPES = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\"})


def export_gguf(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    dtype: str,
) -> float:
    """Write `model` as GGUF with config.json, tokenizer and Modelfile, and read it again.

    `dtype` is float32, fp16, bf16, or q8_0: 8 bits a value and a scale for each 32 of them.

    Returns the largest difference of the logits, with the model's own activation function.
    Raises UserError if GGUF has no format for the model or the tokenizer.
    """
    plain: Any = architecture_of(model).standard_config(model.config)
    _check_format(plain, model)
    cast_to, matrix_type, file_type = _TYPES[dtype]
    original = logits_of(model)
    # Only to raise if a weight is too large: the tensors below are quantized from float32.
    cast_weights(model, cast_to)
    # Closing writes the rest.
    with contextlib.closing(gguf.GGUFWriter(folder / FILE, plain.model_type)) as writer:
        _write_metadata(writer, plain, file_type)
        _write_tokenizer(writer, plain, tokenizer)
        for tensor_name, weight in _tensors(plain, model):
            # llama.cpp reads biases, norms and positions only in float32.
            small = weight.ndim == 1 or tensor_name == "position_embd.weight"
            kind = _F32 if small else matrix_type
            if kind is _Q8 and weight.shape[-1] % gguf.GGML_QUANT_SIZES[_Q8][0]:
                # A row is no whole number of blocks of 32 values.
                kind = gguf.GGMLQuantizationType.F16
            stored = gguf.quants.quantize(weight.contiguous().numpy(), kind)
            writer.add_tensor(tensor_name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    plain.save_pretrained(folder)
    write_generation_config(folder, model.generation_config)
    save_tokenizer(tokenizer, folder)
    (folder / MODELFILE).write_text(_modelfile(plain, tokenizer), encoding="utf-8")

    # With its config: transformers 5.23 reads neither the number of positions nor an activation
    # from GGUF.
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, config=plain, dtype=torch.float32, trust_remote_code=False
    )
    return max_difference(logits_of(opened), original, exact=dtype == "float32")


def _check_format(config: Any, model: transformers.PreTrainedModel) -> None:
    """Raises UserError if readers of GGUF would compute another function than the model."""
    name = config.model_type
    if name not in _ARCHITECTURES:
        raise UserError(f"--format gguf: {name} is not supported, only {', '.join(_ARCHITECTURES)}")
    if name == "gpt2":
        act = config.activation_function
        wrong = {f"{act} activation, only GELU": act not in ("gelu", "gelu_new")}
    else:
        rope = config.rope_parameters["rope_type"]
        kinds = getattr(config, "layer_types", None)
        wrong = {
            f"hidden_act {config.hidden_act}, only silu": config.hidden_act != "silu",
            "biases": any(parameter.endswith(".bias") for parameter in model.state_dict()),
            "sliding windows": any(kind != "full_attention" for kind in kinds or ()),
            f"rope_type {rope}": rope != "default" and (rope, name) != ("llama3", "llama"),
        }
    if lacking := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"--format gguf: its {name} has no {lacking[0]}")


def _tensors(config: Any, model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the file, by name, in float32."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    # The names of transformers' models, which the package `gguf` translates.
    weights = model.state_dict()
    if isinstance(model.config, GPTConfig):
        weights = gpt2_state_dict(model.config, weights)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for name, weight in weights.items():
        tensor_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if not tensor_name:
            raise UserError(f"--format gguf: its {config.model_type} has no {name}")
        yield tensor_name, _rotation(config, name, weight.T if name.endswith(_LINEAR) else weight)
    if (factors := _rope_factors(model)) is not None:
        yield "rope_freqs.weight", factors


def _rotation(config: Any, name: str, weight: Tensor) -> Tensor:
    """Weight of Llama's queries or keys with the rows of each head in the order of GGUF, which
    rotates neighboring dimensions; transformers rotates the first half with the second.

    Other weights are returned as they are.
    """
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    is_query = name.endswith("q_proj.weight")
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    # (H·D, C) -> (H, 2, D/2, C) -> (H, D/2, 2, C) -> (H·D, C): halves become neighbors.
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _rope_factors(model: transformers.PreTrainedModel) -> Tensor | None:
    """Factors of the rotary wavelengths, which Llama 3.1 has; None if there are none."""
    if getattr(model.config, "rope_parameters", {}).get("rope_type", "default") == "default":
        return None
    rotary: Any = model.base_model.rotary_emb
    frequencies = rotary.inv_freq.float()
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    # Plain rotary frequencies are theta^(-i / n); the factors are these by the model's own.
    return model.config.rope_parameters["rope_theta"] ** -exponents / frequencies


def _write_metadata(writer: gguf.GGUFWriter, config: Any, file_type: gguf.LlamaFileType) -> None:
    facts = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "file_type": file_type,
    }
    if config.model_type == "gpt2":
        facts["feed_forward_length"] = config.n_inner or 4 * config.n_embd
        facts["layer_norm_eps"] = config.layer_norm_epsilon
    else:
        # Without a field for its size a head has its share of the width.
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        facts |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), size)
        facts |= {
            "feed_forward_length": config.intermediate_size,
            "head_count_kv": config.num_key_value_heads,
            "layer_norm_rms_eps": config.rms_norm_eps,
            "rope_freq_base": config.rope_parameters["rope_theta"],
        }
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)


def _write_tokenizer(
    writer: gguf.GGUFWriter, config: Any, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Write byte-level BPE, or characters. Raises UserError for any other tokenizer."""
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"--format gguf: {len(tokenizer)} tokens in the tokenizer, "
            f"{config.vocab_size} in the model"
        )
    # llama.cpp prints no CONTROL token.
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = [gguf.TokenType.NORMAL] * len(names)
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    if split := _split_name(tokenizer):
        merges = _backend_state(tokenizer)["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(
            [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        )
    elif not tokenizer.added_tokens_decoder and all(len(name) == 1 for name in names):
        # llama.cpp's RWKV tokenizer takes the longest matching token and has no special tokens:
        # with one token per character it equals ours. Its tokens are written with escapes.
        writer.add_tokenizer_model("rwkv")
        # Without a token for unknown characters llama.cpp would abort. Ours raises an error for
        # them.
        writer.add_unk_token_id(names.index(" ") if " " in names else 0)
        names = [name.translate(_ESCAPES) for name in names]
    else:
        raise UserError(
            "--format gguf: can only write a tokenizer of characters without special tokens, such "
            "as char, or byte-level BPE that splits text as GPT-2, Llama 3, Qwen or SmolLM does"
        )
    # The list has a token for each row of the model; rows beyond the tokenizer are never generated.
    unused = config.vocab_size - len(names)
    writer.add_token_list([*names, *(f"[PAD{len(names) + i}]" for i in range(unused))])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * unused])
    if isinstance(tokenizer.eos_token_id, int):
        bos = tokenizer.bos_token_id
        writer.add_bos_token_id(bos if isinstance(bos, int) else tokenizer.eos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(start_of_text_id_of(tokenizer) is not None)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
        try:
            writer.add_eot_token_id(AnswerFinder(ChatFormat(tokenizer)).end_of_turn_id())
        except DataError:
            # Readers then stop at the end-of-text token alone.
            return


def _modelfile(config: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Modelfile of ollama: context, the token that ends an answer, and our chat template.

    ollama executes no template of a GGUF file, but recognizes the text of some.
    """
    lines = [f"FROM ./{FILE}", f"PARAMETER num_ctx {config.max_position_embeddings}"]
    if not isinstance(tokenizer.chat_template, str):
        return "\n".join([*lines, ""])
    with contextlib.suppress(DataError):  # the end-of-text token alone ends an answer
        end = str(
            tokenizer.convert_ids_to_tokens(AnswerFinder(ChatFormat(tokenizer)).end_of_turn_id())
        )
        # ollama knows no escapes here.
        if not re.search(r'["\n]', end):
            lines.append(f'PARAMETER stop "{end}"')
    ours = [chat_template(tokenizer, tools=tools) for tools in (True, False)]
    if tokenizer.chat_template in ours:
        end = json.dumps(tokenizer.eos_token, ensure_ascii=False)
        lines.append(f'TEMPLATE """{_GO_TEMPLATE.replace("END", end)}"""')
    else:
        lines.append("# chat template: that of the GGUF file if ollama knows it; else add TEMPLATE")
    return "\n".join([*lines, ""])


def _split_name(tokenizer: Any) -> str | None:
    """GGUF's name for the way in which a byte-level BPE tokenizer splits text; None for any
    other tokenizer.
    """
    if not tokenizer.is_fast:
        return None
    state = _backend_state(tokenizer)
    before = state["pre_tokenizer"] or {}
    # The last step turns bytes into letters; those before it split the text.
    *splits, last = before.get("pretokenizers", [before])
    is_bpe = (state["model"]["type"], last.get("type")) == ("BPE", "ByteLevel")
    if not is_bpe or last["add_prefix_space"]:
        return None
    ways = [_way(split) for split in splits] + ["GPT-2"] * last["use_regex"]
    return _SPLITS.get((*ways, bool(state["model"].get("ignore_merges"))))


def _way(split: dict[str, Any]) -> str | None:
    match split:
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern
    return None


def _backend_state(tokenizer: Any) -> dict[str, Any]:
    """A fast tokenizer as tokenizer.json describes it."""
    return json.loads(tokenizer.backend_tokenizer.to_str())
