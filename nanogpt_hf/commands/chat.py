"""Talk to a model that was trained on conversations: a run folder, a model folder, or a model on the Hub.

A line is a question; the answer is written as it comes. /reset forgets the conversation, /quit leaves. Ctrl-C ends an
answer, Ctrl-D leaves. Lines may be piped in, too: answers go to stdout, everything else to stderr.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from nanogpt_hf.commands.arguments import add_model_argument, add_sampling_arguments, number
from nanogpt_hf.commands.console import show, show_text
from nanogpt_hf.commands.models import open_model
from nanogpt_hf.errors import DataError, UserError

_HELP = "/reset forgets the conversation, /quit leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="what stands before the conversation, as a system message")
    parser.add_argument(
        "--max-new-tokens", type=number(int, 1), default=256, help="longest answer; default %(default)s"
    )
    add_sampling_arguments(parser)


def say(note: str) -> None:
    """What is no answer, out of the answers' way."""
    show(f"({note})", file=sys.stderr)


def questions() -> Iterator[str]:
    """Lines of the terminal, with a prompt and a history, or of whatever is piped in; without empty ones."""
    if not sys.stdin.isatty():
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  (input() then has line editing and a history)
    while True:
        try:
            line = input("> ").encode(errors="replace").decode().strip()
        except KeyboardInterrupt:
            show(file=sys.stderr)
            say("Ctrl-D or /quit leaves")
            continue
        except EOFError:
            show(file=sys.stderr)
            return
        if line:
            yield line


class Chat:
    """A conversation with a model: what was said so far, and how an answer is drawn."""

    def __init__(self, model, tokenizer, arguments: argparse.Namespace):
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.room = min(arguments.max_new_tokens, model.config.max_position_embeddings // 2)  # kept free for an answer
        self.answers = 0
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.arguments.system}] if self.arguments.system else []

    def answer(self, question: str) -> None:
        """Print the answer to `question` as it comes, and remember both. An interruption ends it and keeps the part."""
        from nanogpt_hf.generate import TextStream, encode_chat, generate_tokens

        arguments, most = self.arguments, self.model.config.max_position_embeddings
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            ids, kept = encode_chat(self.tokenizer, messages, most - self.room)
        except ValueError as error:
            say(f"too long: with what stands before it {error}, the model's context without room to answer; shorten it")
            return
        except DataError as error:
            say(str(error))
            return
        if len(kept) < len(messages):
            say(f"the context is full: the oldest {len(messages) - len(kept)} messages are forgotten")
        stream, text, length = TextStream(self.tokenizer), "", 0
        limit = min(arguments.max_new_tokens, most - len(ids))
        try:
            for (token,) in generate_tokens(
                self.model,
                ids,
                max_new_tokens=limit,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed + self.answers,
            ):
                length += 1
                new = stream.add(token)
                text += new
                show_text(new)
        except KeyboardInterrupt:
            length = -1
        rest = stream.end()
        show_text(rest, end="\n")
        if length in (-1, limit):
            say("interrupted" if length < 0 else f"cut off after {limit} tokens")
        self.messages = [*kept, {"role": "assistant", "content": text + rest}]
        self.answers += 1


def run(arguments: argparse.Namespace) -> None:

    import torch
    from accelerate import Accelerator
    from jinja2 import TemplateError

    accelerator = Accelerator()
    model, tokenizer = open_model(arguments.model)
    if not tokenizer.chat_template:
        raise UserError(
            f"{arguments.model}: its tokenizer has no chat template, so it was not trained to talk; train it on "
            "conversations (recipes/sft_instructions.yaml), or let it write: python cli.py sample"
        )
    if model.config.eos_token_id is None:
        model.config.eos_token_id = tokenizer.eos_token_id
    if not accelerator.is_main_process:
        return
    chat = Chat(model.to(accelerator.device), tokenizer, arguments)
    if sys.stdin.isatty():
        say(f"{_HELP}; Ctrl-C ends an answer")
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"):
        for line in questions():
            if line == "/quit":
                return
            if line == "/reset":
                chat.reset()
                say("the conversation is forgotten")
            elif line.startswith("/") and " " not in line:
                say(f"{line}: no such command; {_HELP}")
            else:
                try:
                    chat.answer(line)
                except TemplateError as error:
                    raise UserError(f"{arguments.model}: its chat template refuses the conversation: {error}") from None
