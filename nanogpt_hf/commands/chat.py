"""The command chat: a conversation on the terminal, in which answers may call tools."""

import contextlib
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.commands.arguments import add_option
from nanogpt_hf.commands.generate import (
    add_sampling_arguments,
    autocast,
    open_model,
    sampling_options,
)
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.console import has_styles, show, show_text
from nanogpt_hf.errors import DataError, UserError, one_line
from nanogpt_hf.formatting import escape_controls
from nanogpt_hf.program import program

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nanogpt_hf.data.answer_format import AnswerFormat
    from nanogpt_hf.data.call_format import Call
    from nanogpt_hf.data.chat_template import ChatFormat
    from nanogpt_hf.data.messages import Message
    from nanogpt_hf.tasks.turns import Turns

# The time limit of a call of a tool, as in `rl`.
_SECONDS: float = KNOBS["rl.reward_seconds"].default
# Characters of a call, and of a result, that are printed.
_SHOWN = 200


def add_chat_arguments(parser: ArgumentParser) -> None:
    add_sampling_arguments(parser, 256)
    add_option(parser, "--system TEXT", "system message at the start of the conversation")
    add_option(
        parser,
        "--tools A,B",
        "tools that an answer may call: calculator, or Python files, as for `rl`",
    )


def show_note(note: str) -> None:
    """Print a note, which is not part of an answer, to stderr."""
    show(f"({note})", file=sys.stderr)


def questions() -> Iterator[str]:
    """Yield lines from the terminal, with a prompt and a history, or from a pipe; no empty ones."""
    # Tokenizers raise an error for half characters, which a terminal of another encoding may send.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    # With this module input() has line editing and a history. Windows has none.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    # Ctrl-D ends the input.
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> ").strip():
                yield line


def run_chat(arguments: Namespace) -> None:
    """Chat with a model that was trained on conversations: a run folder, a model folder, or a model
    on the Hub.

    Each line is a question; its answer is printed as it is generated. /reset clears the
    conversation, /quit exits. Ctrl-C ends an answer, Ctrl-D exits. Lines can be piped in: answers
    go to stdout, all other output to stderr. With --tools an answer may call tools: each call is
    printed with its result, and the model continues. A thought before an answer is dimmed on a
    terminal, and goes to stderr if stdout is none.
    """
    from nanogpt_hf.data.answer_format import answer_format
    from nanogpt_hf.data.chat_template import ChatFormat
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.tasks.tools import load_tools
    from nanogpt_hf.tasks.turns import MAX_TURNS, build_turns

    accelerator = build_evaluation_accelerator(arguments.mesh)
    tools = None
    if arguments.tools is not None:
        tools = load_tools(arguments.tools.split(","), _SECONDS, "--tools")
    model, tokenizer = open_model(arguments.model, arguments.step)
    if not tokenizer.chat_template:
        raise UserError(
            f"{arguments.model}: its tokenizer has no chat template, so it was not trained to "
            "chat; train it on conversations (recipes/sft_instructions.yaml), or generate text: "
            f"{program()} sample"
        )
    if not accelerator.is_main_process:
        return
    form = ChatFormat(tokenizer)
    turns = build_turns(form, tools, MAX_TURNS, "--tools") if tools else None
    answers = turns.form if turns else answer_format(form).without_calls()
    model.to(accelerator.device)
    chat = _Chat(model, form, answers, turns, partial(autocast, accelerator), arguments)
    if sys.stdin.isatty():
        show_note("/reset clears the conversation, /quit exits, Ctrl-C ends an answer")
    for line in questions():
        if line == "/quit":
            return
        if line == "/reset":
            chat.clear()
            show_note("the conversation was cleared")
        else:
            chat.ask(line)


class _Turn(NamedTuple):
    """What the model has written in one turn."""

    tokens: list[int]
    thought: str
    text: str  # without calls of tools
    end_id: int | None  # the token that ended it; None if it was cut off or interrupted


class _Screen:
    """Prints a turn as it comes: its text, and before it its thought, which is dimmed, or a note on
    stderr if stdout is no terminal that shows this.
    """

    def __init__(self):
        self._is_dim = has_styles()
        self._in_thought = False
        self._has_text = False

    def add(self, thought: str, text: str) -> None:
        if thought and self._is_dim:
            show_text(thought, is_dim=True)
        elif thought:
            begin = "" if self._in_thought else "(thought: "
            show_text(escape_controls(begin + thought), file=sys.stderr)
        self._in_thought = self._in_thought or bool(thought)
        if text and self._in_thought:
            self._end_thought()
            # An empty line between them.
            show_text("\n" if self._is_dim else "")
        show_text(text)
        self._has_text = self._has_text or bool(text)

    def end(self, *, is_answer: bool) -> None:
        """End the line of a turn. An answer has one, if it is empty, too."""
        on_line = self._in_thought and self._is_dim
        if self._in_thought:
            self._end_thought()
        if self._has_text or (is_answer and not on_line):
            show_text("", end="\n")

    def _end_thought(self) -> None:
        if self._is_dim:
            show_text("", end="\n")
        else:
            show_text(")", end="\n", file=sys.stderr)
        self._in_thought = False


