"""Answers of several turns: tokens, masks, seeds and limits, with scripted turns of a model."""

import pytest
import torch

from chat_templates import calling
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.evaluation.turns import converse
from nanogpt_hf.generate import Completions
from nanogpt_hf.tasks.tools import load_tools
from nanogpt_hf.tasks.turns import build_turns

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "123+456"}}\n</tool_call>'


@pytest.fixture(scope="module")
def turns():
    return build_turns(ChatFormat(calling("hermes")), load_tools(["calculator"], 5.0), 3, "")


@pytest.fixture
def talk(turns):
    """Sample answers whose turns are the given texts; `asked` collects what was asked for."""
    hf = turns.chat.hf
    end = hf.eos_token_id

    def talk(*answers, max_new_tokens=400, all_ended=bool):
        spoken = [list(answer) for answer in answers]
        asked = []

        def generate(prompts, *, seeds, limits):
            asked.append((prompts, seeds, limits))
            width = max(limits, default=0)
            ids = torch.zeros(len(prompts), width, dtype=torch.int64)
            lengths = []
            ended = []
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                text = spoken[prompt[0]].pop(0) if spoken[prompt[0]] else "over."
                tokens = hf(text, add_special_tokens=False)["input_ids"]
                tokens = [*tokens, end] if not text.endswith("…") else tokens
                tokens = tokens[:limit]
                ended.append(tokens[-1] == end)
                ids[row, : len(tokens)] = torch.tensor(tokens)
                lengths.append(len(tokens))
            return Completions(ids, torch.tensor(lengths), torch.tensor(ended))

        found = converse(
            turns,
            generate,
            [[number] for number in range(len(answers))],
            [7 + number for number in range(len(answers))],
            [max_new_tokens] * len(answers),
            {end},
            all_ended,
            lambda rows: None,
        )
        return found, asked

    return talk


def whole(turns, found, row) -> str:
    length = found.completions.lengths[row]
    return turns.chat.hf.decode(found.completions.ids[row, :length])


def test_results_are_put_behind_the_calls_and_are_not_learned(turns, talk):
    found, asked = talk([CALL, "579"], ["5"])
    assert found.texts == ["579", "5"]
    reply = "\n<|im_start|>tool\n579<|im_end|>\n<|im_start|>assistant\n"
    assert whole(turns, found, 0) == f"{CALL}<|im_end|>{reply}579<|im_end|>"
    learned = found.completions.ids[0][found.written[0]]
    assert turns.chat.hf.decode(learned) == f"{CALL}<|im_end|>579<|im_end|>"
    assert whole(turns, found, 1) == "5<|im_end|>"
    assert found.written[1].sum() == found.completions.lengths[1] == 2
    assert found.completions.ended.tolist() == [True, True]
    assert found.calls.tolist() == [[1, 0], [0, 0]]
    # The second turn reads the very tokens of the first one, and has only the row that goes on.
    (first, seeds, limits), (second, later, rest) = asked
    length = int(found.completions.lengths[0])
    assert [*first[0], *found.completions.ids[0, : length - 4].tolist()] == second[0]
    assert (len(first), len(second)) == (2, 1)
    assert limits == [400, 400]
    assert rest == [400 - (length - 4)]
    assert seeds == [7, 8]
    assert later[0] not in seeds


def test_a_turn_is_drawn_by_a_seed_of_its_own_whatever_the_other_rows_do(talk):
    alone = talk([], [CALL, CALL, "1"])[1]
    both = talk([CALL, CALL, "1"], [CALL, CALL, "1"])[1]
    assert [seeds[-1] for _, seeds, _ in alone] == [seeds[-1] for _, seeds, _ in both]
    assert len({seed for _, seeds, _ in both for seed in seeds}) == 6


def test_errors_are_results_and_are_counted(turns, talk):
    bad = [
        CALL.replace("123+456", "1/0"),
        CALL.replace("calculator", "calculater"),
        CALL[:-20],
        CALL.replace('"expression"', '"x"'),
    ]
    found, _ = talk(*([call, "done"] for call in bad))
    assert found.calls.tolist() == [[1, 1]] * 4
    assert found.texts == ["done"] * 4
    for row, reason in enumerate(["ZeroDivision", "no tool 'calculater'", "no JSON", "TypeError"]):
        assert "error: " in whole(turns, found, row)
        assert reason in whole(turns, found, row)
    assert found.completions.ended.all()


def test_two_calls_at_once_have_two_results(turns, talk):
    found, _ = talk([f"{CALL}\n{CALL.replace('123', '1')}", "ok"])
    text = whole(turns, found, 0)
    assert text.index("tool\n579<|im_end|>") < text.index("tool\n457<|im_end|>")
    assert found.calls.tolist() == [[2, 0]]


def test_a_model_that_calls_for_ever_is_cut(turns, talk):
    found, asked = talk([CALL] * 9, ["5"], max_new_tokens=4000)
    assert len(asked) == turns.limit == 3
    assert found.calls.tolist() == [[2, 0], [0, 0]]
    assert found.completions.ended.tolist() == [False, True]
    assert found.texts == ["", "5"]


def test_a_result_without_room_for_another_turn_is_left_out(turns, talk):
    for room in range(1, 160):
        found, _ = talk([CALL, "579"], max_new_tokens=room)
        length = int(found.completions.lengths[0])
        assert length <= room
        assert (
            found.written[0].tolist() == [True] * length + [False] * (room - length)
            or (found.written[0, length - 1])
        )
        text = whole(turns, found, 0)
        assert found.completions.ended[0] == text.endswith("579<|im_end|>")
        assert ("tool\n579" in text) == (found.written[0].sum() < length)


def test_a_cut_turn_calls_nothing(talk):
    found, asked = talk([f"{CALL}…"])
    assert found.calls.tolist() == [[0, 0]]
    assert len(asked) == 1
    assert not found.completions.ended[0]


def test_processes_of_a_sharded_model_take_equally_many_turns(talk):
    """This process has nothing to continue; another one has, for two turns more."""
    others = iter([False, False, False, True])
    found, asked = talk(["5"], all_ended=lambda ended: next(others) and ended)
    assert [len(prompts) for prompts, _, _ in asked] == [1, 0, 0]
    assert found.texts == ["5"]
    assert int(found.completions.lengths[0]) == 2
    assert talk()[0].completions.ids.shape == (0, 0)
