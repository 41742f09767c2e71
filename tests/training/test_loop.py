"""The training loop: equal to plain PyTorch, resumable at any step bit for bit, metrics, models
and refusals.
"""

import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from assertions import at_step, column, numbers, replace_step, same_weights, weights
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.distributed import signals
from nanogpt_hf.errors import DivergedError, Stopped, UserError
from nanogpt_hf.model import GPTForCausalLM
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import tracking
from nanogpt_hf.training.step import train_step
from nanogpt_hf.training.tracking import read_metrics

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of `uninterrupted` runs."""
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def uninterrupted(train, folder):
    """The run of these overrides, trained once in this module."""
    runs = {}

    def run(**overrides) -> RunFolder:
        key = json.dumps(overrides, sort_keys=True)
        if key not in runs:
            runs[key] = train(folder / f"run {len(runs)}", **overrides)
        return runs[key]

    return run


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A copy, to be resumed, of the finished run of these overrides."""
    return lambda **overrides: RunFolder(
        shutil.copytree(uninterrupted(**overrides).path, tmp_path / "run")
    )


def norm_of(tensors) -> float:
    return math.sqrt(sum(tensor.detach().double().square().sum().item() for tensor in tensors))


def layer_of(name: str) -> str:
    if ".h." in name:
        return name.split(".")[2]
    return "embedding" if ".wte." in name or ".wpe." in name else "head"


