"""Frozen parameters stay bit for bit, unfrozen ones train.

Resumed runs: distributed/test_equalities.py.
"""

import functools
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.model.load import load_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run

pytestmark = pytest.mark.long
KNOBS = {
    "model.dropout": 0.1,
    "data.order": "random",
    "optim.learning_rate": 1e-2,
    "optim.min_learning_rate": 1e-3,
    "optim.warmup_steps": 0,
    "train.max_steps": 8,
    "train.tokens_per_step": 256,
    "train.micro_batch_size": 2,
    "eval.every": 4,
    "eval.tokens": 512,
    "checkpoint.every": 100,
    "checkpoint.keep": 9,
    "tracking.every": 1,
}
FREEZING = {"finetune.freeze_layers": 2}
UNFREEZING = FREEZING | {"finetune.unfreeze_every": 2}
LORA = {"lora.rank": 2, "lora.dropout": 0.1}
RUNS = {"unfreezing": UNFREEZING, "lora": LORA}


def overrides(tiny_base, text_file, data, knobs):
    values = (
        {"finetune.model": tiny_base, "data.source": text_file, "data.dir": data} | KNOBS | knobs
    )
    return [(key, str(value)) for key, value in values.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of all runs of this module and their prepared data."""
    return tmp_path_factory.mktemp("finetuning")


@pytest.fixture(scope="module")
def start(tiny_base, text_file, folder, forget_accelerate):
    """Fine-tune the tiny base with knobs into the run folder `name`; return it."""

    def start(name: str, knobs: dict | None = None, *, resume: bool = False) -> RunFolder:
        config, _ = finetune_config(
            None, overrides(tiny_base, text_file, folder / "data", knobs or {})
        )
        run = RunFolder(folder / name)
        forget_accelerate()
        loop.train(prepare_run(config, run.path, resume=resume, overwrite=not resume))
        forget_accelerate()
        return run

    return start


@pytest.fixture(scope="module")
def uninterrupted(start):
    """The run of RUNS[name] without interruption and with a checkpoint at each step; trained
    once.
    """
    return functools.cache(lambda name: start(name, RUNS[name] | {"checkpoint.every": 1}))


def changed(run: RunFolder, base: Path) -> set[str]:
    """The names of the tensors that are not bit for bit as they were in the base."""
    before = load_file(base / "model.safetensors")
    after = load_file(run.final / "model.safetensors")
    assert before.keys() == after.keys()
    assert len(before) > 40
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_unfrozen_parameters_change(start, tiny_base):
    run = start("frozen", FREEZING)
    names = changed(run, tiny_base)
    assert names == {
        n
        for n in load_file(tiny_base / "model.safetensors")
        if ".h.2." in n or ".h.3." in n or "ln_f" in n
    }
    GPT2LMHeadModel.from_pretrained(run.final)
    optimizer_state = read_checkpoint(run.newest_checkpoint()).optimizer_state
    assert optimizer_state
    assert not any(
        ".h.0." in name or ".h.1." in name or ".wte." in name or ".wpe." in name
        for name in optimizer_state
    )


@pytest.mark.parametrize(("step", "untouched"), [(3, (".h.0.", ".wte.", ".wpe.")), (7, ())])
def test_blocks_unfreeze_from_the_top_and_embeddings_last(
    uninterrupted, tiny_base, step, untouched
):
    before = dict(load_model(str(tiny_base)).named_parameters())
    after = read_checkpoint(uninterrupted("unfreezing").checkpoint(step)).weights
    assert len(before) > 40
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if any(part in name for part in untouched)}


def test_unfrozen_parameters_have_their_own_step_count(uninterrupted):
    counts = {}
    for name, value in read_checkpoint(
        uninterrupted("unfreezing").checkpoint(5)
    ).optimizer_state.items():
        if name.endswith(".step"):
            counts.setdefault(int(value), set()).add(name.split(".h.")[-1].split(".")[0])
    assert counts == {5: {"2", "3", "transformer"}, 3: {"1"}, 1: {"0"}}


# peft 0.21 uses the old name
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapter_opens_with_peft_and_merged_as_plain_gpt2(start, uninterrupted, tiny_base):
    run = uninterrupted("lora")
    merged = start("merged", LORA | {"lora.merge": "true"})
    with_adapter, saved_adapter, plain, base = (
        kind.from_pretrained(folder).eval()(input_ids=torch.arange(20)[None]).logits
        for kind, folder in (
            (AutoPeftModelForCausalLM, run.final),
            (AutoPeftModelForCausalLM, merged.final / "adapter"),
            (GPT2LMHeadModel, merged.final),
            (GPT2LMHeadModel, tiny_base),
        )
    )
    assert (base - plain).abs().max() > 1e-3
    torch.testing.assert_close(with_adapter, plain, atol=2e-5, rtol=0)
    assert torch.equal(with_adapter, saved_adapter)
