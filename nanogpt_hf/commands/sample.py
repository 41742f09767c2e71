"""Generate text with the model of a run folder, a model folder or the Hub; the text is printed as it is generated."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import add_model_argument, add_sampling_arguments, number, sampling_options
from nanogpt_hf.commands.console import show_text
from nanogpt_hf.commands.models import autocast, build_generation_accelerator, open_model
from nanogpt_hf.errors import DataError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=None, help="text to continue (default: a line break, or the first token)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=500, help="default %(default)s")
    parser.add_argument("--num-samples", type=number(int, 1, 10_000), default=1, help="default %(default)s")
    add_sampling_arguments(parser)


def _read_prompt(arguments: argparse.Namespace) -> str | None:
    if arguments.prompt_file is None:
        return arguments.prompt
    try:
        return Path(arguments.prompt_file).read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt-file: {arguments.prompt_file} cannot be read: {error}") from None


def default_prompt(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A line break, nothing after a start token, or the first token if the tokenizer has no line break."""
    from nanogpt_hf.data.tokenizer import encode_ordinary, start_of_text_id_of

    if start_of_text_id_of(tokenizer) is not None:
        return ""
    try:
        return "\n" if encode_ordinary(tokenizer, "\n") else str(tokenizer.decode([0]))
    except DataError:
        return str(tokenizer.decode([0]))


def run(arguments: argparse.Namespace) -> None:
    prompt = _read_prompt(arguments)

    from nanogpt_hf.data.tokenizer import prompt_ids
    from nanogpt_hf.generate import TextStream, generate_tokens

    accelerator = build_generation_accelerator()
    model, tokenizer = open_model(arguments.model)
    model.to(accelerator.device)
    if prompt is None:
        prompt = default_prompt(tokenizer)
    try:
        ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise UserError(f"--prompt: {error}") from None
    if not accelerator.is_main_process:
        return
    streams = [TextStream(tokenizer, ids) for _ in range(arguments.num_samples)]
    texts = [""] * arguments.num_samples
    show_text(prompt)
    with autocast(accelerator):
        for tokens in generate_tokens(
            model,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            num_samples=arguments.num_samples,
            seed=arguments.seed,
            **sampling_options(arguments),
        ):
            for i, token in enumerate(tokens):
                if token is not None:
                    text = streams[i].add(token)
                    texts[i] += text
                    if i == 0:  # the first sample is printed as it is generated, the others at the end
                        show_text(text)
    show_text(streams[0].end(), end="\n")
    for i in range(1, arguments.num_samples):
        text = f"{prompt}{texts[i]}{streams[i].end()}"
        show_text(f"\n--- sample {i + 1} of {arguments.num_samples} ---\n{text}", end="\n")
