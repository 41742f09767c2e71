"""Preference training: losses equal plain formulas and TRL's, runs learn, resume exactly and do not
depend on processes, rows that are no pairs are refused.
"""

import importlib.util
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch.nn import functional as F

from assertions import replace_step
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import AlignSection
from nanogpt_hf.data.conversations import pair_of
from nanogpt_hf.errors import DataError, Stopped
from nanogpt_hf.evaluation.loss import pad_batch
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.methods import PREFERENCES
from nanogpt_hf.training.preferences import LOSSES as LOSS_ROWS
from nanogpt_hf.training.preferences import (
    Pairs,
    encode_answer,
    preference_objective,
    preference_step,
)
from nanogpt_hf.training.tracking import read_metrics

LOSSES = {
    "dpo": AlignSection(loss="dpo", beta=0.3),
    "dpo, smoothed": AlignSection(loss="dpo", beta=0.3, label_smoothing=0.2),
    "ipo": AlignSection(loss="ipo", beta=0.3),
    "hinge": AlignSection(loss="hinge", beta=0.3),
    "simpo": AlignSection(loss="simpo", beta=2.0, margin=0.4),
    "orpo": AlignSection(loss="orpo", beta=0.3),
}
KNOBS = {
    "data.block_size": 48,
    "train.tokens_per_step": 384,  # 8 pairs
    "train.micro_batch_size": 4,
    "train.max_steps": 6,
    "optim.learning_rate": 3e-3,
    "eval.every": 3,
    "checkpoint.every": 2,
    "tracking.every": 1,
}


def tiny(seed: int) -> GPTForCausalLM:
    torch.manual_seed(seed)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
    return GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.3)).eval()


@pytest.fixture
def pairs() -> Pairs:
    draw = random.Random(0)
    ids = lambda count: [draw.randrange(40) for _ in range(count)]  # noqa: E731
    rows = []
    for _ in range(6):
        prompt = ids(draw.randrange(1, 9))
        answers = (ids(draw.randrange(1, 9)) for _ in range(2))
        rows.append(tuple((prompt + answer, len(prompt)) for answer in answers))
    return Pairs(rows, block_size=32)


def sums(model, pair) -> tuple[list[torch.Tensor], list[int]]:
    """The log-probability of each answer, without padding, and its length."""
    found, lengths = [], []
    for ids, prompt in pair:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(
            sum(log_probs[at - 1, ids[at]] for at in range(prompt, len(ids)))  # pyright: ignore
        )
        lengths.append(len(ids) - prompt)
    return found, lengths


