"""The same prompts continued before and after fine-tuning, so that anyone sees what changed."""

import numpy as np
import torch
import transformers

from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.chat_prompt import render_prompt
from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.tokenizer import encode_ordinary
from nanogpt_hf.generate import continue_text
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_PROMPTS, _PROMPT_LENGTH = 3, 40  # the latter in characters
TEMPERATURE = 0.8


def prompts_from(blocks: TokenBlocks | Examples, tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """A few evenly spread beginnings of text from `blocks`, each from the start of a line if there is one.

    From conversations they are the questions.
    """
    if isinstance(blocks, Examples):
        return [tokenizer.decode(ids) for ids in blocks.first_questions(_PROMPTS)]
    stream = blocks.stream
    length = min(len(stream), 4 * _PROMPT_LENGTH)
    starts = np.linspace(0, len(stream) - length, _PROMPTS).astype(int)
    prompts = []
    for ids in stream.windows(np.unique(starts), length):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip("\N{REPLACEMENT CHARACTER}")
        line = text.partition("\n")[2].lstrip() or text
        prompts.append(line[:_PROMPT_LENGTH].rstrip())
    return [prompt for prompt in prompts if prompt]


def as_question(prompt: str, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """The prompt as a user's message in the tokenizer's chat template, which then waits for the answer."""
    message = {"role": "user", "content": prompt}
    return render_prompt(tokenizer, [message])


def write_samples(
    model: GPTForCausalLM,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    tokens: int,
    seed: int,
) -> list[str]:
    """What the model writes after each prompt, at most `tokens` tokens, at temperature 0.8.

    Raises DataError where the tokenizer has no token for a character of a prompt.
    """
    model = model.to(torch.accelerator.current_accelerator() or "cpu").eval()
    written = []
    for prompt in prompts:
        ids = encode_ordinary(tokenizer, prompt)
        written.append(continue_text(model, tokenizer, ids, max_new_tokens=tokens, temperature=TEMPERATURE, seed=seed))
    return written


def samples_page(title: str, prompts: list[str], columns: dict[str, list[str]], seed: int) -> str:
    """samples.md: under each prompt what was written, by column, such as {"before": [...], "after": [...]}."""
    parts = [f"# {title}", f"Seed {seed}, temperature {TEMPERATURE}; what the model wrote is after the prompt."]
    for number, prompt in enumerate(prompts):
        lines = prompt.splitlines()
        parts.append(f"## {next((line for line in lines if line and not line.startswith('#')), lines[0])}")
        for name, written in columns.items():
            parts.append(f"{name}:\n\n````text\n{prompt}{written[number]}\n````")
    return "\n\n".join(parts) + "\n"
