"""What a run starts from: a changed model, tokenizer or mixture is refused where a resume reads it
again, and no obstacle where it does not.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from assertions import weights
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.own_files import log_once
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.origin import needed_at_resume, origin_of

pytestmark = pytest.mark.long
COMMON = {
    "data.block_size": 64,
    "train.tokens_per_step": 256,
    "train.micro_batch_size": 4,
    "eval.every": 2,
    "eval.tokens": 64,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "optim.warmup_steps": 0,
}
RL = {"rl.samples": 2, "rl.max_new_tokens": 3, "rl.eval_questions": 1, "rl.eval_samples": 1}
REWARD = "def score(prompt, completion, answer):\n    return float(len(completion))\n"


@pytest.fixture(scope="module")
def trained(save_chat_model, forget_accelerate, text_file, tmp_path_factory):
    """A function to a folder with a run of two steps of a command with knobs, and a function that
    resumes it. The run is trained once, and each call puts the folder back as it was then.
    """
    folders: dict[tuple, Path] = {}

    def command(place: Path, name: str, knobs: tuple, steps: int) -> list[str]:
        values = COMMON | {"train.max_steps": steps} | dict(knobs)
        if name == "rl":
            del values["eval.tokens"]  # it evaluates on questions
        options = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        task = ["--task", "arithmetic", "--reward", f"{place / 'reward.py'}:score"]
        own = {"finetune": [], "rl": task}.get(name, ["--loss", name])
        data = {"finetune": text_file, "rl": None}.get(name, place / f"{name}.jsonl")
        own += ["--data", str(data)] * bool(data)
        word = name if name in ("finetune", "rl") else "align"
        place_of = ["--from", str(place / "start"), "--run-dir", str(place / "run")]
        return [word, *own, *place_of, *options, "--data.dir", str(place / "data")]

    def prepare(place: Path, name: str, knobs: tuple) -> None:
        save_chat_model(place / "start")
        rows = {"prompt": "a", "chosen": "11", "rejected": "2"}
        single = {"prompt": "a", "completion": "11", "label": True}
        (place / "dpo.jsonl").write_text((json.dumps(rows) + "\n") * 40)
        (place / "kto.jsonl").write_text(
            "".join(json.dumps(single | {"label": n % 2 == 0}) + "\n" for n in range(40))
        )
        (place / "reward.py").write_text(REWARD)
        forget_accelerate()
        assert main(command(place, name, knobs, 2)) == 0

    def train(name: str, knobs: tuple):
        if (name, knobs) not in folders:
            place = folders[name, knobs] = tmp_path_factory.mktemp(name) / "work"
            prepare(place, name, knobs)
            shutil.copytree(place, place.with_name("kept"))
        place = folders[name, knobs]
        shutil.rmtree(place)
        shutil.copytree(place.with_name("kept"), place)

        def resume(*flags: str) -> int:
            forget_accelerate()
            return main([*command(place, name, knobs, 3), "--resume", *flags])

        return place, resume

    return train


def other_weights(place: Path) -> None:
    file = place / "start" / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.wte.weight"][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def other_config(place: Path) -> None:
    path = place / "start" / "config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"layer_norm_epsilon": 0.1}))


def renamed_config(place: Path) -> None:
    path = place / "start" / "config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"transformers_version": "1.0"}, indent=7))


def other_template(place: Path) -> None:
    path = place / "start" / "chat_template.jinja"
    path.write_text(path.read_text().replace("\n", "", 1) + " ")


def lost_template(place: Path) -> None:
    (place / "start" / "chat_template.jinja").unlink()


def other_reward(place: Path) -> None:
    (place / "reward.py").write_text(REWARD.replace("float", "-float"))


def lost_reference(place: Path) -> None:
    (place / "run" / "reference.safetensors").unlink()


def other_and_lost(place: Path) -> None:
    other_weights(place)
    lost_reference(place)


def changed_reference(place: Path) -> None:
    path = place / "run" / "reference.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(path).items()}, path)


def other_and_changed(place: Path) -> None:
    other_weights(place)
    changed_reference(place)


def no_weights_and_lost(place: Path) -> None:
    (place / "start" / "model.safetensors").unlink()
    lost_reference(place)


KL = (("rl.kl", 0.1), *RL.items())
LORA = (("lora.rank", 2),)
WEIGHTS = "finetune.model: weights changed: sha256:"
CONFIG = "finetune.model: config.json changed: sha256:"
CASES = [
    ("finetune", (), other_weights, None),
    ("finetune", (("finetune.freeze_layers", 1),), other_weights, None),
    ("finetune", (), renamed_config, None),
    ("finetune", (), other_config, CONFIG),
    ("finetune", (), lost_template, None),
    ("finetune", LORA, other_weights, WEIGHTS),
    ("finetune", LORA, other_config, CONFIG),
    ("rl", tuple(RL.items()), other_weights, None),
    ("rl", KL, other_weights, WEIGHTS),
    ("rl", (*RL.items(), *LORA), other_weights, WEIGHTS),
    ("rl", tuple(RL.items()), other_template, "data.tokenizer changed: sha256:"),
    ("rl", tuple(RL.items()), lost_template, "data.tokenizer changed: sha256:"),
    ("rl", tuple(RL.items()), other_reward, "data revision: {}/reward.py:score sha256:"),
    ("dpo", (), other_weights, None),
    ("dpo", (), lost_reference, None),
    ("dpo", (), other_and_lost, "reference.safetensors: is lost or damaged, and "),
    ("dpo", (), changed_reference, None),
    ("dpo", (), other_and_changed, "reference.safetensors: is lost or damaged, and "),
    ("dpo", (), no_weights_and_lost, "reference.safetensors: is lost or damaged, and "),
    ("dpo", LORA, other_weights, WEIGHTS),
    ("dpo", (), other_template, "data.tokenizer changed: sha256:"),
    ("dpo", (), lost_template, "data.tokenizer changed: sha256:"),
    ("kto", (), other_weights, None),
    ("kto", (), lost_reference, None),
    ("kto", (), other_and_lost, "reference.safetensors: is lost or damaged, and "),
]


@pytest.mark.one_row_per("name", "change", "refusal")
@pytest.mark.parametrize(("name", "knobs", "change", "refusal"), CASES)
def test_changed_start_is_refused_where_it_is_read_again(
    name, knobs, change, refusal, trained, capsys
):
    place, resume = trained(name, knobs)
    before = {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}
    change(place)
    changed = {path: path.read_bytes() for path in before if path.exists()}
    capsys.readouterr()
    dry_status = resume("--dry-run")
    dry_line = capsys.readouterr().err.splitlines()[-1:]
    log_once.cache_clear()
    status = resume()
    line = capsys.readouterr().err.splitlines()[-1:]
    assert dry_status == status, (dry_line, line)
    if refusal is None:
        assert status == 0, line
        return
    assert status == 2
    assert refusal.format(place) in line[0]
    assert not re.search(r"sha256:[0-9a-f]{9}", line[0])
    assert dry_line == line
    assert {path: path.read_bytes() for path in before if path.exists()} == changed


def test_lost_reference_is_computed_with_the_same_model(trained):
    place, resume = trained("dpo", ())
    assert resume() == 0
    ours = weights(RunFolder(place / "run"))
    place, resume = trained("dpo", ())
    lost_reference(place)
    assert resume() == 0
    theirs = weights(RunFolder(place / "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("method", "weights"), [("align", False), ("lora", True)])
def test_machines_compare_what_a_start_reads_and_a_resume_what_it_needs(
    tmp_path, save_chat_model, method, weights
):
    """A machine without the run folder does not know whether the run resumes."""
    save_chat_model(tmp_path / "start")
    values = {"finetune.model": str(tmp_path / "start")}
    values |= {"align.loss": "dpo"} if method == "align" else {"lora.rank": 4}
    config = replace_knobs(Config(name="run"), values)
    at_start = origin_of(config, resumes=False)
    assert "finetune.model: weights" in at_start
    needed = needed_at_resume(config, at_start)
    assert needed == origin_of(config, resumes=True)
    assert ("finetune.model: weights" in needed) == weights


@pytest.mark.one_row_per("name")
@pytest.mark.parametrize(
    ("name", "knobs"),
    [("finetune", ()), ("finetune", LORA), ("rl", tuple(RL.items())), ("dpo", ()), ("kto", ())],
    ids=["finetune", "lora", "rl", "dpo", "kto"],
)
def test_resume_command_continues_any_run_by_its_own_recipe(name, knobs, trained, capsys):
    place, resume_as_started = trained(name, knobs)
    copy = place / "copy"
    shutil.copytree(place / "run", copy)
    assert resume_as_started() == 0
    capsys.readouterr()
    assert main(["resume", str(copy), "--train.max_steps", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "nothing was started" in out
    assert "train.max_steps: 2 -> 3" in out
    assert main(["resume", str(copy), "--train.max_steps", "3"]) == 0
    assert "train.max_steps: 2 -> 3" in capsys.readouterr().out
    # weights of a model, or of an adapter
    (theirs,) = (place / "run" / "final").glob("*.safetensors")
    assert (copy / "final" / theirs.name).read_bytes() == theirs.read_bytes()


def test_resume_command_without_knobs_keeps_the_length_of_the_run(write_recipe, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    recipe = str(write_recipe(train__max_steps=2, checkpoint__every=1, checkpoint__keep=9))
    # a flag that is forgotten when the whole command is typed again
    command = ["pretrain", recipe, "--run-dir", str(run.path), "--train.max_steps", "4"]
    assert main(command) == 0
    whole = weights(run)
    for step in (3, 4):
        shutil.rmtree(run.checkpoint(step))
    capsys.readouterr()
    assert main(["resume", str(run.path)]) == 0
    assert "done: 4 steps" in capsys.readouterr().out
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no_run"], "no_run: "),
        (["run", "--model.n_layer", "3"], "--resume continues the same experiment"),
        (["run", "--train.max_step", "3"], "did you mean"),
        (["run", "--resume"], "--resume: unknown argument"),
        (["run", "--overwrite"], "--overwrite: unknown argument"),
        (["run", "--optim.learning_rate", "fast"], "optim.learning_rate"),
        ([], "RUN"),
    ],
)
def test_resume_command_refuses(words, reason, write_recipe, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", str(write_recipe()), "--run-dir", "run"]) == 0
    assert reason in refused("resume", *words)


@pytest.mark.parametrize(
    ("name", "knobs", "fault", "remedy"),
    [
        (
            "finetune",
            (),
            "finetune.model ./gone: the folder that {run} started from is not here",
            "go to the folder where the run began; a run that has not ended continues with "
            "nanogpt-hf resume {quoted}",
        ),
        (
            "rl",
            tuple(RL.items()),
            "{run}: its recipe names rl.reward ./gone.py:score, which is not in this folder",
            "resume it in the folder where it began",
        ),
    ],
)
def test_resume_command_in_another_folder_says_where_to_go(
    name, knobs, fault, remedy, trained, capsys
):
    place, _ = trained(name, knobs)
    recipe = place / "run" / "recipe.yaml"
    # as a run that began with relative paths has recorded them
    recipe.write_text(
        recipe.read_text().replace(
            f"{place}/{'start' if name == 'finetune' else 'reward'}", "./gone"
        )
    )
    for flags in ([], ["--dry-run"]):
        capsys.readouterr()
        assert main(["resume", str(place / "run"), "--train.max_steps", "3", *flags]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        run = place / "run"
        assert line.startswith(fault.format(run=run))
        assert line.endswith(remedy.format(quoted=shlex.quote(str(run))))


def test_resume_command_in_another_folder_prepares_no_data_again(
    write_recipe, tmp_path, capsys, monkeypatch, forget_accelerate
):
    here = tmp_path / "here"
    there = tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    words = ["pretrain", str(write_recipe()), "--run-dir", "run", "--data.dir", "data/x"]
    assert main([*words, "--train.max_steps", "2"]) == 0
    monkeypatch.chdir(there)
    assert main(["resume", str(here / "run"), "--train.max_steps", "3"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "its recipe names data.dir data/x, which is not in this folder" in line
    assert line.endswith("or name the prepared data by --data.dir")
    assert not [*there.iterdir()]
    data = ["--data.dir", str(here / "data" / "x")]
    # Below the folder in which it began the data was removed, and is prepared again.
    for folder, steps, options in ((there, "3", data), (here, "4", [])):
        monkeypatch.chdir(folder)
        forget_accelerate()
        assert main(["resume", str(here / "run"), "--train.max_steps", steps, *options]) == 0
        shutil.rmtree(here / "data", ignore_errors=True)
    assert not [*there.iterdir()]
