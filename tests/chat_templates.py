"""Tokenizers with the chat templates of known models, written out here."""

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from nanogpt_hf.data.bpe import printable_bytes

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)
MERGES = [("Ġ", "a"), ("Ċ", "Ċ"), ("h", "e"), (":", "Ċ"), ("Ġ", "Ġ"), (".", "Ċ")]


def byte_level(special, ordinary=(), template=None, start=None):
    """A byte-level BPE tokenizer with a few merges, as those of GPT-2, Llama 3 and Qwen."""
    names = [*printable_bytes(), *("".join(pair) for pair in MERGES)]
    rust = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=MERGES))
    words = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    rust.decoder = decoders.ByteLevel()
    return finished(rust, special, ordinary, template, start)


def sentencepiece(special, ordinary=(), template=None, start="<s>"):
    """A tokenizer as Llama 2's and Mistral's: words start with a low line, unknown characters
    become bytes.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    pieces += ["▁H", "So", "▁So", "ec", "▁W"]
    merges = [("▁", "H"), ("S", "o"), ("▁", "So"), ("e", "c"), ("▁", "W")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    rust = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return finished(rust, special, ordinary, template, start, unk_token="<unk>")


def finished(rust, special, ordinary, template, start, **names):
    rust.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    rust.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    if start:
        rust.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, rust.token_to_id(start))]
        )
    names |= {"bos_token": start, "eos_token": special[-1], "chat_template": template}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, clean_up_tokenization_spaces=False, **names
    )


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b "
    "%Y') %}{% endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + "
    "'<|eot_id|>' }}"
    "{% for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content %}{% set "
    "thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{- content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
# Mistral 7B has such a template: [INST] is text, not a token.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% "
    "endfor %}"
)
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THOUGHT = ("<think>", "</think>")
HEADERS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|end_of_text|>",
    "<|eot_id|>",
)
TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>")


SHAPES = {
    "chatml": byte_level(QWEN, template=CHATML),
    "marked": byte_level(QWEN, template=MARKED),
    "llama3": byte_level(HEADERS, template=LLAMA3, start=HEADERS[0]),
    "qwen3": byte_level(QWEN, THOUGHT, QWEN3),
    "gemma": sentencepiece(TURNS, template=GEMMA, start="<bos>"),
    "mistral": sentencepiece(("<s>", "</s>"), template=MISTRAL),
    "ours": byte_level(QWEN[:1]),
    "ours with a start token": sentencepiece(("<s>", "</s>")),
}


def _calling(call: str, before: str = "", between: str = "", after: str = "", thought: str = ""):
    """A template in ChatML whose answers call tools; `call` is the expression of one call."""
    return (
        "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}"
        + thought
        + "{{ m.content or '' }}{% if m.tool_calls %}"
        + before
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + after
        + "{% endif %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_THINKING = (
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}"
)
_ALWAYS = "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}"
_HERMES = (
    '{{ \'<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}"
)
# Ways in which models call tools: Qwen 3's, Llama 3's, Mistral's two, Qwen 3.5's, and GLM's.
CALLING = {
    "hermes": _calling(_HERMES, between="{{ '\n' }}"),
    "hermes that thinks": _calling(_HERMES, between="{{ '\n' }}", thought=_THINKING),
    "hermes whose prompt thinks": _calling(_HERMES, between="{{ '\n' }}", thought=_ALWAYS).replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
    ),
    "bare JSON": _calling(
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
    ),
    "list of JSON": _calling(
        "{{ '{\"name\": \"' + f.name + '\", \"arguments\": ' }}{{ f.arguments | tojson }}{{ '}' }}",
        before="{{ '[TOOL_CALLS] [' }}",
        between="{{ ', ' }}",
        after="{{ ']' }}",
    ),
    "name and JSON": _calling("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}"),
    "parameters": _calling(
        "{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments | items %}"
        "{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}"
        "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}",
        between="{{ '\n' }}",
    ),
    "keys and values": _calling(
        "{{ '<tool_call>' + f.name }}{% for k, v in f.arguments | items %}"
        "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}"
        "{{ '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}"
    ),
}
_MARKS = ("[TOOL_CALLS]", "[ARGS]")


def calling(name: str):
    """A tokenizer whose template calls tools; the marks are tokens, as in the models."""
    return byte_level((*_MARKS, *QWEN), ("<tool_call>", "</tool_call>", *THOUGHT), CALLING[name])