def plain_loss(align: AlignSection, model, reference, pair) -> torch.Tensor:
    (chosen, rejected), (n, m) = sums(model, pair)
    if align.loss == "simpo":
        return -F.logsigmoid(align.beta * (chosen / n - rejected / m) - align.margin)
    if align.loss == "orpo":
        x, y = (chosen / n).exp(), (rejected / m).exp()
        return -x.log() - align.beta * torch.sigmoid((x / (1 - x) / (y / (1 - y))).log()).log()
    with torch.no_grad():
        (first, second), _ = sums(reference, pair)
    a, b = chosen - first, rejected - second
    if align.loss == "ipo":
        return (a / n - b / m - 1 / (2 * align.beta)) ** 2
    if align.loss == "hinge":
        return (1 - align.beta * (a - b)).clamp(min=0)
    e, x = align.label_smoothing, align.beta * (a - b)
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_plain_formulas(name, pairs):
    align, model, reference = LOSSES[name], tiny(1), tiny(2)
    expected = sum(plain_loss(align, model, reference, pair) for pair in pairs.pairs)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for row, pair in enumerate(pairs.pairs):
            pairs.reference[row] = torch.stack(sums(reference, pair)[0])
    objective, loss = preference_objective(align), torch.zeros(())
    for rows in ([0, 1, 2, 3], [4, 5]):  # the second padded, as evaluations pad
        batch = pad_batch(pairs.batch(np.array(rows)), 4)
        part, metrics = objective(model, batch)
        assert 0 <= metrics["accuracy"] <= len(rows)
        loss = loss + part
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl==1.16.0"
)
@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge"])
@pytest.mark.filterwarnings("default")
def test_loss_and_gradients_equal_trl(name, pairs, tmp_path, byte_tokenizer):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    align, model, reference = LOSSES[name], tiny(1), tiny(2)
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer, pad_token="<|endoftext|>")
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=6,
            loss_type=[{"dpo": "sigmoid"}.get(name, name)],
            beta=align.beta,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=tokenizer,
    )
    features = [
        {
            "prompt_ids": chosen[: (at := prompt)],
            "chosen_ids": chosen[at:],
            "rejected_ids": rejected[at:],
        }
        for (chosen, prompt), (rejected, _) in pairs.pairs
    ]
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(features))
    theirs.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for row, pair in enumerate(pairs.pairs):
            pairs.reference[row] = torch.stack(sums(reference, pair)[0])
    ours = preference_objective(align)(model, pairs.batch(np.arange(6)))[0] / 6
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_odds_ratio_equals_trl(pairs):
    orpo = pytest.importorskip("trl.experimental.orpo", reason="needs trl: pip install trl==1.16.0")
    scores = -torch.rand(2, 6) * 3
    scores[0, 0] = -1e-4
    theirs, *_ = orpo.ORPOTrainer.odds_ratio_loss(
        SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu")), *scores
    )
    ours = LOSS_ROWS["orpo"].loss(LOSSES["orpo"], *scores)
    torch.testing.assert_close(ours, -scores[0] - theirs, atol=1e-5, rtol=1e-5)


