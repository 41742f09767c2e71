"""Let a model write, as it goes: a run folder, a model folder, or a model on the Hub."""

import argparse
import math
import os
from pathlib import Path

from nanogpt_hf.commands.console import show_text
from nanogpt_hf.config.hub_name import folder_or_hub_id
from nanogpt_hf.errors import RunFolderError, UserError


def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number within bounds."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not low <= value <= high:
            bounds = f"at least {low}" + (f" and at most {high}" if high != math.inf else "")
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a run folder (its best model), a model folder, or a Hub id")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=None, help="text to go on from (default: a line break, or the first token)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the text to go on from")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=500, help="default %(default)s")
    parser.add_argument("--num-samples", type=number(int, 1, 10_000), default=1, help="default %(default)s")
    add_drawing_arguments(parser)


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    """How a next token is drawn; `chat` has these, too."""
    parser.add_argument("--temperature", type=number(float, 0), default=0.8, help="0 is greedy; default %(default)s")
    parser.add_argument("--top-k", type=number(int, 1), default=None, help="only the k likeliest tokens")
    parser.add_argument("--top-p", type=number(float, 0, 1), default=None, help="only the likeliest that add to p")
    parser.add_argument("--seed", type=number(int, 0, 2**62), default=1337, help="default %(default)s")


def find_model(name: str, on_hub: bool = True) -> str:
    """The model folder that MODEL means: a run folder's best/ (else final/), any other folder or Hub id as it is.

    Raises RunFolderError for a run folder that has no model yet, and UserError for a path that does not exist. With
    `on_hub` False a name is taken for a folder only, and it is the caller's to see whether it is there.
    """
    from nanogpt_hf.runs.folder import RunFolder

    name = os.path.expanduser(name)
    run = RunFolder(name)
    if not run.recipe.is_file():
        return folder_or_hub_id(name) if on_hub else str(run.path)
    for folder in (run.best, run.final):
        if folder.is_dir():
            return str(folder)
    raise RunFolderError(f"{name}: this run has no model yet; the first is written at its first evaluation")


def open_model(name: str):
    """MODEL's model, ready to write, and its tokenizer. Raises UserError where they are not there or do not fit."""
    from transformers.utils import logging

    from nanogpt_hf.data.tokenizer import load_tokenizer
    from nanogpt_hf.model.build import load_model

    logging.disable_progress_bar()
    folder = find_model(name)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens, its model only {model.config.vocab_size}"
        )
    return model, tokenizer


def _read_prompt(arguments: argparse.Namespace) -> str | None:
    if arguments.prompt_file is None:
        return arguments.prompt
    try:
        return Path(arguments.prompt_file).read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt-file: {arguments.prompt_file} cannot be read: {error}") from None


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    if overrides:
        raise UserError(f"cli.py sample: --{overrides[0][0]}: sampling has no recipe to set knobs of")
    prompt = _read_prompt(arguments)

    import torch
    from accelerate import Accelerator

    from nanogpt_hf.data.tokenizer import encode_ordinary
    from nanogpt_hf.generate import TextStream, generate_tokens

    accelerator = Accelerator()
    model, tokenizer = open_model(arguments.model)
    model.to(accelerator.device)
    if prompt is None:
        prompt = "\n" if "\n" in tokenizer.get_vocab() or tokenizer.bos_token_id is not None else tokenizer.decode([0])
    ids = encode_ordinary(tokenizer, prompt)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise UserError("--prompt: this model's tokenizer has no start token, so the prompt must not be empty")
        ids = [tokenizer.bos_token_id]
    if not accelerator.is_main_process:
        return
    streams = [TextStream(tokenizer) for _ in range(arguments.num_samples)]
    later = [""] * arguments.num_samples
    show_text(prompt)
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"):
        for tokens in generate_tokens(
            model,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        ):
            for i, token in enumerate(tokens):
                if token is not None:
                    text = streams[i].add(token)
                    later[i] += text
                    if i == 0:  # the first is shown as it is written, the others after it
                        show_text(text)
    show_text(streams[0].end(), end="\n")
    for i in range(1, arguments.num_samples):
        text = f"{prompt}{later[i]}{streams[i].end()}"
        show_text(f"\n--- sample {i + 1} of {arguments.num_samples} ---\n{text}", end="\n")
