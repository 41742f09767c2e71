"""`--step N`: commands read the model that a run had after N steps."""

import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from arguments import argv
from nanogpt_hf.checkpoint.files import file_names, write_state
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.checkpoint.step_model import model_of_step
from nanogpt_hf.commands import main
from nanogpt_hf.model import GPTConfig
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.tensor_files import Box, Part, write_tensors
from nanogpt_hf.serving.server import Server

KEPT = {"train__max_steps": 4, "eval__every": 2, "checkpoint__every": 1, "checkpoint__keep": 9}
FURTHER = (
    "--run-dir {run} --train.max_steps 4 --eval.every 2 --checkpoint.every 1 --checkpoint.keep 9 "
    "--data.dir {run}-data --train.micro_batch_size 1"
)
PRETRAIN = "pretrain {recipe} --run-dir {run}"
FINETUNE = f"finetune --from {{base}} --data {{text}} {FURTHER} --train.tokens_per_step 64"
LORA = "--lora 2"
ALIGN = f"align --from {{chat}} --data {{pairs}} --loss dpo {FURTHER} --train.tokens_per_step 512"
# Kinds of models, and the command that trains one.
TRAINED = {
    "padded": f"{PRETRAIN} --model.pad_vocab_to_multiple_of 64",
    "with biases": f"{PRETRAIN} --model.bias true --model.activation_function gelu_new",
    "llama, padded": f"{PRETRAIN} --model.architecture llama --model.pad_vocab_to_multiple_of 64",
    "experts": f"{PRETRAIN} --model.architecture qwen3_moe --model.extra "
    "'{{num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}}'",
    "fine-tuned, frozen": f"{FINETUNE} --freeze-layers 2",
    "adapter": f"{FINETUNE} {LORA}",
    "adapter, merged": f"{FINETUNE} {LORA} --lora.merge true",
    "aligned adapter": f"{ALIGN} --lora 2",
}


