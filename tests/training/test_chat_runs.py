"""Training on conversations: the loss is that of each alone, and a run stays a function of recipe, seed and step."""

import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.errors import Stopped
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.tracking import read_metrics


@pytest.fixture
def write_chat_recipe(write_recipe, chat_file, byte_tokenizer):
    def write(**overrides):
        options = {"data__source": str(chat_file), "data__format": "chat", "data__tokenizer": str(byte_tokenizer)}
        options |= {"model__n_positions": 128, "data__block_size": 128, "eval__tokens": "all"}
        return write_recipe(**options | {"train__tokens_per_step": 512, "train__micro_batch_size": 2} | overrides)

    return write


@pytest.fixture
def start(write_chat_recipe, tmp_path, forget_accelerate):
    def start(name: str = "run", *, resume: bool = False, **overrides) -> RunFolder:
        config = load_config(write_chat_recipe(**overrides))
        prepare(config)
        run = RunFolder(tmp_path / name)
        forget_accelerate()
        loop.train(config, run, resume=resume)
        return run

    return start


def column(run: RunFolder, name: str) -> dict[int, float]:
    rows = {event["step"]: event[name] for event in read_metrics(run) if name in event}
    assert rows
    return rows


def losses_alone(model, config, split: str) -> list[tuple[float, int]]:
    """For each example by itself, by transformers' means: the sum of its answers' losses, and their tokens."""
    rows, losses = datasets.load_from_disk(f"{config.data.dir}/{split}"), []
    for ids, answered in zip(rows["input_ids"], rows["assistant_mask"], strict=True):
        ids, answered = torch.tensor(ids[: config.data.block_size + 1]), torch.tensor(answered)
        targets = ids[1:].masked_fill(answered[1 : len(ids)] == 0, -100)
        if (targets != -100).any():
            logits = model(input_ids=ids[None, :-1]).logits[0]
            losses.append((F.cross_entropy(logits, targets, reduction="sum").item(), int((targets != -100).sum())))
    return losses


def loss_of_blocks(model, batch: dict[str, torch.Tensor]) -> float:
    """The summed loss, two blocks at a time: a sum of all of them would lose digits in float32."""
    parts = zip(*(tensor.split(2) for tensor in batch.values()), strict=True)
    return sum(model(**dict(zip(batch, part, strict=True)), num_items_in_batch=1).loss.item() for part in parts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_loss_of_blocks_is_that_of_the_examples_one_by_one(write_chat_recipe, packing, attention):
    sizes = {"model__n_positions": 256, "data__block_size": 256, "train__tokens_per_step": 512}
    config = load_config(write_chat_recipe(data__packing=packing, **sizes))
    prepare(config)
    data = load_prepared(config)
    model = build_model(build_config(config.model, data.manifest.vocab_size), 0).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that what a token sees matters
    model.set_attn_implementation(attention)
    examples = data.train
    most = max(len(block) for block in examples.blocks)
    assert most > 2 if packing == "packed" else most == 1
    batch = examples.batch(np.arange(len(examples)))
    with torch.no_grad():
        found = loss_of_blocks(model, batch)
        alone = losses_alone(model, config, "train")
    count = sum(tokens for _, tokens in alone)
    assert int((batch["shift_labels"] != -100).sum()) == count
    assert found / count == pytest.approx(sum(loss for loss, _ in alone) / count, abs=1e-6, rel=0)
    if packing == "packed":  # the test can fail: without positions of their own examples see each other
        del batch["position_ids"]
        with torch.no_grad():
            assert abs(loss_of_blocks(model, batch) - found) / count > 1e-3


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_gradient_weighs_every_answered_token_the_same_over_uneven_batches(start, write_chat_recipe, packing):
    # two micro-batches a step with different numbers of answered tokens against all of them at once
    halves = start("halves", train__max_steps=2, train__micro_batch_size=2, data__packing=packing)
    whole = start("whole", train__max_steps=2, train__micro_batch_size=4, data__packing=packing)
    for name, tolerance in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
        assert column(halves, name) == pytest.approx(column(whole, name), abs=tolerance)


def test_a_run_learns_and_its_validation_loss_is_that_of_the_answers(start, write_chat_recipe, tmp_path):
    run = start(train__max_steps=30, eval__every=15)
    losses = column(run, "val/loss")
    assert losses[30] < losses[0] - 0.5
    config = load_config(run.recipe)
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    with torch.no_grad():
        alone = losses_alone(model, config, "validation")
    count = sum(tokens for _, tokens in alone)
    assert losses[30] == pytest.approx(sum(loss for loss, _ in alone) / count, abs=1e-5)
    manifest = load_prepared(config).manifest
    per_token = manifest.validation.bytes / manifest.validation.assistant_tokens
    assert column(run, "val/bits_per_byte")[30] == pytest.approx(losses[30] / 0.6931471805599453 / per_token)
    for folder in (run.best, run.final):  # the template goes where the model goes
        assert "in 54 conversations" in (card := (folder / "README.md").read_text())
        assert "tokens\nin answers of the validation split" in card
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "red"}], add_generation_prompt=True, tokenize=False
        )
        assert asked == "### User:\nred\n\n### Assistant:\n"