@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_two_steps_equal_plain_pytorch(start, write_recipe, max_grad_norm):
    # two micro-batches per step, a changing learning rate, weight decay, clipping
    overrides = {
        "train__max_steps": 2,
        "train__micro_batch_size": 4,
        "optim__max_grad_norm": max_grad_norm,
        "tracking__layers": True,
    }
    run = start(**overrides)

    config = load_config(write_recipe(**overrides))
    data = load_prepared(config)
    model = build_model(build_config(config.model, data.manifest.vocab_size), config.train.seed)
    stream = np.concatenate(data.train.stream.chunks).astype(np.int64)
    blocks = np.random.Philox(
        key=np.random.SeedSequence([1337, 1, 0]).generate_state(1, np.uint64)[0]
    )
    order = np.argsort(blocks.random_raw((len(stream) - 1) // 16), kind="stable")
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step, learning_rate in enumerate([1e-2 / 3, 2e-2 / 3]):
        rows = torch.stack(
            [torch.from_numpy(stream[b * 16 : b * 16 + 17]) for b in order[step * 8 : step * 8 + 8]]
        )
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        loss.backward()
        parameters = dict(model.named_parameters())
        before = {name: (p.detach().clone(), p.grad.clone()) for name, p in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        assert column(run, "train/loss")[step + 1] == pytest.approx(loss.item(), abs=1e-6)
        assert column(run, "train/grad_norm")[step + 1] == pytest.approx(norm.item(), rel=1e-5)
        assert column(run, "train/learning_rate")[step + 1] == pytest.approx(learning_rate)
        for layer in ("embedding", "0", "1", "head"):
            names = [name for name in before if layer_of(name) == layer]
            weight = norm_of(before[name][0] for name in names)
            gradient = norm_of(before[name][1] for name in names)
            update = norm_of(parameters[name] - before[name][0] for name in names)
            values = {"grad_norm": gradient, "weight_norm": weight, "update_ratio": update / weight}
            for kind, value in values.items():
                logged = column(run, f"layers/{layer}/{kind}")[step + 1]
                assert logged == pytest.approx(value, rel=1e-4), (layer, kind)
    trained = type(model).from_pretrained(run.final)
    for (name, expected), actual in zip(
        model.named_parameters(), trained.parameters(), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0, msg=name)


def test_train_lowers_loss_and_writes_all_files(start, loss_plots):
    with loss_plots():
        run = start(train__max_steps=60, eval__every=20, checkpoint__every=20, data__order="random")
    losses = column(run, "val/loss")
    assert list(losses) == [0, 20, 40, 60]
    assert losses[60] < losses[0] - 0.5
    assert list(column(run, "train/loss")) == list(range(1, 61))
    for event in read_metrics(run):
        assert event["tokens"] == event["step"] * 128
    assert column(run, "val/perplexity")[60] == pytest.approx(math.exp(losses[60]))
    assert [f.name for f in run.checkpoint_folders()] == ["step_00000040", "step_00000060"]
    model, tokenizer = (
        kind.from_pretrained(run.best) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == 16
    assert run.loss_plot.read_bytes().startswith(b"\x89PNG")
    assert not [p for p in run.path.rglob("*") if "partial" in p.name or p.name.endswith(".old")]
    assert load_config(run.recipe).name == "run"


def test_resume_after_stop_is_exact(start, uninterrupted, monkeypatch):
    options = {
        "model__dropout": 0.2,
        "data__order": "shuffled",
        "train__max_steps": 9,
        "train__tokens_per_step": 16 * 16 * 8,
        "train__micro_batch_size": 16,
        "tracking__every": 2,  # the stop is between two reports
        "optim__max_grad_norm": 0.5,
    }
    whole = uninterrupted(**options)
    blocks = (len(load_prepared(load_config(whole.recipe)).train.stream) - 1) // 16
    # the epoch ends after the stop, so the resumed run draws the next order
    assert 6 * 128 < blocks < 9 * 128
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="stopped at step 5, saved"):
            start("stopped", **options)
    assert signal.getsignal(signal.SIGTERM) is before
    stopped = start("stopped", resume=True, **options)
    assert same_weights(whole, stopped)
    assert numbers(whole) == numbers(stopped)


def signal_in_evaluation_of_step_3(monkeypatch) -> None:
    forward = GPTForCausalLM.forward
    calls = itertools.count(1)

    def interrupted(model, *arguments, **options):
        # 512 tokens in batches of 4 × 16: the 12th forward on validation text is in the evaluation
        # of step 3
        if not model.training and next(calls) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(model, *arguments, **options)

    monkeypatch.setattr(GPTForCausalLM, "forward", interrupted)


def times(folder) -> dict[str, int]:
    """When each file of a checkpoint was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("steps", [6, 9])
def test_resume_does_not_rewrite_its_checkpoint(start, finished, steps):
    run = finished(optim__schedule="constant", checkpoint__keep=9)
    before = times(run.checkpoint(6))
    start(resume=True, train__max_steps=steps, optim__schedule="constant", checkpoint__keep=9)
    assert list(column(run, "train/loss")) == list(range(1, steps + 1))
    assert load_config(run.recipe).train.max_steps == steps
    assert times(run.checkpoint(6)) == before


def test_signal_in_evaluation_saves_and_resume_logs_it_once(start, uninterrupted, monkeypatch):
    options = {"train__max_steps": 6, "checkpoint__every": 100, "checkpoint__keep": 9}
    whole = uninterrupted(**options)

    with monkeypatch.context() as patch:
        signal_in_evaluation_of_step_3(patch)
        with pytest.raises(Stopped, match=r"stopped at step 3, saved .received SIGINT"):
            start("stopped", **options)
    resumed = start("stopped", resume=True, **options)  # evaluates again
    assert column(resumed, "val/loss") == column(whole, "val/loss")
    assert same_weights(whole, resumed)


def test_step_without_finite_gradient_is_skipped_and_logged(start, monkeypatch, caplog):
    def poisoned(run, *arguments):
        with monkeypatch.context() as patch:
            if run.state.step == 3:
                nan = lambda self, hidden, *_: hidden.sum() * math.nan  # noqa: E731
                patch.setattr(GPTForCausalLM, "summed_loss", nan)
            return train_step(run, *arguments)

    replace_step(monkeypatch, poisoned)
    run = start(train__max_steps=6, checkpoint__every=1, checkpoint__keep=9)
    before, after, later = (
        [tensor for part in read_checkpoint(run.checkpoint(step))[:2] for tensor in part.values()]
        for step in (3, 4, 5)
    )
    assert len(before) > 40
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(after, later, strict=True))
    losses = column(run, "train/loss")
    assert losses[4] is None  # null in JSON
    assert all(losses[step] < 10 for step in (1, 2, 3, 5, 6))
    assert column(run, "train/skipped_steps") == {4: 1}
    assert "1 steps had no finite gradient and were skipped" in caplog.text


def test_max_time_saves_and_stops(start, uninterrupted, monkeypatch):
    whole = uninterrupted(train__max_steps=8)
    clock = itertools.count()  # one second per call
    with monkeypatch.context() as patch:
        patch.setattr(signals.time, "monotonic", lambda: next(clock))
        with pytest.raises(Stopped, match=r"train.max_time is up"):
            start("timed", train__max_steps=8, train__max_time="5s")
    assert same_weights(whole, start("timed", resume=True, train__max_steps=8))


def test_bf16_keeps_float32_weights_and_learns(start, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    half = start(train__max_steps=40, eval__every=20, optim__name="muon")
    assert all(weight.dtype == torch.float32 for weight in weights(half).values())
    losses = column(half, "val/loss")
    assert losses[40] < losses[0] - 0.5


def test_bf16_without_instructions_for_it_is_float32(start, uninterrupted, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr("nanogpt_hf.cpu.multiplies_bfloat16", lambda: False)
    with caplog.at_level("WARNING"):
        run = start("float32")
    assert "no instructions for bfloat16" in caplog.text
    assert same_weights(run, uninterrupted())


def test_resume_past_max_steps_is_refused(start, finished):
    run = finished(train__max_steps=6)
    with pytest.raises(UserError, match=r"its step 6 is past train.max_steps 4"):
        start(resume=True, train__max_steps=4)
    assert max(column(run, "train/loss")) == 6


def test_resume_ignores_an_incomplete_metric_line_and_recreates_removed_best(start, finished):
    run = finished(train__max_steps=6)
    shutil.rmtree(run.best)
    start(resume=True, train__max_steps=6)
    assert (run.best / "model.safetensors").is_file()
    with run.metrics.open("ab") as file:
        file.write(b'\n\n{"step": 6, "tok')
    start(resume=True, train__max_steps=8)
    assert list(column(run, "train/loss")) == list(range(1, 9))


def test_nan_loss_is_not_best(start, tmp_path, monkeypatch):
    monkeypatch.setattr(
        GPTForCausalLM, "summed_loss", lambda self, hidden, *_: hidden.sum() * math.nan
    )
    with pytest.raises(DivergedError, match="its last evaluation, at step 3, is not finite"):
        start("lost", train__max_steps=3)
    run = RunFolder(tmp_path / "lost")
    assert not run.best.exists()
    assert all("NaN" not in line for line in run.metrics.read_text().splitlines())
    assert set(column(run, "val/loss").values()) == {None}


def test_throughput_is_averaged_since_last_log(start, monkeypatch):
    clock = [0.0]

    def slow_step(*arguments):
        clock[0] += 2.0
        return train_step(*arguments)

    monkeypatch.setattr(tracking.time, "perf_counter", lambda: clock[0])
    replace_step(monkeypatch, slow_step)
    run = start(train__max_steps=40, tracking__every=10, eval__every=1000, checkpoint__every=1000)
    assert column(run, "train/tokens_per_second") == dict.fromkeys((10, 20, 30, 40), 64.0)


@pytest.mark.slow
def test_wandb_without_login_stays_offline(start, tmp_path, monkeypatch, caplog):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    run = start(tracking__trackers=["wandb"])
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert caplog.text.count("wandb: no login found") == 1
