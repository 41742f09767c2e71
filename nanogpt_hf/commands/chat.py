"""Chat with a model that was trained on conversations: a run folder, a model folder, or a model on the Hub.

Each line is a question; its answer is printed as it is generated. /reset clears the conversation, /quit exits. Ctrl-C
ends an answer, Ctrl-D exits. Lines can be piped in: answers go to stdout, all other output to stderr.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator

from nanogpt_hf.commands.arguments import add_model_argument, add_sampling_arguments, number, sampling_options
from nanogpt_hf.commands.console import show, show_text
from nanogpt_hf.commands.models import autocast, build_generation_accelerator, open_model
from nanogpt_hf.errors import DataError, UserError

_HELP = "/reset clears the conversation, /quit exits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument(
        "--max-new-tokens", type=number(int, 1), default=256, help="maximum length of an answer; default %(default)s"
    )
    add_sampling_arguments(parser)


def show_note(note: str) -> None:
    """Print a note, which is not part of an answer, to stderr."""
    show(f"({note})", file=sys.stderr)


def questions() -> Iterator[str]:
    """Lines from the terminal, with a prompt and a history, or from a pipe; empty lines are skipped."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
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
            show_note("Ctrl-D or /quit exits")
            continue
        except EOFError:
            show(file=sys.stderr)
            return
        if line:
            yield line


class Chat:
    """A conversation with a model, and the options of sampling its answers."""

    def __init__(self, model, tokenizer, arguments: argparse.Namespace):
        from nanogpt_hf.data.chat_template import ChatFormat
        from nanogpt_hf.generate import answer_end_ids

        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.room = min(arguments.max_new_tokens, model.config.max_position_embeddings // 2)  # kept free for an answer
        self.answers = 0
        self.format = ChatFormat(tokenizer)
        self.end_ids = answer_end_ids(model, self.format)
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.arguments.system}] if self.arguments.system else []

    def answer(self, question: str) -> None:
        """Generate and print the answer to `question`, and keep both as context; Ctrl-C ends it early."""
        from nanogpt_hf.generate import TextStream, encode_chat, generate_tokens

        arguments, context = self.arguments, self.model.config.max_position_embeddings
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            ids, kept = encode_chat(self.format, messages, context - self.room)
        except ValueError as error:
            show_note(
                f"too long: with the messages before it {error}, the model's context without room for an answer; "
                "shorten it"
            )
            return
        except DataError as error:
            show_note(str(error))
            return
        if len(kept) < len(messages):
            show_note(f"the context is full: the oldest {len(messages) - len(kept)} messages were dropped")
        stream, text, length = TextStream(self.tokenizer), "", 0
        limit = min(arguments.max_new_tokens, context - len(ids))
        try:
            for (token,) in generate_tokens(
                self.model,
                ids,
                max_new_tokens=limit,
                seed=arguments.seed + self.answers,
                end_ids=self.end_ids,
                **sampling_options(arguments),
            ):
                length += 1
                assert token is not None  # `generate_tokens` ends with its only sample
                new = stream.add(token)
                text += new
                show_text(new)
        except KeyboardInterrupt:
            length = -1
        rest = stream.end()
        show_text(rest, end="\n")
        if length in (-1, limit):
            show_note("interrupted" if length < 0 else f"cut off after {limit} tokens")
        self.messages = [*kept, {"role": "assistant", "content": text + rest}]
        self.answers += 1


def run(arguments: argparse.Namespace) -> None:
    accelerator = build_generation_accelerator()
    model, tokenizer = open_model(arguments.model)
    if not tokenizer.chat_template:
        raise UserError(
            f"{arguments.model}: its tokenizer has no chat template, so it was not trained to chat; train it on "
            "conversations (recipes/sft_instructions.yaml), or generate text: python cli.py sample"
        )
    if not accelerator.is_main_process:
        return
    chat = Chat(model.to(accelerator.device), tokenizer, arguments)
    if sys.stdin.isatty():
        show_note(f"{_HELP}; Ctrl-C ends an answer")
    with autocast(accelerator):
        for line in questions():
            if line == "/quit":
                return
            if line == "/reset":
                chat.reset()
                show_note("the conversation was cleared")
            elif line.startswith("/") and " " not in line:
                show_note(f"{line}: no such command; {_HELP}")
            else:
                chat.answer(line)
