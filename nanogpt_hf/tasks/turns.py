"""Turns of an answer that calls tools: read the calls, run them, put the results behind them."""

from dataclasses import dataclass
from typing import NamedTuple

from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.data.answer_format import Answer, AnswerFormat, answer_format
from nanogpt_hf.data.call_format import Call
from nanogpt_hf.data.chat_template import ChatFormat, call_id
from nanogpt_hf.data.messages import Message, spoken
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.tasks.tools import ToolResult, Tools

# Turns of an answer outside of a run of reinforcement learning.
MAX_TURNS: int = KNOBS["rl.max_turns"].default
_PROBE = "Proberesult."
# The name in a result of a call that cannot be read, or whose tool does not exist.
_UNKNOWN = "unknown"


class Reply(NamedTuple):
    """The results of the calls of an answer."""

    names: tuple[str, ...]
    results: tuple[ToolResult, ...]
    ids: list[int]  # tokens that follow the answer: the results, and the prompt for the next turn


@dataclass(frozen=True)
class Turns:
    """The tools of a conversation, in the form of a model's chat template."""

    chat: ChatFormat
    form: AnswerFormat
    tools: Tools
    limit: int  # turns of an answer

    def read(self, ids: list[int]) -> Answer:
        """Read the tokens of one turn, without the one that ends it."""
        text = self.chat.hf.decode(self.form.visible(ids))
        return self.form.read(str(text), self.tools.schemas)

    def reply(self, answer: Answer, end_id: int) -> Reply:
        """Run the calls of an answer in their order.

        `end_id` is the token that ended the answer. A call that cannot be read gets the reason as
        its result.
        """
        if answer.problem:
            names = (_UNKNOWN,)
            results = (ToolResult(f"error: {answer.problem}", failed=True),)
        else:
            # A name that is none of a tool may be any text.
            asked = [call["function"]["name"] for call in answer.calls]
            names = tuple(name if name in self.tools.functions else _UNKNOWN for name in asked)
            results = tuple(map(self.tools.call, answer.calls))
        try:
            ids = self.chat.reply_ids(names, tuple(result.text for result in results))
        except DataError:
            # Text that the tokenizer or the template cannot write, such as an unknown character.
            results = tuple(ToolResult("error", failed=True) for _ in results)
            ids = self.chat.reply_ids(names, ("error",) * len(results))
        # Some templates begin a result with the token by which the model has ended its answer.
        return Reply(names, results, ids[1:] if ids[:1] == [end_id] else ids)

    def messages(self, answer: Answer, reply: Reply) -> list[Message]:
        """An answer that calls tools, and the results, as messages of the conversation."""
        calls: list[Call] = [
            call | {"id": call_id(number)} for number, call in enumerate(answer.calls)
        ]
        results = [
            {
                "role": "tool",
                "name": call["function"]["name"],
                "tool_call_id": call["id"],
                "content": result.text,
            }
            for call, result in zip(calls, reply.results, strict=True)
        ]
        said = spoken(answer.content, answer.thought) | {"tool_calls": calls}
        return [said, *results]


def build_turns(chat: ChatFormat | None, tools: Tools, limit: int, where: str) -> Turns:
    """Prepare the turns of a model. Raises UserError if its chat template has no place for tools,
    or their calls cannot be read.
    """
    if chat is None:
        raise UserError(
            f"{where}: the model has no chat template, so it cannot call a tool; train it on "
            "conversations that call tools"
        )
    form = answer_format(chat)
    if form.calls is None:
        raise UserError(
            f"{where}: the model's chat template writes no calls of tools, or in a form that this "
            "program cannot read; choose another model"
        )
    try:
        chat.prompt_ids([{"role": "user", "content": "Why?"}], tools.schemas)
        reply = str(chat.hf.decode(chat.reply_ids((_UNKNOWN,), (_PROBE,))))
    except DataError as error:
        raise UserError(f"{where}: {error}") from None
    if _PROBE not in reply:
        raise UserError(
            f"{where}: the model's chat template does not write the result of a tool; choose "
            "another model"
        )
    return Turns(chat, form, tools, limit)
