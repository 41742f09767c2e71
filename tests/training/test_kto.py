"""KTO: loss and gradients equal a plain formula and TRL's, a run learns, resumes exactly and does
not depend on processes, rows that are no labeled answers are refused.
"""

import importlib.util
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from assertions import replace_step
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import AlignSection
from nanogpt_hf.data.conversations import labeled_of
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import Stopped
from nanogpt_hf.evaluation.loss import pad_batch
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.training.kto import LabeledAnswers, divergence, kto_objective, kto_step
from nanogpt_hf.training.methods import KTO

ALIGN = AlignSection(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
LABELS = [True, False, False, True, True, False]


def tiny(seed: int) -> GPTForCausalLM:
    torch.manual_seed(seed)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
    return GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.3)).eval()


def log_prob(model, ids: list[int], prompt: int) -> torch.Tensor:
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([log_probs[at - 1, ids[at]] for at in range(prompt, len(ids))]).sum()


@pytest.fixture
def rows() -> list[tuple[list[int], list[int]]]:
    draw = random.Random(0)
    ids = lambda: [draw.randrange(40) for _ in range(draw.randrange(1, 9))]  # noqa: E731
    return [(ids(), ids()) for _ in LABELS]


def blocks_of(rows, reference) -> LabeledAnswers:
    pairs = [
        ((prompt + answer, len(prompt)), (prompt + rows[number - 1][1], len(prompt)))
        for number, (prompt, answer) in enumerate(rows)
    ]
    blocks = LabeledAnswers(pairs, 32, LABELS)
    with torch.no_grad():
        for row, pair in enumerate(pairs):
            blocks.reference[row] = torch.stack([log_prob(reference, *side) for side in pair])
    return blocks


def ours(model, blocks, sizes=(6,)) -> tuple[torch.Tensor, float]:
    """The mean loss over all answers, in batches of these sizes, and the estimate."""
    batches = SimpleNamespace(micro_batch_size=max(sizes))
    run = SimpleNamespace(
        model=model, accelerator=Accelerator(cpu=True), mesh=Mesh(), batches=batches
    )
    blocks.kl = divergence(run, blocks, np.arange(6))
    loss, first = torch.zeros(()), 0
    for size in sizes:
        batch = blocks.batch(np.arange(first, first + size))
        part, metrics = kto_objective(ALIGN)(model, pad_batch(batch, max(sizes)))
        assert 0 <= metrics["accuracy"] <= size
        loss, first = loss + part / 6, first + size
    return loss, blocks.kl


@pytest.mark.parametrize(("seed", "other"), [(1, 2), (2, 1)])
def test_loss_and_gradients_equal_a_plain_formula(rows, seed, other):
    model, reference = tiny(seed), tiny(other)
    blocks = blocks_of(rows, reference)
    with torch.no_grad():
        ratios = [
            log_prob(model, *second) - log_prob(reference, *second) for _, second in blocks.pairs
        ]
        kl = max(0.0, sum(ratios).item() / 6)
    expected = torch.zeros(())
    for (own, _), label in zip(blocks.pairs, LABELS, strict=True):
        ratio = log_prob(model, *own) - log_prob(reference, *own).detach()
        weight, sign = (1.3, 1) if label else (0.7, -1)
        expected = expected + weight * (1 - torch.sigmoid(sign * 0.3 * (ratio - kl))) / 6
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss, estimate = ours(model, blocks, (4, 2))
    loss.backward()
    assert estimate == pytest.approx(kl, abs=1e-5)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl==1.16.0"
)
@pytest.mark.parametrize(("seed", "other"), [(1, 2), (2, 1)])
@pytest.mark.filterwarnings("default")
def test_loss_and_gradients_equal_trl(rows, seed, other, tmp_path, byte_tokenizer):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    model, reference = tiny(seed), tiny(other)
    trainer = KTOTrainer(
        model=model,
        ref_model=reference,
        args=KTOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=6,
            beta=ALIGN.beta,
            desirable_weight=ALIGN.desirable_weight,
            undesirable_weight=ALIGN.undesirable_weight,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
        ),
        processing_class=AutoTokenizer.from_pretrained(byte_tokenizer, pad_token="<|endoftext|>"),
    )
    features = [
        {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "KL_completion_ids": rows[number - 1][1],
            "label": LABELS[number],
        }
        for number, (prompt, answer) in enumerate(rows)
    ]
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(features))
    theirs.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss, kl = ours(model.eval(), blocks_of(rows, reference))
    loss.backward()
    (estimate,) = trainer._metrics["eval"]["kl"]
    assert kl == pytest.approx(estimate, abs=1e-5)
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-6)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-6, rtol=1e-4)


