"""What a run does next follows from its recipe and its progress alone: a table of states."""

from dataclasses import replace

import pytest

from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.config.stages import config_at
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.loop import Action, next_action

# 12 steps, evaluations and checkpoints at other ones
KNOBS = {"train.max_steps": 12, "eval.every": 4, "checkpoint.every": 6}
STAGES = {"train.stages": [{"at": 8, "optim.learning_rate": 1e-4}]}
FROZEN = {"finetune.model": "x", "finetune.freeze_layers": 2, "finetune.unfreeze_every": 4}
PATIENT = {"eval.patience": 1}

# step, the last evaluated step, the step in the newest checkpoint, other facts, what comes next
TABLE = [
    ("a new run evaluates first", 0, -1, None, {}, Action.EVALUATE),
    ("then steps, without a checkpoint of step 0", 0, 0, None, {}, Action.STEP),
    ("nothing is due", 3, 0, None, {}, Action.STEP),
    ("an evaluation is due", 4, 0, None, {}, Action.EVALUATE),
    ("it is done once", 4, 4, None, {}, Action.STEP),
    ("a checkpoint is due", 6, 4, None, {}, Action.SAVE),
    ("it is saved once", 6, 4, 6, {}, Action.STEP),
    ("the last step is evaluated", 12, 8, 6, {}, Action.EVALUATE),
    ("and saved", 12, 12, 6, {}, Action.SAVE),
    ("before the run ends", 12, 12, 12, {}, Action.FINISH),
    ("a finished run that resumes changes nothing", 12, 12, 12, {}, Action.FINISH),
    ("a resumed run does not evaluate again", 4, 4, 4, {"built_at": 4}, Action.STEP),
    ("a stop leaves out the evaluation", 4, 0, None, {"stopping": True}, Action.SAVE),
    ("and ends the run", 4, 0, 4, {"stopping": True}, Action.STOP),
    ("a stop saves a run that has taken no step", 0, -1, None, {"stopping": True}, Action.SAVE),
    ("a stop wins over the end of the run", 12, 12, 12, {"stopping": True}, Action.STOP),
    ("a spike goes back at once", 6, 4, 4, {"spiked": True}, Action.START_AGAIN),
    ("out of patience: saved", 8, 8, 6, {"knobs": PATIENT, "best": 4}, Action.SAVE),
    ("out of patience: ended", 8, 8, 8, {"knobs": PATIENT, "best": 4}, Action.FINISH),
    ("the best is not out of patience", 8, 8, 6, {"knobs": PATIENT, "best": 8}, Action.STEP),
    ("unevaluated is not out of patience", 7, 4, 6, {"knobs": PATIENT, "best": 4}, Action.STEP),
    ("a stage: saved before it", 8, 4, 6, {"knobs": STAGES}, Action.SAVE),
    ("a stage: built again", 8, 4, 8, {"knobs": STAGES}, Action.START_AGAIN),
    (
        "a stage: its recipe evaluates its first step",
        *(8, 4, 8, {"knobs": STAGES, "built_at": 8}),
        Action.EVALUATE,
    ),
    ("a stage: trained", 8, 8, 8, {"knobs": STAGES, "built_at": 8}, Action.STEP),
    ("an unfreezing: evaluated before it", 4, 0, None, {"knobs": FROZEN}, Action.EVALUATE),
    ("an unfreezing: saved", 4, 4, None, {"knobs": FROZEN}, Action.SAVE),
    ("an unfreezing: built again", 4, 4, 4, {"knobs": FROZEN}, Action.START_AGAIN),
    ("an unfreezing: trained", 4, 4, 4, {"knobs": FROZEN, "built_at": 4}, Action.STEP),
]


@pytest.mark.parametrize(
    ("step", "evaluated", "saved_step", "facts", "action"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_next_action(step, evaluated, saved_step, facts, action):
    facts = dict(facts)
    built_at = facts.pop("built_at", 0)
    config = config_at(replace_knobs(Config(), KNOBS | facts.pop("knobs", {})), built_at)
    best = facts.pop("best", None)
    state = TrainState(step=step, evaluated_step=evaluated, best_step=best)
    saved = None
    if saved_step is not None:
        saved = replace(state, step=saved_step)
    assert next_action(config, state, saved, built_at=built_at, **facts) is action


def test_actions_of_a_whole_run():
    """From the first evaluation to the end, each action once at its step."""
    config = replace_knobs(Config(), KNOBS)
    state = TrainState()
    saved = None
    taken = []
    while not taken or taken[-1] != (12, Action.FINISH):
        action = next_action(config, state, saved, built_at=0)
        taken.append((state.step, action))
        if action is Action.EVALUATE:
            state.evaluated_step = state.step
        elif action is Action.SAVE:
            saved = replace(state)
        else:
            state.step += 1
    assert [step for step, action in taken if action is Action.STEP] == list(range(12))
    assert [step for step, action in taken if action is Action.EVALUATE] == [0, 4, 8, 12]
    assert [step for step, action in taken if action is Action.SAVE] == [6, 12]