def test_a_stopped_run_goes_on_bit_for_bit(start, monkeypatch, tmp_path):
    options = {"train__max_steps": 6, "checkpoint__every": 2, "model__dropout": 0.1}
    whole = start("whole", **options)
    train_step, steps = loop.train_step, []

    def stopping(run, step, learning_rate):
        if step == 3:
            raise Stopped("here")
        steps.append(step)
        return train_step(run, step, learning_rate)

    monkeypatch.setattr(loop, "train_step", stopping)
    with pytest.raises(Stopped):
        start("parts", **options)
    monkeypatch.setattr(loop, "train_step", train_step)
    parts = start("parts", resume=True, **options)
    ours, theirs = (load_file(run.final / "model.safetensors") for run in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert column(parts, "train/loss") == column(whole, "train/loss")


@pytest.mark.long
def test_two_processes_are_the_same_experiment_as_one(start, tmp_path, write_chat_recipe, root):
    options = {"train__max_steps": 4, "eval__every": 2, "train__micro_batch_size": 1, "model__dropout": 0.1}
    alone = start("alone", **options)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process=1"]
    machine = ["--config_file", root / "accelerate_configs" / "cpu_ddp.yaml", "--num_processes=2"]
    ours = [root / "cli.py", "pretrain", write_chat_recipe(**options), "--run-dir", tmp_path / "pair"]
    command = [*launch, *machine, "--main_process_port=0", *ours]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    pair = RunFolder(tmp_path / "pair")
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("val/loss", 1e-5)):
        assert column(pair, name) == pytest.approx(column(alone, name), abs=tolerance), name


def test_the_command_says_what_to_type_next(write_chat_recipe, tmp_path, capsys, forget_accelerate):
    recipe = write_chat_recipe(train__max_steps=2)
    assert main(["pretrain", str(recipe), "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "54 conversations" in out
    assert f"next: python cli.py chat {tmp_path / 'run'}" in out
    forget_accelerate()
    again = ["pretrain", str(recipe), "--run-dir", str(tmp_path / "run"), "--resume", "--train.max_steps", "4"]
    assert main([*again, "--data.packing", "padded"]) == 2
    assert "data.packing: packed -> padded" in capsys.readouterr().err


def test_finetune_runs_a_chat_recipe_with_samples(
    start, chat_file, byte_tokenizer, root, tmp_path, monkeypatch, forget_accelerate, capsys
):
    base = start("base", train__max_steps=2)
    forget_accelerate()
    monkeypatch.chdir(tmp_path)
    knobs = {"data.source": chat_file, "data.sha256": "null", "data.block_size": 128, "train.tokens_per_step": 512}
    knobs |= {"train.max_steps": 4, "eval.sample_tokens": 5, "eval.samples": "red blue"}
    words = [str(word) for key, value in knobs.items() for word in (f"--{key}", value)]
    recipe = str(root / "recipes" / "sft_instructions.yaml")
    assert main(["finetune", recipe, "--from", str(base.path), "--run-dir", "tuned", *words]) == 0
    assert "next: python cli.py chat tuned" in capsys.readouterr().out
    events = read_metrics(RunFolder(tmp_path / "tuned"))
    assert [(event["step"], event["samples"][0]["prompt"]) for event in events if "samples" in event] == [
        (0, "red blue"),
        (3, "red blue"),
        (4, "red blue"),
    ]
