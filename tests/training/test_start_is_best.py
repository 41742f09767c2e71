"""Fine-tuning never hands back less than it got: the model that a run starts from is in best/ until
another one is better, and a run that does not beat it says so.
"""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from arguments import argv
from assertions import copy_at, same_weights
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.documents import held_out
from nanogpt_hf.export.hub import BackgroundPush
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.load import load_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("empty_plots")]
KNOBS = (
    "--data.block_size 64 --train.tokens_per_step 256 --train.micro_batch_size 2 --train.max_steps "
    "4 --eval.every 2 --eval.patience null --optim.warmup_steps 0 "
    "--optim.schedule constant --tracking.every 1"
)
WORSE = "--optim.learning_rate 30"  # ruins a model in one step
METHODS = {
    "text": "finetune --data text.txt --data.dir text",
    "lora": "finetune --data text.txt --data.dir text --lora 2",
    "merged": "finetune --data text.txt --data.dir text --lora 2 --lora.merge true",
    "unfreezing": "finetune --data text.txt --data.dir text --freeze-layers 1 --unfreeze-every 1",
    "distillation": "finetune --data text.txt --data.dir text --distill.teacher {start}",
    "chat": "finetune --data chat.jsonl --data.format chat --data.dir chat",
    "dpo": "align --data pairs.jsonl --loss dpo",
    "kto": "align --data labels.jsonl --loss kto",
    "rl": "rl --task arithmetic --reward reward.py:score --rl.max_new_tokens 4 --rl.samples 2 "
    "--rl.eval_questions 4",
}
one_method_per_command = pytest.mark.one_row_per(method=lambda name: METHODS[name].split()[0])
# A model of random weights writes few letters in a row; one that is ruined repeats a token.
REWARD = "def score(prompt, completion, answer):\n    return len(set(completion))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model, text_file):
    """The start model, what it is trained on, and the runs."""
    folder = tmp_path_factory.mktemp("start")
    letters = sorted(set(text_file.read_text()))

    def like_the_text(model, tokenizer):
        """The letters of the text are likely, so that a ruined model is worse."""
        likely = tokenizer("".join(letters), add_special_tokens=False)["input_ids"]
        model.transformer.ln_f.bias.copy_(torch.randn(32).sign())
        model.transformer.wte.weight[likely] += 0.1 * model.transformer.ln_f.bias

    save_chat_model(folder / "start", like_the_text, dropout=0.0)
    (folder / "text.txt").write_text(text_file.read_text()[:4000])
    (folder / "reward.py").write_text(REWARD)
    # Held-out rows prefer what the others reject, so that learning from those is a loss.
    held = [bool(one) for one in held_out(20, DataSection(validation_fraction=0.1), "rows")]
    rows = {
        "chat": [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(30)],
        "pairs": [
            {"prompt": f"{n}", "chosen": "12"[one], "rejected": "21"[one]}
            for n, one in enumerate(held)
        ],
        "labels": [
            {"prompt": f"{n}", "completion": "12"[n % 2], "label": one != (n % 2 > 0)}
            for n, one in enumerate(held)
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture
def start_to_train(folder, monkeypatch, forget_accelerate):
    monkeypatch.chdir(folder)

    def train(name: str, method: str, options: str = "") -> tuple[int, RunFolder]:
        forget_accelerate()
        command = METHODS[method].format(start="start")
        # `rl` evaluates on questions.
        if method != "rl":
            command += " --eval.tokens 512"
        status = main(argv(f"{command} --from start --run-dir {name} {KNOBS} {options}"))
        return status, RunFolder(folder / name)

    return train


@pytest.fixture
def train(start_to_train):
    def train(*arguments: str) -> RunFolder:
        status, run = start_to_train(*arguments)
        assert status == 0
        return run

    return train


def final_state(run: RunFolder) -> dict:
    return json.loads((run.newest_checkpoint() / "state.json").read_text())


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_model(str(folder)).eval()(torch.arange(60)[None]).logits


@one_method_per_command
@pytest.mark.parametrize("method", METHODS)
def test_start_is_best_if_no_other_is_better(train, folder, method, capsys):
    # Preferences are learned, which is a loss on the held-out ones.
    worse = "--optim.learning_rate 1e-2" if method in ("dpo", "kto") else WORSE
    run = train(f"{method}_ruined", method, worse)
    printed = capsys.readouterr().out
    state = final_state(run)
    assert (state["step"], state["best_step"]) == (4, 0)
    assert torch.allclose(logits(run.best), logits(folder / "start"), atol=1e-5)
    assert not torch.allclose(logits(run.final), logits(folder / "start"), atol=1e-2)
    # The console, both cards, the report and `compare` say the same.
    assert "at step 0: no evaluation was better than that of the start, start" in printed
    assert f"{run.best.relative_to(folder)} (the start)" in printed
    assert "These are the weights that the run started from" in (run.best / "README.md").read_text()
    assert "the run started from was better" in (run.final / "README.md").read_text()
    assert "no evaluation was better than that of the start" in run.report.read_text()
    assert main(argv("compare {} --output compare.png --json compare.json", run.path)) == 0
    line = f"{run.path}: no evaluation was better than that of its start"
    assert line in capsys.readouterr().out
    (compared,) = json.loads((folder / "compare.json").read_text())["runs"].values()
    assert compared["best_step"] == 0
    assert compared["beats_start"] is False
    score = compared["best"] if method != "rl" else -compared["best"]
    assert score == pytest.approx(state["best_loss"])
    # Each card states the score of its own weights.
    name = "val/reward" if method == "rl" else "val/loss"
    values = [event[name] for event in read_metrics(run) if name in event]
    assert values[0] != values[-1]
    for model, value in ((run.best, values[0]), (run.final, values[-1])):
        card = (model / "README.md").read_text()
        (row,) = re.findall(r"(?m)^\| (?:validation|\w+) (?:loss|reward) \| (\S+) .*\|$", card)
        assert row == format_number(value, 4)


@one_method_per_command
@pytest.mark.parametrize("method", [name for name in METHODS if name != "rl"])
def test_diverged_run_says_so(start_to_train, folder, method, capsys, monkeypatch):
    """Console, card, report and `compare` say it, at the end of the run and of its resume; nothing
    more is pushed.
    """
    pushed = []
    finish = BackgroundPush.finish

    def recorded(push: BackgroundPush, done: bool) -> None:
        pushed.append(done)
        finish(push, done)

    monkeypatch.setattr(BackgroundPush, "finish", recorded)
    options = "--optim.learning_rate 1e15 --optim.max_grad_norm 0 --optim.weight_decay 0"
    for again in ("", "--resume"):
        status, run = start_to_train(f"{method}_diverged", method, f"{options} {again}")
        said = capsys.readouterr()
        assert status == 2
        assert said.err.splitlines()[-1] == (
            f"{run.path.relative_to(folder)}: the run has diverged: its last evaluation, at step "
            "4, is not finite; lower optim.learning_rate and train again with --overwrite, or in "
            "another --run-dir"
        )
        assert "diverged: 4 steps" in said.out
        assert "no evaluation was better than that of the start" in said.out
        assert "\nnext:" not in said.out
        assert "Training has diverged" in (run.final / "README.md").read_text()
        assert "Training has diverged" not in (run.best / "README.md").read_text()
        page = run.report.read_text()
        assert "The run has diverged: the evaluation at step 4 is not finite" in page
        assert "no evaluation was better than that of the start" in page
        assert "nanogpt-hf sample" not in page
        assert final_state(run)["best_step"] == 0
    assert pushed == [False, False]
    assert main(argv("compare {} --output compare.png --json compare.json", run.path)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[-1] == "nan"
    assert f"{run.path}: has diverged: the evaluation at step 4 is not finite" in out
    assert f"{run.path}: no evaluation was better than that of its start" in out
    text = (folder / "compare.json").read_text()
    assert "NaN" not in text
    (compared,) = json.loads(text)["runs"].values()
    assert (compared["last"], compared["diverged_at"]) == (None, 4)


@pytest.mark.one_row_per
@pytest.mark.parametrize("method", ["text", "lora"])
def test_better_model_replaces_the_start(train, folder, method, capsys):
    run = train(f"{method}_better", method, "--optim.learning_rate 1e-3")
    state = final_state(run)
    assert state["best_step"] > 0
    assert not torch.equal(logits(run.best), logits(folder / "start"))
    assert main(argv("compare {} --output compare.png", run.path)) == 0
    texts = [capsys.readouterr().out, (run.best / "README.md").read_text(), run.report.read_text()]
    texts.append((run.final / "README.md").read_text())
    for text in texts:
        assert "was better than" not in text
        assert "started from was" not in text


@pytest.mark.one_row_per
@pytest.mark.parametrize("rate", ["30", "1e-3"])
def test_killed_run_keeps_the_start(train, folder, rate):
    options = f"--optim.learning_rate {rate} --checkpoint.every 1 --checkpoint.keep 9"
    whole = train(f"whole_{rate}", "text", options)
    for step in (1, 3):
        copy_at(whole, step, folder / f"killed_{rate}_{step}")
        resumed = train(f"killed_{rate}_{step}", "text", f"{options} --resume")
        assert same_weights(whole, resumed)
        best, again = (load_file(run.best / "model.safetensors") for run in (whole, resumed))
        assert all(torch.equal(best[name], again[name]) for name in best)
        ends = [final_state(run) for run in (whole, resumed)]
        for key in ("best_loss", "best_step", "evaluation"):
            assert ends[0][key] == ends[1][key]
    assert (final_state(whole)["best_step"] == 0) == (rate == "30")
    assert math.isfinite(final_state(whole)["best_loss"])


def test_start_with_fewer_positions_is_best(train, folder):
    """The start is what the run began with, cropped positions included."""
    run = train("cropped", "text", f"{WORSE} --data.block_size 32 --data.dir short")
    assert load_model(str(run.best)).config.n_positions == 32
    assert final_state(run)["best_step"] == 0


def test_rows_of_a_start_with_more_tokens_are_in_best(train, folder):
    """The start is what the run began with, the rows of new tokens included."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    old = len(tokenizer)
    new = tokenizer.add_tokens(["the ", "and "])
    tokenizer.save_pretrained(folder / "more")
    run = train("more_tokens", "text", f"{WORSE} --data.tokenizer more --data.dir more_text")
    assert final_state(run)["best_step"] == 0
    best, start = (load_model(str(path)) for path in (run.best, folder / "start"))
    rows, before = (model.get_input_embeddings().weight for model in (best, start))
    assert len(rows) == old + new
    assert torch.equal(rows[:old], before)
    assert torch.allclose(rows[old:], before.mean(0).expand(new, -1), atol=0.1)
    assert AutoTokenizer.from_pretrained(run.best).get_vocab() == tokenizer.get_vocab()


def test_pretraining_keeps_no_untrained_model(make_recipe, tmp_path, forget_accelerate):
    recipe = make_recipe(
        tmp_path / "recipe.yaml", optim__learning_rate=1.0, train__max_steps=3, eval__every=3
    )
    forget_accelerate()
    assert main(["pretrain", str(recipe), "--run-dir", str(tmp_path / "run")]) == 0
    assert final_state(RunFolder(tmp_path / "run"))["best_step"] == 3


@pytest.mark.one_row_per("method")
@pytest.mark.parametrize(
    ("method", "dropout", "options", "expected"),
    [
        ("text", 0.0, "", 0.0),
        ("text", 0.3, "", 0.3),
        ("lora", 0.0, "", 0.0),
        ("text", 0.0, "--model.dropout 0.2", 0.2),
        ("dpo", 0.3, "", 0.0),
    ],
)
def test_dropout_is_that_of_the_model(
    train, folder, save_chat_model, capsys, method, dropout, options, expected
):
    name = f"dropout_{method}_{dropout}_{len(options)}"
    save_chat_model(folder / "start_dropout", dropout=dropout)
    data = "" if method == "dpo" else "--data.dir dropout"
    run = train(name, method, f"--from start_dropout {data} --train.max_steps 1 {options}")
    assert load_config(run.recipe).model.dropout == expected
    assert f"parameters, dropout {expected:g}\n" in capsys.readouterr().out
