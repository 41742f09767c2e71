"""A user's file that vanishes, or becomes a link to itself, after the command has read its
arguments, or between the start of a run and its resume: one line with the knob and the path, or a
run that needs the file no more.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from assertions import weights
from nanogpt_hf.commands import main, train
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long
MESSAGES = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}
PAIR = {"prompt": "ab", "chosen": "c", "rejected": "b"}
FILES = {
    "reward.py": "def score(prompt, completion, answer):\n    return 1.0\n",
    "tools.py": 'def one() -> int:\n    """Return one."""\n    return 1\n',
    "questions.jsonl": f"{json.dumps(MESSAGES)}\n" * 20,
    "pairs.jsonl": f"{json.dumps(PAIR)}\n" * 20,
    "task.yaml": "task: own\ndataset_path: json\ndataset_kwargs: {data_files: rows.json}\n",
}
RL = "rl --from base --rl.max_new_tokens 4 --train.max_steps 2 --task"
# The command, the file or folder that vanishes, and the knob that states it.
CASES = {
    "text": ("pretrain tiny.yaml", "text.txt", "data.source"),
    "tokenizer": ("pretrain tiny.yaml --data.tokenizer other", "other", "data.tokenizer"),
    "teacher": (
        "pretrain tiny.yaml --data.tokenizer base --distill.teacher other",
        "other",
        "distill.teacher",
    ),
    "tasks": ("pretrain tiny.yaml --eval.tasks [task.yaml]", "task.yaml", "eval.tasks"),
    "start model": (
        "finetune --from base --data text.txt --data.tokenizer other --data.block_size 16",
        "base",
        "finetune.model",
    ),
    "pairs": ("align --from base --data pairs.jsonl", "pairs.jsonl", "data.source"),
    "questions": (f"{RL} regex --data questions.jsonl", "questions.jsonl", "data.source"),
    "reward": (f"{RL} arithmetic --reward reward.py:score", "reward.py", "rl.reward"),
    "tools": (f"{RL} arithmetic --rl.tools [tools.py]", "tools.py", "rl.tools"),
    "teacher of RL": (f"{RL} arithmetic --distill.teacher other", "other", "distill.teacher"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch, write_recipe, tiny_base, text_file):
    """The working folder, with all files."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "other"):
        shutil.copytree(tiny_base, name)
    shutil.copy(text_file, "text.txt")
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    write_recipe(data__source="text.txt", data__dir="data")
    return tmp_path


@pytest.mark.parametrize("is_loop", [False, True], ids=["gone", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_line_names_the_knob_and_the_path(case, is_loop, folder, monkeypatch, capsys):
    words, name, knob = CASES[case]
    run = train._run

    def vanishing_run(*arguments):
        (folder / name).rename(folder / "moved")
        if is_loop:
            (folder / name).symlink_to(folder / name)
        run(*arguments)

    monkeypatch.setattr(train, "_run", vanishing_run)
    assert main(words.split()) == 2
    # Other lines are of the log, such as the one that a name is looked up on the Hub.
    line = capsys.readouterr().err.splitlines()[-1]
    assert knob in line, line
    assert name in line, line
    assert not list(folder.glob("runs/*/recipe.yaml"))


# What a resume does not read again: the prepared data has the tokens and their tokenizer.
NOT_READ_AGAIN = {"text", "tokenizer"}
RECIPE = ("pretrain tiny.yaml", "tiny.yaml", "tiny.yaml")
SHORT = "--checkpoint.every 1 --eval.every 2 --optim.warmup_steps 0 --run-dir run"
# Of runs from a model, whose prompts may have a tool.
SMALL = "--data.block_size 416 --train.tokens_per_step 1664 --train.micro_batch_size 4"
SMALL_RL = "--rl.samples 2 --rl.eval_questions 1 --rl.eval_samples 1"


@pytest.mark.one_row_per(case=lambda case: CASES[case][0].split()[0] if case in CASES else case)
@pytest.mark.parametrize("case", [*CASES, "recipe"])
def test_run_without_a_file_of_its_start(
    case, folder, capsys, forget_accelerate, save_chat_model, letter_tasks
):
    words, name, knob = (CASES | {"recipe": RECIPE})[case]
    # Their tokenizer has every byte, and they have a chat template.
    for model in ("base", "other"):
        shutil.rmtree(model)
        save_chat_model(folder / model, n_positions=416, n_layer=1, n_embd=16)
    program, rest = words.split(maxsplit=1)
    if case == "tasks":
        # One whose questions are here.
        for path in (Path(letter_tasks[0]), Path(letter_tasks[0]).with_name("letters.jsonl")):
            shutil.copy(path, name if path.suffix == ".yaml" else path.name)
        rest += " --data.tokenizer base"
    if program != "pretrain":
        rest = f"{SMALL} {SMALL_RL if program == 'rl' else ''} {rest}"

    def call(words: str) -> int:
        forget_accelerate()
        capsys.readouterr()
        return main(words.split())

    command = f"{program} {rest} {SHORT} --train.max_steps"
    assert call(f"{command} 2") == 0
    shutil.copytree("run", "kept")
    assert call(f"{command} 3 --resume") == 0
    expected = weights(RunFolder("run"))
    (folder / name).rename(folder / "moved")
    for is_loop in (False, True):
        if is_loop:
            (folder / name).symlink_to(folder / name)
        for again in (f"{command} 3 --resume", "resume run --train.max_steps 3"):
            shutil.rmtree("run")
            shutil.copytree("kept", "run")
            own = case == "recipe" and again.startswith("resume")
            status = call(again)
            error = capsys.readouterr().err
            if own or case in NOT_READ_AGAIN:
                assert status == 0, error
                found = weights(RunFolder("run"))
                assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
                continue
            assert status == 2
            line = error.removesuffix("1 problem; nothing was started.\n").splitlines()[-1]
            assert knob in line, line
            assert name in line, line
            # Without a link in its place.
            if case == "recipe" and not is_loop:
                assert line.endswith("resume run` continues the run by its own recipe"), line
            assert not RunFolder("run").checkpoint(3).exists()
