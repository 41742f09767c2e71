"""The commands sample and serve, and what `chat` shares with them."""

import functools
import importlib.util
import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import add_model_argument, add_option, found_model
from nanogpt_hf.config.values import bounded, stated
from nanogpt_hf.console import show_text
from nanogpt_hf.errors import UserError
from nanogpt_hf.interrupts import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_log = logging.getLogger(__name__)


def add_sampling_arguments(parser: ArgumentParser, max_new_tokens: int) -> None:
    """Add the model, and the options of sampling from it."""
    add_model_argument(parser)
    longest = "maximum number of tokens that are generated"
    add_option(parser, "--max-new-tokens N", longest, type=bounded(int, 1), default=max_new_tokens)
    greedy = "temperature of sampling; 0 takes the likeliest token"
    add_option(parser, "--temperature T", greedy, type=bounded(float, 0), default=0.8)
    add_option(parser, "--top-k K", "sample from the k likeliest tokens only", type=bounded(int, 1))
    likeliest = "sample from the likeliest tokens that add up to p only"
    add_option(parser, "--top-p P", likeliest, type=bounded(float, 0, 1))
    add_option(parser, "--seed N", "seed of the samples", type=bounded(int, 0, 2**62), default=1337)


def sampling_options(arguments: Namespace) -> dict[str, Any]:
    """Collect the options of `generate_tokens` that hold for all texts of a command."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}


def autocast(accelerator: "Accelerator") -> "torch.autocast":
    """A new context for forward passes in the precision of the accelerate config, but in float32
    instead of fp16.
    """
    # fp16 may overflow in a model that was trained in another precision.
    import torch

    return torch.autocast(
        accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"
    )


def open_model(
    name: str, step: int | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load MODEL, or a run's model after `step` steps, in evaluation mode, and its tokenizer.

    Raises UserError if one is missing or they do not fit.
    """
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.hf_tokenizer import check_vocabulary, load_tokenizer
    from nanogpt_hf.model.load import load_model

    # Loading a model takes a second: a bar would only flicker.
    disable_progress_bar()
    with found_model(name, step) as found:
        model = load_model(found.folder).eval()
        tokenizer = load_tokenizer(found.folder)
        check_vocabulary(found.name, len(tokenizer), model.config.vocab_size)
    return model, tokenizer


def add_sample_arguments(parser: ArgumentParser) -> None:
    add_sampling_arguments(parser, 500)
    text = "text to continue (default: a line break, or nothing after a start token)"
    add_option(parser, "--prompt TEXT", text)
    add_option(
        parser, "--num-samples N", "number of samples", type=bounded(int, 1, 10_000), default=1
    )


def run_sample(arguments: Namespace) -> None:
    """Generate text with the model of a run folder, a model folder or the Hub; the text is printed
    as it is generated.
    """
    from nanogpt_hf.data.hf_tokenizer import prompt_ids, start_of_text_id_of
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.generate import TextStream, generate_tokens

    accelerator = build_evaluation_accelerator(arguments.mesh)
    model, tokenizer = open_model(arguments.model, arguments.step)
    model.to(accelerator.device)
    # A model without a start token was not trained to predict a first token. After a line break it
    # writes a line from its beginning.
    prompt = arguments.prompt
    if prompt is None:
        prompt = "\n" if start_of_text_id_of(tokenizer) is None else ""
    try:
        ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise UserError(f"--prompt: {error}") from None
    # One process writes; under `launch` the others have nothing to do.
    if not accelerator.is_main_process:
        return
    # All samples are generated at once. The first is printed as it comes, the others at the end.
    stream = TextStream(tokenizer, ids)
    count = arguments.num_samples
    samples: list[list[int]] = [[] for _ in range(count)]
    show_text(prompt)
    with autocast(accelerator):
        for tokens in generate_tokens(
            model,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            num_samples=count,
            seed=arguments.seed,
            **sampling_options(arguments),
        ):
            # A token for each sample, None for a sample that has ended.
            for sample, token in zip(samples, tokens, strict=True):
                if token is not None:
                    sample.append(token)
            if tokens[0] is not None:
                show_text(stream.add(tokens[0]))
    show_text(stream.end(), end="\n")
    for number, sample in enumerate(samples[1:], 2):
        stream = TextStream(tokenizer, ids)
        text = prompt + "".join(map(stream.add, sample)) + stream.end()
        show_text(f"\n--- sample {number} of {count} ---\n{text}", end="\n")


def add_serve_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    # An empty address, as of a variable that is not set, would listen on all of the machine's.
    add_option(parser, "--host", "address to listen on", default="127.0.0.1", type=stated)
    add_option(
        parser,
        "--port",
        "port to listen on; 0 takes a free one",
        type=bounded(int, 0, 65535),
        default=8000,
    )


def run_serve(arguments: Namespace) -> int | None:
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
    from nanogpt_hf.serving.generation import Served
    from nanogpt_hf.serving.server import Server, is_loopback, listen

    accelerator = build_evaluation_accelerator(arguments.mesh)
    if not accelerator.is_main_process:
        return None
    # The port is taken before the model is loaded: a port in use is reported at once.
    with listen(arguments.host, arguments.port) as listener:
        model, tokenizer = open_model(arguments.model, arguments.step)
        precision = functools.partial(autocast, accelerator)
        # Clients name the model in their requests: a folder by its last part, a Hub id as it is,
        # the model of a step as RUN@400.
        path = Path(arguments.model)
        name = path.resolve().name if path.is_dir() else arguments.model
        name += f"@{arguments.step}" if arguments.step is not None else ""
        served = Served(name, model.to(accelerator.device), tokenizer, precision)
        server = Server(served, arguments.host)
        host, port = listener.getsockname()[:2]
        # A server has no password, so its user should know who can reach it.
        if not is_loopback(arguments.host):
            _log.warning(
                f"--host {host}: all who reach this machine can use the model; there is no password"
            )
        # An IPv6 address is in brackets, since it has colons.
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info(f"{name}: the API is at {url}/v1, the chat page at {url}; Ctrl-C ends the server")
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            # This is how a user ends a server.
            return EXIT_INTERRUPTED
    return None
