"""Sample answers of several turns: a turn for all rows at once, then the tools that they call."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.answer_format import Answer
from nanogpt_hf.generate import Completions
from nanogpt_hf.tasks.turns import Turns


class Conversed(NamedTuple):
    """Answers with all their turns."""

    completions: Completions  # the tokens behind the prompts, with the results of tools
    written: Tensor  # (rows, tokens) bool: the tokens that the model has written
    texts: list[str]  # the text of the last turn, without thought and calls
    calls: Tensor  # (rows, 2) calls of tools, and calls whose result is an error


def written_by_model(completions: Completions) -> Tensor:
    """The tokens of completions of one turn, (rows, tokens) bool."""
    return torch.arange(completions.ids.shape[1]) < completions.lengths[:, None]


@dataclass
class _Row:
    prompt: Sequence[int]
    limit: int  # tokens of all turns and results
    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    # Of the newest turn.
    answer: Answer = field(default_factory=partial(Answer, ""))
    calls: int = 0
    failed: int = 0
    # By itself: it is not cut, and waits for no tool.
    ended: bool = False

    @property
    def room(self) -> int:
        return self.limit - len(self.ids)

    def takes_turn(self, turns: Turns, number: int) -> bool:
        """Run the calls of the newest turn, the `number`-th, and put their results behind it.
        Whether the row has another turn.
        """
        if not self.answer.calls and not self.answer.problem:
            self.ended = True
            return False
        if number == turns.limit:
            return False
        reply = turns.reply(self.answer, self.ids[-1])
        self.calls += len(reply.results)
        self.failed += sum(result.failed for result in reply.results)
        # Results without room for a turn after them would only be padding.
        if len(reply.ids) >= self.room:
            return False
        self.ids += reply.ids
        self.written += [False] * len(reply.ids)
        return True


def converse(
    turns: Turns,
    generate: Callable[..., Completions],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    limits: Sequence[int],
    end_ids: Collection[int],
    all_ended: Callable[[bool], bool],
    progress: Callable[[int], object],
) -> Conversed:
    """Sample an answer of several turns for each prompt; a limit is for all turns of an answer with
    the results of tools.

    `generate` is `generate_completions` without prompts, seeds and limits. Turn t of row i is drawn
    by a seed that follows from `seeds[i]` and t; the first turn by `seeds[i]`. An answer is cut if
    a result leaves no room for another turn, or after `turns.limit` turns. `all_ended` is called
    with whether no row of this process has another turn: the processes of a sharded model take
    equally many. `progress` is called with the number of answers that have ended.
    """
    rows = [_Row(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    active = list(range(len(rows)))
    number = 0
    while not all_ended(not active):
        part = generate(
            [[*rows[i].prompt, *rows[i].ids] for i in active],
            seeds=[derive_seed(seeds[i], "turns", number) if number else seeds[i] for i in active],
            limits=[rows[i].room for i in active],
        )
        number += 1
        going_on = []
        for place, i in enumerate(active):
            row = rows[i]
            length = int(part.lengths[place])
            ids = part.ids[place, :length].tolist()
            row.ids += ids
            row.written += [True] * length
            row.answer = turns.read(ids[:-1] if ids[-1] in end_ids else ids)
            # What was cut is no call.
            if part.ended[place] and row.takes_turn(turns, number):
                going_on.append(i)
        progress(len(active) - len(going_on))
        active = going_on
    return _joined(rows)


def _joined(rows: Sequence[_Row]) -> Conversed:
    width = max((row.limit for row in rows), default=0)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    written = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        length = len(row.ids)
        ids[number, :length] = torch.tensor(row.ids)
        written[number, :length] = torch.tensor(row.written)
    lengths = torch.tensor([len(row.ids) for row in rows], dtype=torch.int64)
    ended = torch.tensor([row.ended for row in rows], dtype=torch.bool)
    calls = torch.tensor([[row.calls, row.failed] for row in rows], dtype=torch.int64)
    return Conversed(
        Completions(ids, lengths, ended),
        written,
        [row.answer.content for row in rows],
        calls.view(len(rows), 2),
    )