class _Chat:
    """A conversation on the terminal."""

    def __init__(
        self,
        model: "PreTrainedModel",
        form: "ChatFormat",
        answers: "AnswerFormat",
        turns: "Turns | None",
        precision: Callable[[], contextlib.AbstractContextManager],
        arguments: Namespace,
    ):
        from nanogpt_hf.generate import answer_end_ids

        self._model = model
        self._precision = precision
        self._format = form
        self._answer_format = answers
        self._turns = turns
        self._tools = turns.tools.schemas if turns else None
        self._seed = arguments.seed
        self._max_new_tokens = arguments.max_new_tokens
        self._context = model.config.max_position_embeddings
        # At least half of the context is for the conversation, however long answers may be.
        self._longest_prompt = self._context - min(self._max_new_tokens, self._context // 2)
        self._options: Any = sampling_options(arguments)
        self._end_ids = answer_end_ids(model, self._format)
        self._first: list[Any] = []
        if arguments.system:
            self._first = [{"role": "system", "content": arguments.system}]
        self._answers = 0
        self.clear()

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self._messages = self._first

    def ask(self, line: str) -> None:
        """Print the answer to a question with its calls of tools, and remember all of it."""
        from nanogpt_hf.data.chat_window import encode_chat

        asked = [*self._messages, {"role": "user", "content": line}]
        try:
            asked = self._for_template(asked)
            ids, kept = encode_chat(self._format, asked, self._longest_prompt, self._tools)
        except (ValueError, DataError) as error:
            # The conversation is as before, so the user can ask again.
            show_note(f"no answer: with the messages before it {error}; shorten it")
            return
        if len(kept) < len(asked):
            dropped = len(asked) - len(kept)
            show_note(f"the context is full: the oldest {dropped} messages were dropped")
        messages = self._answer(ids)
        self._messages = [*kept, *self._that_can_be_written(kept, messages)]
        self._answers += 1

    def _answer(self, ids: list[int]) -> "list[Message]":
        """Generate the turns of an answer, and run the tools that they call. Return the messages
        that are remembered; the last one is the last turn.
        """
        from nanogpt_hf.data.messages import spoken

        messages: list[Any] = []
        # The same question, asked again, gets another answer.
        seed = self._seed + self._answers
        number = 0
        while True:
            turn = self._turn(ids, derive_seed(seed, "turns", number) if number else seed)
            number += 1
            last = spoken(turn.text, turn.thought)
            # A turn that was cut off or interrupted calls nothing.
            if self._turns is None or turn.end_id is None:
                return [*messages, last]
            answer = self._turns.read(turn.tokens)
            if not answer.calls and not answer.problem:
                return [*messages, last]
            if number == self._turns.limit:
                show_note(f"cut off after {number} turns")
                return [last]
            try:
                reply = self._turns.reply(answer, turn.end_id)
            except KeyboardInterrupt:
                return [last]
            for call, result in zip(answer.calls, reply.results, strict=False):
                show_note(f"{_shown(call)} = {one_line(result.text, _SHOWN)}")
            if answer.problem:
                show_note(one_line(answer.problem, _SHOWN))
            ids = [*ids, *turn.tokens, turn.end_id, *reply.ids]
            if len(ids) >= self._context:
                show_note("cut off: the context has no room for another turn")
                return [last]
            # The model has read why a call could not be read; no message of a conversation has it.
            if not answer.problem:
                messages += self._turns.messages(answer, reply)

    def _that_can_be_written(
        self, kept: "list[Message]", messages: "list[Message]"
    ) -> "list[Message]":
        """Leave out the calls of an answer if the chat template does not write them in an earlier
        turn; the next question would be refused.
        """
        if len(messages) > 1:
            try:
                asked = [*kept, *messages, {"role": "user", "content": "Why?"}]
                self._format.prompt_ids(self._for_template(asked), self._tools)
            except DataError:
                return messages[-1:]
        return messages

    def _for_template(self, messages: "list[Message]") -> "list[Message]":
        """Leave out the thoughts that the chat template does not write, as `serve` does."""
        if not self._answer_format.thinks:
            return messages
        return self._format.without_lost_thoughts(messages, self._tools)

    def _turn(self, ids: list[int], seed: int) -> _Turn:
        """Generate a turn, and print its text as it comes; Ctrl-C ends it."""
        from nanogpt_hf.data.answer_stream import AnswerSplitter
        from nanogpt_hf.generate import TextStream, generate_tokens

        limit = min(self._max_new_tokens, self._context - len(ids))
        form = self._answer_format
        has_marks = form.thinks or form.calls is not None
        stream = TextStream(self._format.hf, (), form if has_marks else None)
        splitter = AnswerSplitter(form, self._tools)
        screen = _Screen()
        thought = text = ""
        tokens: list[int] = []
        end_id = None

        def add(new_thought: str, new: str) -> None:
            nonlocal thought, text
            thought += new_thought
            text += new
            screen.add(new_thought, new)

        steps = generate_tokens(
            self._model,
            ids,
            max_new_tokens=limit,
            seed=seed,
            # The token that ends the turn is needed for the next one.
            end_ids=(),
            **self._options,
        )
        with self._precision(), contextlib.suppress(KeyboardInterrupt):
            for (token,) in steps:
                # `generate_tokens` ends with its only sample.
                assert token is not None
                if token in self._end_ids:
                    end_id = token
                    break
                tokens.append(token)
                add(*splitter.add(stream.add(token)))
        # Bytes that are no whole character yet.
        add(*splitter.add(stream.end()))
        in_thought = splitter.in_thought
        more, rest, _ = splitter.end(is_cut=end_id is None)
        add(more, rest)
        # A turn that only calls tools has no line.
        screen.end(is_answer=self._turns is None)
        if len(tokens) == limit:
            where = ", within its thought" if in_thought else ""
            show_note(f"cut off after {limit} tokens{where}")
        return _Turn(tokens, thought, text, end_id)


def _shown(call: "Call") -> str:
    """A call as it is printed before its result."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return one_line(f"{function['name']}({arguments})", _SHOWN)
