"""The commands that generate text: sample, chat and serve."""

import contextlib
import functools
import importlib.util
import io
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import add_option
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show, show_text
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import find_model

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_log = logging.getLogger(__name__)


def _add_model_argument(parser: ArgumentParser) -> None:
    add_option(parser, "model MODEL", "a run folder (its best model), a model folder, or a Hub id")


def _add_sampling_arguments(parser: ArgumentParser, max_new_tokens: int) -> None:
    """The model, and how it continues a text."""
    _add_model_argument(parser)
    longest = "maximum number of tokens that are generated"
    add_option(parser, "--max-new-tokens N", longest, type=bounded(int, 1), default=max_new_tokens)
    greedy = "temperature of sampling; 0 takes the likeliest token"
    add_option(parser, "--temperature T", greedy, type=bounded(float, 0), default=0.8)
    add_option(parser, "--top-k K", "sample from the k likeliest tokens only", type=bounded(int, 1))
    likeliest = "sample from the likeliest tokens that add up to p only"
    add_option(parser, "--top-p P", likeliest, type=bounded(float, 0, 1))
    add_option(parser, "--seed N", "seed of the samples", type=bounded(int, 0, 2**62), default=1337)


def _sampling_options(arguments: Namespace) -> dict[str, Any]:
    """The options of `generate_tokens` for all texts of a command."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}


def _autocast(accelerator: "Accelerator") -> "torch.autocast":
    """A new context for forward passes in the precision of the accelerate config, but in float32
    instead of fp16.
    """
    import torch

    return torch.autocast(
        accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"
    )


def open_model(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """MODEL in evaluation mode, and its tokenizer.

    Raises UserError if one is missing or they do not fit.
    """
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.tokenizer import check_vocabulary, load_tokenizer
    from nanogpt_hf.model.build import load_model

    disable_progress_bar()
    folder = find_model(name)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    check_vocabulary(folder, len(tokenizer), model.config.vocab_size)
    return model, tokenizer


def add_sample_arguments(parser: ArgumentParser) -> None:
    _add_sampling_arguments(parser, 500)
    text = "text to continue (default: a line break, or nothing after a start token)"
    add_option(parser, "--prompt TEXT", text)
    add_option(
        parser, "--num-samples N", "number of samples", type=bounded(int, 1, 10_000), default=1
    )


def run_sample(arguments: Namespace) -> None:
    """Generate text with the model of a run folder, a model folder or the Hub; the text is printed
    as it is generated.
    """
    from nanogpt_hf.data.tokenizer import prompt_ids, start_of_text_id_of
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.generate import TextStream, generate_tokens

    accelerator = build_evaluation_accelerator(arguments.mesh)
    model, tokenizer = open_model(arguments.model)
    model.to(accelerator.device)
    prompt = arguments.prompt
    if prompt is None:
        prompt = "\n" if start_of_text_id_of(tokenizer) is None else ""
    try:
        ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise UserError(f"--prompt: {error}") from None
    if not accelerator.is_main_process:
        return
    stream, count = TextStream(tokenizer, ids), arguments.num_samples
    samples: list[list[int]] = [[] for _ in range(count)]
    show_text(prompt)
    with _autocast(accelerator):
        for tokens in generate_tokens(
            model,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            num_samples=count,
            seed=arguments.seed,
            **_sampling_options(arguments),
        ):
            for sample, token in zip(samples, tokens, strict=True):
                if token is not None:
                    sample.append(token)
            if tokens[0] is not None:  # the others are printed at the end
                show_text(stream.add(tokens[0]))
    show_text(stream.end(), end="\n")
    for number, sample in enumerate(samples[1:], 2):
        stream = TextStream(tokenizer, ids)
        text = prompt + "".join(map(stream.add, sample)) + stream.end()
        show_text(f"\n--- sample {number} of {count} ---\n{text}", end="\n")


def add_chat_arguments(parser: ArgumentParser) -> None:
    _add_sampling_arguments(parser, 256)
    add_option(parser, "--system TEXT", "system message at the start of the conversation")


def show_note(note: str) -> None:
    """Print a note, which is not part of an answer, to stderr."""
    show(f"({note})", file=sys.stderr)


def questions() -> Iterator[str]:
    """Lines from the terminal, with a prompt and a history, or from a pipe; no empty ones."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # tokenizers raise an error for half characters
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  (input() then has line editing and a history)
    with contextlib.suppress(EOFError):  # Ctrl-D
        while True:
            if line := input("> ").strip():
                yield line