QUESTION, ANSWER = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "So.", "label": False},
        {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
        {"completion": [QUESTION, ANSWER], "label": False, "score": 3},
    ],
)
def test_rows_of_every_shape_are_labeled_answers(row):
    assert labeled_of(row) == ([QUESTION, ANSWER], False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "prompt . completion . label"),
        ([1], "expected a row"),
        ({"prompt": "Why?", "completion": "So.", "label": "yes"}, "label: expected true or false"),
        ({"prompt": "Why?", "completion": "So.", "label": 1}, "label: expected true or false"),
        ({"prompt": "Why?", "completion": " ", "label": True}, "completion: message 2: expected"),
    ],
)
def test_rows_that_are_no_labeled_answers_are_refused(row, words):
    with pytest.raises(ValueError, match=words):
        labeled_of(row)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, byte_tokenizer):
    """The command line of a run with other knobs: answers of ones are good, of twos bad."""
    from transformers import AutoTokenizer

    from nanogpt_hf.data.chat_template import chat_template

    folder = tmp_path_factory.mktemp("kto")
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    tokenizer.chat_template = chat_template(tokenizer)
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPTForCausalLM(GPTConfig(**sizes, vocab_size=len(tokenizer), **end)).save_pretrained(
        folder / "start"
    )
    tokenizer.save_pretrained(folder / "start")
    draw = random.Random(0)
    labels = [number % 3 > 0 for number in range(60)]
    rows = [
        {"prompt": str(n), "completion": "21"[good] * draw.randrange(1, 5), "label": good}
        for n, good in enumerate(labels)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(name: str, **knobs) -> list[str]:
        values = {
            "data.block_size": 48,
            "train.tokens_per_step": 384,  # 8 answers
            "train.micro_batch_size": 4,
            "train.max_steps": 6,
            "optim.learning_rate": 1e-2,
            "eval.every": 3,
            "checkpoint.every": 2,
            "tracking.every": 1,
        } | {key.replace("__", "."): value for key, value in knobs.items()}
        start = ["--from", folder / "start", "--data", folder / "rows.jsonl", "--loss", "kto"]
        options = (word for key, value in values.items() for word in (f"--{key}", value))
        return [str(word) for word in (*start, "--run-dir", folder / name, *options)]

    return arguments


@pytest.fixture(scope="module")
def align(arguments, forget_accelerate):
    def align(name: str, *flags: str, **knobs) -> RunFolder:
        forget_accelerate()
        words = arguments(name, **knobs)
        assert main(["align", *words, *flags]) == 0
        forget_accelerate()
        return RunFolder(words[words.index("--run-dir") + 1])

    return align


@pytest.fixture(scope="module")
def whole(align) -> RunFolder:
    return align("whole")


def column(run: RunFolder, name: str) -> list[float]:
    values = [event[name] for event in read_metrics(run) if name in event]
    assert values
    return values


@pytest.mark.long
def test_run_starts_at_its_reference_and_learns_the_labels(whole):
    assert column(whole, "train/loss")[0] == pytest.approx(0.5, abs=1e-5)
    assert column(whole, "val/margin")[0] == pytest.approx(0, abs=1e-5)
    assert column(whole, "val/accuracy")[-1] == 1
    assert column(whole, "val/margin")[-1] > 0.3
    assert column(whole, "val/loss")[-1] < 0.45
    assert len(column(whole, "train/kl")) == 6
    assert "54 labeled answers, loss kto" in (whole.best / "README.md").read_text()


@pytest.mark.slow
def test_run_resumes_exactly_and_accumulation_changes_nothing(whole, align, monkeypatch):
    def stopping(run, step, learning_rate):
        if step == 3:
            raise Stopped("here")
        return kto_step(run, step, learning_rate)

    replace_step(monkeypatch, stopping, KTO)
    with pytest.raises(AssertionError):
        align("parts")
    replace_step(monkeypatch, kto_step, KTO)
    resumed = align("parts", "--resume")
    ours, theirs = (load_file(run.final / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    other = align("accumulated", train__micro_batch_size=2)
    for name in ("train/loss", "train/kl", "val/loss", "val/margin"):
        assert column(resumed, name) == column(whole, name)
        assert column(other, name) == pytest.approx(column(whole, name), abs=1e-5, rel=1e-4)


@pytest.mark.slow
def test_labels_of_one_kind_have_no_margin(align, tmp_path):
    rows = [{"prompt": str(n), "completion": "1", "label": True} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = align("good", data__source=tmp_path / "rows.jsonl", train__max_steps=1)
    (first, *_) = [event for event in read_metrics(run) if "val/loss" in event]
    assert "val/reward_desirable" in first
    assert not {"val/reward_undesirable", "val/margin"} & first.keys()


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_equal_one(whole, arguments, launch_warm, machine):
    run = launch_warm(machine, "align", *arguments(machine))
    for name in ("train/loss", "train/kl", "val/loss", "val/margin"):
        assert column(run, name) == pytest.approx(column(whole, name), abs=1e-5, rel=1e-4), name
