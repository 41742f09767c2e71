"""A user's file that vanishes, or becomes a link to itself, after the command has read its
arguments: one line with the knob and the path.
"""

import json
import shutil

import pytest

from nanogpt_hf.commands import main, train

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