def run_chat(arguments: Namespace) -> None:
    """Chat with a model that was trained on conversations: a run folder, a model folder, or a model
    on the Hub.

    Each line is a question; its answer is printed as it is generated. /reset clears the
    conversation, /quit exits. Ctrl-C ends an answer, Ctrl-D exits. Lines can be piped in: answers
    go to stdout, all other output to stderr.
    """
    from nanogpt_hf.data.chat_template import ChatFormat
    from nanogpt_hf.data.chat_window import encode_chat
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.generate import TextStream, answer_end_ids, generate_tokens

    accelerator = build_evaluation_accelerator(arguments.mesh)
    model, tokenizer = open_model(arguments.model)
    if not tokenizer.chat_template:
        raise UserError(
            f"{arguments.model}: its tokenizer has no chat template, so it was not trained to "
            "chat; train it on conversations (recipes/sft_instructions.yaml), or generate text: "
            f"{program()} sample"
        )
    if not accelerator.is_main_process:
        return
    model.to(accelerator.device)
    chat_format = ChatFormat(tokenizer)
    options: Any = _sampling_options(arguments)
    options |= {"end_ids": answer_end_ids(model, chat_format)}
    context = model.config.max_position_embeddings
    longest_prompt = context - min(arguments.max_new_tokens, context // 2)
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages, answers = first, 0
    if sys.stdin.isatty():
        show_note("/reset clears the conversation, /quit exits, Ctrl-C ends an answer")
    for line in questions():
        if line == "/quit":
            return
        if line == "/reset":
            messages = first
            show_note("the conversation was cleared")
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            ids, kept = encode_chat(chat_format, asked, longest_prompt)
        except (ValueError, DataError) as error:
            show_note(f"no answer: with the messages before it {error}; shorten it")
            continue
        if len(kept) < len(asked):
            show_note(
                f"the context is full: the oldest {len(asked) - len(kept)} messages were dropped"
            )
        limit = min(arguments.max_new_tokens, context - len(ids))
        stream, text, length = TextStream(tokenizer), "", 0
        tokens = generate_tokens(
            model, ids, max_new_tokens=limit, seed=arguments.seed + answers, **options
        )
        with _autocast(accelerator), contextlib.suppress(KeyboardInterrupt):
            for (token,) in tokens:
                assert token is not None  # `generate_tokens` ends with its only sample
                length += 1
                new = stream.add(token)
                text += new
                show_text(new)
        rest = stream.end()
        show_text(rest, end="\n")
        if length == limit:
            show_note(f"cut off after {limit} tokens")
        messages = [*kept, {"role": "assistant", "content": text + rest}]
        answers += 1


def add_serve_arguments(parser: ArgumentParser) -> None:
    _add_model_argument(parser)
    add_option(parser, "--host", "address to listen on", default="127.0.0.1")
    add_option(
        parser,
        "--port",
        "port to listen on; 0 takes a free one",
        type=bounded(int, 0, 65535),
        default=8000,
    )


def run_serve(arguments: Namespace) -> None:
    """Serve a model as OpenAI's API does, with a chat page: a run folder, a model folder, or a
    model on the Hub.

    Any client of that API can use http://localhost:8000/v1: models, completions, and chat
    completions if the model has a chat template. http://localhost:8000 is the chat page. Ctrl-C
    ends the server.
    """
    if missing := [
        name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None
    ]:
        raise UserError(
            f"serve: {' and '.join(missing)} not installed; run `pip install 'nanogpt_hf[serve]'`"
        )

    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.serving.server import Server, is_loopback, listen

    accelerator = build_evaluation_accelerator(arguments.mesh)
    if not accelerator.is_main_process:
        return
    with listen(arguments.host, arguments.port) as listener:
        model, tokenizer = open_model(arguments.model)
        precision = functools.partial(_autocast, accelerator)
        path = Path(arguments.model)  # a Hub id stays as it is
        name = path.resolve().name if path.is_dir() else arguments.model
        server = Server(name, model.to(accelerator.device), tokenizer, precision, arguments.host)
        host, port = listener.getsockname()[:2]
        if not is_loopback(arguments.host):
            _log.warning(
                f"--host {host}: all who reach this machine can use the model; there is no password"
            )
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info(f"{name}: the API is at {url}/v1, the chat page at {url}; Ctrl-C ends the server")
        server.run(sockets=[listener])