def contents(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name; of the card all but its row of the time."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    # The clock goes on between a checkpoint and the model that is saved after it.
    return found | {"README.md": re.sub(rb"\n\| time \| .*", b"", found["README.md"])}


def assert_steps_equal_saved_models(run: RunFolder) -> None:
    """The folders of the last and of the best step have the bytes that training wrote."""
    saved = {run.final: 4, run.best: read_checkpoint(run.checkpoint(4)).state.best_step}
    assert saved[run.best]
    for model, step in saved.items():
        with model_of_step(run, run.checkpoint(step)) as folder:
            assert contents(folder) == contents(model)
        assert not folder.parent.exists()


@pytest.mark.long
@pytest.mark.one_row_per(kind=lambda kind: TRAINED[kind].split()[0])
@pytest.mark.parametrize("kind", TRAINED)
def test_model_of_a_step_equals_what_training_saved(
    kind, write_recipe, tmp_path, tiny_base, text_file, chat_model
):
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "a", "chosen": "b c", "rejected": "d"}
    pairs.write_text("".join(json.dumps(row | {"prompt": "a" * n}) + "\n" for n in range(1, 40)))
    places = {"recipe": write_recipe(**KEPT), "run": tmp_path / "run", "base": tiny_base}
    places |= {"text": text_file, "chat": chat_model, "pairs": pairs}
    assert main(argv(TRAINED[kind].format(**places))) == 0
    assert_steps_equal_saved_models(RunFolder(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize("merge", ["false", "true"])
def test_adapter_of_a_gpt_that_gpt2_cannot_represent(
    merge, monkeypatch, write_recipe, tmp_path, text_file, forget_accelerate
):
    monkeypatch.setattr(GPTConfig, "is_gpt2", False)
    places = {"run": tmp_path / "run", "base": tmp_path / "base", "text": text_file}
    recipe = write_recipe(train__max_steps=2, eval__every=2)
    assert main(argv(PRETRAIN.format(recipe=recipe, run=places["base"]))) == 0
    assert '"nanogpt_hf"' in (tmp_path / "base" / "best" / "config.json").read_text()
    forget_accelerate()
    assert main(argv(f"{FINETUNE} {LORA} --lora.merge {merge}".format(**places))) == 0
    assert_steps_equal_saved_models(RunFolder(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["fsdp2", "tp", "deepspeed_zero3"])
def test_checkpoint_of_several_processes_is_a_model(machine, launch_warm, write_recipe, tmp_path):
    if machine.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    run = launch_warm(machine, "pretrain", "--run-dir", tmp_path / "run", write_recipe(**KEPT))
    assert_steps_equal_saved_models(run)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory, make_recipe, chat_file, byte_tokenizer, forget_accelerate
) -> RunFolder:
    """A run on conversations with four checkpoints, evaluated at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    data = {"data__source": str(chat_file), "data__format": "chat", "data__block_size": 64}
    data |= {"data__tokenizer": str(byte_tokenizer), "model__n_positions": 64}
    data |= {"train__tokens_per_step": 256}
    forget_accelerate()
    recipe = make_recipe(folder / "tiny.yaml", **KEPT, **data)
    assert main(argv("pretrain {} --run-dir {}", recipe, folder / "run")) == 0
    return RunFolder(folder / "run")


@pytest.fixture
def run(trained, tmp_path) -> RunFolder:
    """A copy of the run, for this test to change."""
    shutil.copytree(trained.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


COMMANDS = [
    "sample {} --max-new-tokens 20 --prompt ab",
    "chat {} --max-new-tokens 20",
    "evaluate {} --data TEXT --json OUT",
    "export {} OUT",
    "export {} OUT --format gguf",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_reads_the_model_of_the_step(
    line, trained, tmp_path, capsys, monkeypatch, text_file
):
    """It does what it does with a folder of these weights, and not what the best model does."""
    if "gguf" in line:
        pytest.importorskip("gguf", reason="the package gguf is not installed")
    line = line.replace("TEXT", str(text_file))
    results = {}
    with model_of_step(trained, trained.checkpoint(1)) as folder:
        folder = shutil.copytree(folder, tmp_path / "step_00000001")
    for name, words in {
        "step": f"{trained.path} --step 1",
        "folder": str(folder),
        "best": str(trained.path),
    }.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO("green blue\n"))
        out = tmp_path / f"{name}-out"
        assert main(argv(line.replace("{}", words).replace("OUT", str(out)))) == 0
        results[name] = capsys.readouterr().out
        if out.is_dir():
            results[name] = contents(out)
        elif out.is_file():
            figures = json.loads(out.read_text())
            results[name] = figures["model"]["sha256"], figures["text"]["loss"]
    assert results["step"] == results["folder"] != results["best"]


def test_checkpoint_of_two_files_is_a_model(trained, run):
    """As two processes of a sharded model write it: half of each matrix, by its rows."""
    folder = run.checkpoint(3)
    checksums = {}
    for kind in ("model", "optimizer"):
        whole = load_file(folder / f"{kind}.safetensors")
        (folder / f"{kind}.safetensors").unlink()
        for number, name in enumerate(file_names(kind, 2)):
            parts = {}
            for key, values in whole.items():
                if values.dim():
                    halves = values.chunk(2)
                    offset = (number * len(halves[0]), *[0] * (values.dim() - 1))
                    half = halves[number].contiguous()
                    parts[key] = Part(tuple(values.shape), Box(offset, tuple(half.shape)), half)
                elif number == 0:
                    parts[key] = Part((), Box((), ()), values)
            checksums[name] = write_tensors(folder / name, parts)
    write_state(folder, json.loads((folder / "state.json").read_text()), checksums)
    with (
        model_of_step(trained, trained.checkpoint(3)) as expected,
        model_of_step(run, folder) as found,
    ):
        assert contents(found) == contents(expected)


def test_push_sends_the_model_of_the_step_with_the_files_of_its_run(trained, hub, capsys):
    assert main(argv("push {} tester/early --step 1", trained.path)) == 0
    checkpoint = trained.checkpoint(1)
    assert capsys.readouterr().out.startswith(f"{checkpoint} -> ")
    files = hub.repositories["tester/early"].files()
    with model_of_step(trained, checkpoint) as folder:
        assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert {"recipe.yaml", "metrics.jsonl"} < files.keys()
    (commit,) = hub.commits("tester/early")
    assert "step_00000001" in str(commit)


def test_serve_names_the_model_of_the_step(trained, monkeypatch, capsys):
    names = []
    monkeypatch.setattr(Server, "__init__", lambda self, served, host: names.append(served.name))
    monkeypatch.setattr(Server, "run", lambda self, sockets: None)
    for options in ("", "--step 1"):
        assert main(argv(f"serve {{}} --port 0 {options}", trained.path)) == 0
    assert names == ["run", "run@1"]


def test_card_of_a_step_states_what_was_known_at_it(trained):
    cards = {}
    for step in (1, 2, 4):
        with model_of_step(trained, trained.checkpoint(step)) as folder:
            cards[step] = (folder / "README.md").read_text()
    for step, card in cards.items():
        assert f"\n| steps | {step} of 4 |\n" in card
        assert f"\n| tokens seen | {256 * step:,}, padding included |\n" in card
    assert "\n## Evaluation\n\nNot measured.\n\n## Limits\n" in cards[1]
    losses = [card.partition("| validation loss | ")[2].split()[0] for card in (cards[2], cards[4])]
    assert losses[0] != losses[1]


def test_step_without_a_checkpoint_is_refused_with_those_that_there_are(run, refused):
    for command in (
        "sample {}",
        "chat {}",
        "serve {}",
        "evaluate {} --tasks x",
        "push {} a/b",
        "export {} o",
    ):
        line = refused(*argv(command, run.path), "--step", 7)
        assert line == (
            f"--step 7: {run.path} has checkpoints of the steps 1, 2, 3, 4; a run keeps more of "
            "them with another checkpoint.keep (9 here) and checkpoint.every (1)"
        )
    shutil.rmtree(run.checkpoints)
    assert "has no checkpoint; " in refused("sample", run.path, "--step", 4)


def test_damaged_checkpoint_and_run_without_a_model_are_refused(run, refused):
    weights = run.checkpoint(2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert f"{run.checkpoint(2)}: damaged checkpoint" in refused("sample", run.path, "--step", 2)
    shutil.rmtree(run.best)
    assert main(argv("sample {} --step 1 --max-new-tokens 1", run.path)) == 0
    shutil.rmtree(run.final)
    assert "has no model yet" in refused("sample", run.path, "--step", 1)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{", '{"model_type": "llama"}'])
def test_model_folder_that_does_not_fit_is_one_line_with_its_name(run, refused, content):
    config = run.best / "config.json"
    if content is None:
        config.unlink()
    else:
        config.write_text(content)
    line = refused("sample", run.path, "--step", 1)
    assert str(run.path) in line
    assert tempfile.gettempdir() + "/nanogpt_hf-" not in line


def test_full_disk_is_one_line_and_leaves_nothing(trained, volume, monkeypatch, refused):
    monkeypatch.setattr(tempfile, "tempdir", str(volume))
    (volume / "ballast").write_bytes(bytes(4 * 2**20 - 40_000))
    line = refused("sample", trained.path, "--step", 1)
    assert "cannot be written: No space left on device" in line
    assert [path.name for path in volume.iterdir()] == ["ballast"]


def test_path_of_a_checkpoint_is_refused_with_the_command_for_its_step(trained, refused):
    line = refused("sample", trained.checkpoint(3))
    assert f"export {trained.path} OUT --step 3" in line