QUESTION = [{"role": "user", "content": "Why?"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Because.", "No."))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        {"prompt": "Why?", "chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]},
        {"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD], "score": 3},
        {"prompt": QUESTION, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": QUESTION, "chosen": [*QUESTION, GOOD], "rejected": "No."},
    ],
)
def test_rows_of_every_shape_are_pairs(row):
    assert pair_of(row) == ([*QUESTION, GOOD], [*QUESTION, BAD])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Why?", "completion": "No."}, "a row with prompt . chosen . rejected"),
        ([1], "expected a row"),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": 3}, "rejected: expected a list"),
        ({"chosen": "Because.", "rejected": "No."}, "chosen: message 1: role: expected user"),
        ({"prompt": "Why?", "chosen": " ", "rejected": "No."}, "chosen: message 2: expected text"),
        (
            {
                "chosen": [*QUESTION, GOOD],
                "rejected": [{"role": "user", "content": "How?"}, BAD],
            },
            "differ before their last message",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused(row, words):
    with pytest.raises(ValueError, match=words):
        pair_of(row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, byte_tokenizer):
    """A model of random weights with a chat template, pairs that prefer answers of ones, and the
    runs of the module.
    """
    from transformers import AutoTokenizer

    from nanogpt_hf.data.chat_template import chat_template

    folder = tmp_path_factory.mktemp("preferences")
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    tokenizer.chat_template = chat_template(tokenizer)
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPTForCausalLM(GPTConfig(**sizes, vocab_size=len(tokenizer), **end))
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    draw = random.Random(0)
    rows = [
        {
            "prompt": str(number),
            "chosen": "1" * draw.randrange(1, 5),
            "rejected": "2" * draw.randrange(1, 5),
        }
        for number in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs."""

    def arguments(name: str, **knobs) -> list[str]:
        values = KNOBS | {key.replace("__", "."): value for key, value in knobs.items()}
        start = ["--from", folder / "start", "--data", folder / "pairs.jsonl"]
        options = (word for key, value in values.items() for word in (f"--{key}", value))
        return [str(word) for word in (*start, "--run-dir", folder / name, *options)]

    return arguments


@pytest.fixture(scope="module")
def align(folder, arguments, forget_accelerate):
    def align(name: str, *flags: str, **knobs) -> RunFolder:
        forget_accelerate()
        assert main(["align", *arguments(name, **knobs), *flags]) == 0
        forget_accelerate()
        return RunFolder(folder / name)

    return align


@pytest.fixture(scope="module")
def whole(align) -> RunFolder:
    return align("whole")


def column(run: RunFolder, name: str) -> list[float]:
    values = [event[name] for event in read_metrics(run) if name in event]
    assert values
    return values


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.final / "model.safetensors")


@pytest.mark.long
def test_run_starts_at_its_reference_and_learns_the_preference(whole):
    assert column(whole, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert column(whole, "val/margin")[0] == pytest.approx(0, abs=1e-5)
    assert "mean reward" not in (card := (whole.best / "README.md").read_text())
    assert "36 preference pairs, loss dpo" in card
    assert "on held-out pairs (step 6)" in card
    assert column(whole, "val/accuracy")[-1] == 1
    assert column(whole, "val/loss")[-1] < column(whole, "val/loss")[0] - 0.05
    assert len(column(whole, "train/reward_chosen")) == 6


@pytest.mark.long
def test_run_resumes_exactly_in_the_middle(whole, align, monkeypatch):
    def stopping(run, step, learning_rate):
        if step == 3:
            raise Stopped("here")
        return preference_step(run, step, learning_rate)

    replace_step(monkeypatch, stopping, PREFERENCES)
    with pytest.raises(AssertionError):
        align("parts")
    replace_step(monkeypatch, preference_step, PREFERENCES)
    resumed, theirs = align("parts", "--resume"), weights(whole)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(resumed).items())
    for name in ("train/loss", "val/loss", "val/margin"):
        assert column(resumed, name) == column(whole, name)


@pytest.mark.long
def test_run_that_is_overwritten_gets_a_new_reference(align, folder):
    align("again", data__validation_fraction=0.3)
    run = align("again", "--overwrite")
    assert column(run, "val/margin")[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.long
def test_damaged_reference_is_computed_again_and_the_card_counts_measured_pairs(align):
    run = align("damaged", train__max_steps=2, eval__tokens=2 * 48)
    assert "on held-out pairs" in (run.best / "README.md").read_text()
    before = load(run.reference.read_bytes())
    run.reference.write_bytes(b"damaged")
    align("damaged", "--resume", train__max_steps=4, eval__tokens=2 * 48)
    again = load_file(run.reference)
    for name in before:
        torch.testing.assert_close(again[name], before[name], atol=1e-4, rtol=0)


@pytest.mark.long
def test_new_tokens_have_a_reference(align, folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    tokenizer.add_tokens(["11"])
    tokenizer.save_pretrained(folder / "larger")
    options = {"data__tokenizer": folder / "larger", "train__max_steps": 2}
    run = align("new", **options)
    run.reference.unlink()
    align("new", "--resume", **options | {"train__max_steps": 3})
    assert column(run, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)


def test_answers_without_a_chat_template_are_text(byte_tokenizer):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    messages = pair_of({"prompt": "Why?", "chosen": "No<|endoftext|>", "rejected": "x"})[0]
    ids, prompt = encode_answer(messages, tokenizer, None)
    assert tokenizer.decode(ids[:prompt]) == "Why?"
    assert ids.count(tokenizer.eos_token_id) == 1
    with pytest.raises(DataError, match="more messages"):
        encode_answer([*messages, *messages], tokenizer, None)


@pytest.mark.long
def test_accumulation_and_adapters_have_the_same_reference(whole, align):
    other = align("accumulated", train__micro_batch_size=2)
    assert column(other, "train/loss") == pytest.approx(column(whole, "train/loss"), abs=1e-5)
    adapted = align("adapted", lora__rank=4, optim__learning_rate=3e-2)
    assert column(adapted, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert column(adapted, "val/loss")[-1] < column(adapted, "val/loss")[0]


@pytest.mark.slow  # rl shares its steps and layouts with this method
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_equal_one(whole, arguments, launch_warm, machine):
    run = launch_warm(machine, "align", *arguments(machine))
    for name in ("train/loss", "val/loss", "val/margin"):
        assert column(run, name) == pytest.approx(column(whole, name), abs=1e-5, rel=3e-5), name
