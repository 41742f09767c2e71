"""Our chat template, for a tokenizer that has none."""

import json

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.hf_tokenizer import start_of_text_id_of
from nanogpt_hf.data.special_tokens import breakable, special_tokens


def chat_template(hf: PreTrainedTokenizerBase, *, tools: bool = True) -> str:
    """Our chat template for this tokenizer: roles as headings, answers end with its end-of-text
    token.

    With `tools` it lists tools as JSON before the first message, and writes calls of them into
    answers between `<tool_call>` and `</tool_call>`. Without tools a conversation has the same
    text under both; models that were trained by earlier versions have the template without them.

    Special tokens in the text of a message are broken by a space here, too, for programs that
    only have the template. `generation` marks the answers for the assistant mask.
    """

    def literal(text: str) -> str:  # Jinja reads what JSON writes
        return json.dumps(text, ensure_ascii=False)

    breaks = "".join(
        f" | replace({literal(token)}, {literal(f'{token[:1]} {token[1:]}')})"
        for token in breakable(special_tokens(hf))
    )
    start = "" if start_of_text_id_of(hf) is None else "{{- bos_token -}}"
    listed = calls = ""
    content = "message['content']"
    if tools:
        listed = (
            "{%- if tools -%}{{- '### Tools:\\n' -}}"
            f"{{%- for tool in tools -%}}{{{{- tool | tojson{breaks} + '\\n' -}}}}{{%- endfor -%}}"
            "{{- '\\n' -}}{%- endif -%}"
        )
        calls = (
            "{%- for call in message['tool_calls'] or [] -%}"
            "{%- set called = call['function'] -%}"
            "{{- '\\n' if content or not loop.first else '' -}}"
            "{{- '<tool_call>\\n{\"name\": ' + called['name'] | tojson"
            " + ', \"arguments\": ' -}}"
            f"{{{{- called['arguments'] | tojson{breaks} + '}}\\n</tool_call>' -}}}}"
            "{%- endfor -%}"
        )
        # An answer that only calls has no content.
        content = "(message['content'] or '')"
    return (
        f"{start}{listed}{{%- for message in messages -%}}"
        f"{{%- set content = {content} | trim{breaks} -%}}"
        "{{- '### ' + message['role'] | capitalize + ':\\n' -}}"
        "{%- if message['role'] == 'assistant' -%}"
        "{%- generation -%}{{- content -}}"
        f"{calls}{{{{- eos_token -}}}}{{%- endgeneration -%}}"
        "{%- else -%}{{- content + '\\n\\n' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '### Assistant:\\n' -}}{%- endif -%}"
    )
