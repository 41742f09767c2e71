"""Preference training on pairs and on labeled answers (KTO): losses equal plain formulas and TRL's,
runs learn, resume exactly and do not depend on processes, rows of other shapes are refused.
"""

import importlib.util
import json
import math
import os
import random
import re
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load, load_file, save
from torch.nn import functional as F
from transformers import AutoTokenizer

from allocations import peak_allocation
from assertions import copy_at, same_weights, series
from nanogpt_hf.commands import main
from nanogpt_hf.config.methods import PREFERENCES
from nanogpt_hf.config.schema import KNOBS as SCHEMA
from nanogpt_hf.config.schema import AlignSection, DataSection, kind_options
from nanogpt_hf.data.conversations import labeled_of, pair_of
from nanogpt_hf.data.documents import held_out
from nanogpt_hf.data.messages import Conversation
from nanogpt_hf.errors import DataError
from nanogpt_hf.evaluation.loss import pad_batch
from nanogpt_hf.methods import preference_losses, reference
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.methods.pairs import LabeledAnswers, Pairs, encode_answer, load_pairs
from nanogpt_hf.methods.preference_losses import kto_objective, preference_objective
from nanogpt_hf.methods.preferences import divergence
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.training.epochs import with_steps_of_known_data

SECTIONS = {
    "dpo": AlignSection(loss="dpo", beta=0.3),
    "dpo, smoothed": AlignSection(loss="dpo", beta=0.3, label_smoothing=0.2),
    "ipo": AlignSection(loss="ipo", beta=0.3),
    "hinge": AlignSection(loss="hinge", beta=0.3),
    "simpo": AlignSection(loss="simpo", beta=2.0, margin=0.4),
    "orpo": AlignSection(loss="orpo", beta=0.3),
    "kto": AlignSection(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
}
LABELS = [True, False, False, True, True, False]
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl==1.16.0"
)


def tiny(seed: int) -> GPTForCausalLM:
    torch.manual_seed(seed)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
    return GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.3)).eval()


def log_prob(model, ids: list[int], prompt: int) -> torch.Tensor:
    """The log-probability of an answer, without padding."""
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([log_probs[at - 1, ids[at]] for at in range(prompt, len(ids))]).sum()


@pytest.fixture(params=[(1, 2), (2, 1)])
def blocks(request):
    """A function that gives the blocks of a loss, a model and the model before training, of other
    weights, whose log-probabilities the blocks have.
    """
    draw, model, reference = random.Random(0), *map(tiny, request.param)
    ids = lambda: [draw.randrange(40) for _ in range(draw.randrange(1, 9))]  # noqa: E731
    rows = [(ids(), ids(), ids()) for _ in LABELS]

    def blocks(name: str):
        pairs = [
            tuple(
                (prompt + answer, len(prompt))
                for answer in (first, rows[number - 1][1] if name == "kto" else second)
            )
            for number, (prompt, first, second) in enumerate(rows)
        ]
        found = LabeledAnswers(pairs, 32, LABELS) if name == "kto" else Pairs(pairs, 32)
        with torch.no_grad():
            for row, pair in enumerate(pairs):
                found.reference[row] = torch.stack([log_prob(reference, *side) for side in pair])
        return found, model, reference

    return blocks


def plain_loss(align: AlignSection, model, reference, pair) -> torch.Tensor:
    chosen, rejected = (log_prob(model, *side) for side in pair)
    n, m = (len(ids) - prompt for ids, prompt in pair)
    if align.loss == "simpo":
        return -F.logsigmoid(align.beta * (chosen / n - rejected / m) - align.margin)
    if align.loss == "orpo":
        x = (chosen / n).exp()
        y = (rejected / m).exp()
        return -x.log() - align.beta * torch.sigmoid((x / (1 - x) / (y / (1 - y))).log()).log()
    with torch.no_grad():
        first, second = (log_prob(reference, *side) for side in pair)
    a = chosen - first
    b = rejected - second
    if align.loss == "ipo":
        return (a / n - b / m - 1 / (2 * align.beta)) ** 2
    if align.loss == "hinge":
        return (1 - align.beta * (a - b)).clamp(min=0)
    e = align.label_smoothing
    x = align.beta * (a - b)
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def plain_kto(align: AlignSection, model, reference, pairs) -> torch.Tensor:
    with torch.no_grad():
        kl = sum(log_prob(model, *other) - log_prob(reference, *other) for _, other in pairs) / 6
    loss = torch.zeros(())
    for (own, _), label in zip(pairs, LABELS, strict=True):
        ratio = log_prob(model, *own) - log_prob(reference, *own).detach()
        weight, sign = (1.3, 1) if label else (0.7, -1)
        loss = loss + weight * (1 - torch.sigmoid(sign * 0.3 * (ratio - kl.clamp(min=0))))
    return loss


def test_each_loss_of_a_recipe_is_a_row_is_compared_with_its_formula_and_is_described():
    names = {name for name in kind_options(SCHEMA["align.loss"].kind) if isinstance(name, str)}
    # KTO is a method of its own, and no row.
    assert names == {*preference_losses.LOSSES, "kto"}
    assert names == {section.loss for section in SECTIONS.values()}
    page = (Path(__file__).parents[2] / "docs" / "alignment.md").read_text(encoding="utf-8")
    assert names == set(re.findall(r"(?m)^\| `(\w+)` \| .* \| arXiv:[\d.]+ \|$", page))


def ours(name: str, blocks, model) -> torch.Tensor:
    """The summed loss over all rows, in two batches; the second is padded, as evaluations pad."""
    align = SECTIONS[name]
    objective = kto_objective(align) if name == "kto" else preference_objective(align)
    if name == "kto":
        run = SimpleNamespace(model=model, accelerator=Accelerator(cpu=True))
        run.batches = SimpleNamespace(micro_batch_size=4)
        blocks.kl = divergence(run, blocks, np.arange(6))
    total = torch.zeros(())
    for rows in ([0, 1, 2, 3], [4, 5]):
        loss, metrics = objective(model, pad_batch(blocks.batch(np.array(rows)), 4))
        assert 0 <= metrics["accuracy"] <= len(rows)
        total = total + loss
    return total


def assert_same_gradients(model, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Of two losses, which are equal too."""
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(value, parameters) for value in (loss, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", SECTIONS)
def test_loss_and_gradients_equal_plain_formulas(name, chunked, blocks, monkeypatch):
    if chunked:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 300 * 7)
    rows, model, reference = blocks(name)
    if name == "kto":
        expected = plain_kto(SECTIONS[name], model, reference, rows.pairs)
    else:
        expected = sum(plain_loss(SECTIONS[name], model, reference, pair) for pair in rows.pairs)
    assert_same_gradients(model, ours(name, rows, model), expected)


def test_logits_of_a_chunk_alone_are_in_memory(monkeypatch):
    """512 tokens with 20,000 logits each, 41 MB; a chunk has 52 tokens."""
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 2**20)
    config = GPTConfig(vocab_size=20_000, n_positions=64, n_embd=16, n_layer=1, n_head=1)
    model = GPTForCausalLM(config)
    ids = torch.randint(20_000, (4, 2, 64))
    pair_log_probs = preference_losses.pair_log_probs

    def work():
        scores, lengths = pair_log_probs(model, ids, ids)
        assert lengths.eq(64).all()
        scores.sum().backward()

    assert peak_allocation(work) < ids.numel() * 20_000 * 4 / 2


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "kto"])
@pytest.mark.filterwarnings("default")
def test_loss_and_gradients_equal_trl(name, blocks, tmp_path, byte_tokenizer):
    import trl
    from datasets import Dataset

    align = SECTIONS[name]
    (rows, model, reference) = blocks(name)
    if name == "kto":
        kind = trl.KTOTrainer
        configuration = trl.KTOConfig
        options = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
        data = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
        features = [
            {
                "prompt_ids": ids[:prompt],
                "completion_ids": ids[prompt:],
                "KL_completion_ids": other[prompt:],
                "label": label,
            }
            for ((ids, prompt), (other, _)), label in zip(rows.pairs, LABELS, strict=True)
        ]
    else:
        kind = trl.DPOTrainer
        configuration = trl.DPOConfig
        options = {"loss_type": [{"dpo": "sigmoid"}.get(name, name)]}
        data = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
        features = [
            {
                "prompt_ids": chosen[:prompt],
                "chosen_ids": chosen[prompt:],
                "rejected_ids": rejected[prompt:],
            }
            for (chosen, prompt), (rejected, _) in rows.pairs
        ]
    trainer = kind(
        model=model,
        ref_model=reference,
        args=configuration(
            output_dir=str(tmp_path),
            per_device_train_batch_size=6,
            beta=align.beta,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_dropout=True,
            gradient_checkpointing=False,
            **options,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(byte_tokenizer, pad_token="<|endoftext|>"),
    )
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(features))
    assert_same_gradients(model, ours(name, rows, model.eval()) / 6, theirs)


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
    assert [side.messages for side in pair_of(row)] == [[*QUESTION, GOOD], [*QUESTION, BAD]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Why?", "completion": "No."}, "a row with prompt . chosen . rejected"),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": 3}, "rejected: expected a list"),
        (
            {
                "chosen": [*QUESTION, GOOD],
                "rejected": [{"role": "user", "content": "How?"}, BAD],
            },
            "differ before their last message",
        ),
        ({"prompt": "Why?", "chosen": "No.", "rejected": "No."}, "are equal"),
        ({"chosen": [*QUESTION, BAD], "rejected": [*QUESTION, BAD]}, "are equal"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(row, words):
    with pytest.raises(ValueError, match=words):
        pair_of(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "No.", "label": False},
        {"prompt": QUESTION, "completion": [BAD], "label": False},
        {"completion": [*QUESTION, BAD], "label": False, "score": 3},
    ],
)
def test_rows_of_every_shape_are_labeled_answers(row):
    assert labeled_of(row) == (Conversation([*QUESTION, BAD]), False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "prompt . completion . label"),
        ({"prompt": "Why?", "completion": "So.", "label": 1}, "label: expected true or false"),
    ],
)
def test_rows_that_are_no_labeled_answers_are_refused(row, words):
    with pytest.raises(ValueError, match=words):
        labeled_of(row)


KNOBS = {
    "data.block_size": 48,
    "train.tokens_per_step": 384,  # 8 rows
    "train.micro_batch_size": 4,
    "train.max_steps": 6,
    "optim.learning_rate": 3e-3,
    "eval.every": 3,
    "checkpoint.every": 2,
    "tracking.every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model):
    """A model of random weights with a chat template; rows in which answers of ones are good, of
    twos bad; and the runs of the module.
    """
    folder = tmp_path_factory.mktemp("preferences")
    save_chat_model(folder / "start")
    draw = random.Random(0)
    rows = {"dpo": [], "kto": []}
    for number in range(40):
        good, bad = ("12"[n] * draw.randrange(1, 5) for n in range(2))
        rows["dpo"].append({"prompt": str(number), "chosen": good, "rejected": bad})
        label = number % 3 > 0
        answer = {"completion": good if label else bad, "label": label}
        rows["kto"].append({"prompt": str(number)} | answer)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs, whose loss the first word of its name is."""

    def arguments(name: str, **knobs) -> list[str]:
        loss = name.split()[0]
        rate = {"optim.learning_rate": 1e-2} if loss == "kto" else {}
        values = KNOBS | rate | {key.replace("__", "."): value for key, value in knobs.items()}
        start = ["--from", folder / "start", "--data", folder / f"{loss}.jsonl", "--loss", loss]
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
def whole(align):
    """The run of each loss, trained once."""
    runs = {}
    return lambda loss: runs.get(loss) or runs.setdefault(loss, align(f"{loss} whole"))


def test_a_signal_ends_the_reference_without_a_file(
    folder, arguments, forget_accelerate, monkeypatch
):
    log_probs = preference_losses.pair_log_probs

    def stopped(*given):
        if not torch.is_grad_enabled():  # no step
            os.kill(os.getpid(), signal.SIGTERM)
        return log_probs(*given)

    monkeypatch.setattr(reference, "pair_log_probs", stopped)
    forget_accelerate()
    assert main(["align", *arguments("dpo stopped")]) == 75
    forget_accelerate()
    assert not RunFolder(folder / "dpo stopped").reference.exists()


def json_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_run_starts_at_its_reference_and_learns_the_preference(whole):
    run = whole("dpo")
    kto = whole("kto")
    assert series(run, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert series(kto, "train/loss")[0] == pytest.approx(0.5, abs=1e-5)
    for each in (run, kto):
        assert series(each, "val/margin")[0] == pytest.approx(0, abs=1e-5)
        assert series(each, "val/accuracy")[-1] == 1
        assert series(each, "val/loss")[-1] < series(each, "val/loss")[0] - 0.05
    card = (run.best / "README.md").read_text()
    assert "36 preference pairs, loss dpo" in card
    # A run is named after its folder, and not after the model that it starts from.
    assert f"\n# {run.path.name}\n" in card
    assert len(series(run, "train/reward_chosen")) == len(series(kto, "train/kl")) == 6
    assert "36 labeled answers, loss kto" in (kto.best / "README.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_run_resumes_exactly_in_the_middle(loss, whole, align, folder):
    copy_at(whole(loss), 4, folder / f"{loss} parts")
    resumed = align(f"{loss} parts", "--resume")
    assert same_weights(resumed, whole(loss))
    for name in ("train/loss", "val/loss", "val/margin"):
        assert series(resumed, name) == series(whole(loss), name)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "accumulated"])
def test_processes_and_accumulation_change_no_number(
    whole, arguments, align, launch_warm, loss, machine
):
    """The reference and the divergence of a step are sums over processes, too."""
    name = f"{loss} {machine}"
    if machine == "accumulated":
        run = align(name, train__micro_batch_size=2)
    else:
        run = launch_warm(machine, "align", *arguments(name))
    for metric in ("train/loss", "val/loss", "val/margin", *["train/kl"] * (loss == "kto")):
        expected = pytest.approx(series(whole(loss), metric), abs=1e-5, rel=1e-4)
        assert series(run, metric) == expected, metric


@pytest.mark.parametrize(("steps", "epochs"), [(9, "2.00"), (1, "0.22")])
def test_log_has_the_epochs(steps, epochs, folder, caplog):
    """36 pairs, eight in a step."""
    caplog.set_level("INFO", "nanogpt_hf")
    knobs = KNOBS | {"finetune.model": folder / "start", "data.source": folder / "dpo.jsonl"}
    knobs |= {"align.loss": "dpo", "train.max_steps": steps}
    overrides = [(key, str(value)) for key, value in knobs.items()]
    load_pairs(finetune_config(None, overrides, PREFERENCES)[0])
    assert f"  {steps} steps read each of the preference pairs {epochs} times" in caplog.text


@pytest.mark.parametrize(("epochs", "steps"), [(2, 9), (0.2, 1), (0.25, 2)])
def test_steps_of_epochs_are_counted_in_pairs(epochs, steps, folder):
    """36 pairs, eight in a step."""
    knobs = KNOBS | {"finetune.model": folder / "start", "data.source": folder / "dpo.jsonl"}
    knobs |= {"align.loss": "dpo", "train.epochs": epochs}
    knobs.pop("train.max_steps", None)
    overrides = [(key, str(value)) for key, value in knobs.items()]
    config = finetune_config(None, overrides, PREFERENCES)[0]
    assert with_steps_of_known_data(config).train.max_steps == steps


@pytest.mark.slow
def test_held_out_labels_of_one_kind_have_no_margin(align, tmp_path):
    held = held_out(20, DataSection(validation_fraction=0.1), "rows").tolist()
    rows = [
        {"prompt": str(n), "completion": "1", "label": one or n % 2 > 0}
        for n, one in enumerate(held)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {"data__source": tmp_path / "rows.jsonl", "data__validation_fraction": 0.1}
    run = align("kto good", **knobs, train__max_steps=1)
    (first, *_) = [event for event in read_metrics(run) if "val/loss" in event]
    assert "val/reward_desirable" in first
    assert not {"val/reward_undesirable", "val/margin"} & first.keys()


@pytest.mark.long
def test_reference_that_is_overwritten_or_lost_is_computed_again(align):
    align("dpo again", data__validation_fraction=0.3, train__max_steps=2)
    knobs = {"train__max_steps": 2, "eval__tokens": 2 * 48}
    run = align("dpo again", "--overwrite", **knobs)
    assert series(run, "val/margin")[0] == pytest.approx(0, abs=1e-5)
    before = load(run.reference.read_bytes())
    run.reference.unlink()
    align("dpo again", "--resume", **knobs | {"train__max_steps": 4})
    again = load_file(run.reference)
    for name in before:
        torch.testing.assert_close(again[name], before[name], atol=1e-4, rtol=0)


def rows_of(first: int, second: int, **changed) -> bytes:
    tensors = {"train": torch.full((first, 2), -1.5), "validation": -torch.rand(second, 2)}
    tensors = {name: changed.get(name, tensor) for name, tensor in tensors.items()}
    return reference.reference_content(tensors)


REFERENCE = rows_of(5, 2)
_HEADER = json.loads(REFERENCE[8 : 8 + int.from_bytes(REFERENCE[:8], "little")])
METADATA = _HEADER["__metadata__"]
REFERENCES = {
    "empty": b"",
    "cut": REFERENCE[:-9],
    "header alone": REFERENCE[:60],
    "null": b"null",
    "deep": b"[" * 3000,
    "a huge header": b"\xff" * 200,
    "fewer rows": rows_of(4, 2),
    "more rows": rows_of(5, 3),
    "one column": rows_of(5, 2, train=torch.ones(5)),
    "zeros": rows_of(5, 2, train=torch.zeros(5, 2)),
    "not a number": rows_of(5, 2, train=torch.full((5, 2), float("nan"))),
    "half precision": rows_of(5, 2, train=torch.ones(5, 2).half()),
    "other values": save(
        {name: 1.5 * tensor for name, tensor in load(REFERENCE).items()}, METADATA
    ),
    "a flipped bit": REFERENCE[:-1] + bytes([REFERENCE[-1] ^ 1]),
    "rows in another order": save(
        {name: tensor.flip(0) for name, tensor in load(rows_of(5, 2)).items()}, METADATA
    ),
    "no checksum": save(load(REFERENCE)),
    "no validation": save({"train": torch.ones(5, 2)}),
}


@pytest.mark.parametrize("content", REFERENCES.values(), ids=REFERENCES)
def test_damaged_reference_is_found_out_with_one_warning(tmp_path, caplog, content):
    path = tmp_path / "reference.safetensors"
    splits = {"train": range(5), "validation": range(2)}
    assert reference.read_reference(path, splits) == {}
    path.write_bytes(REFERENCE)
    assert reference.read_reference(path, splits).keys() == splits.keys()
    path.write_bytes(content)
    assert reference.read_reference(path, splits) == {}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path}: is damaged: ")
    assert record.getMessage().endswith("; its log-probabilities are computed again")


def other_values(content: bytes) -> bytes:
    return save({name: 1.5 * tensor for name, tensor in load(content).items()})


def other_bit(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("content", "flag"),
    [
        (None, "--resume"),
        (b"", "--auto-resume"),
        (REFERENCE, "--resume"),
        (other_values, "--resume"),
        (other_bit, "--auto-resume"),
    ],
)
def test_run_resumes_though_its_reference_is_damaged(whole, align, folder, content, flag):
    name = content.__name__ if callable(content) else len(content or "-")
    copy = copy_at(whole("dpo"), 4, folder / f"dpo damaged {flag} {name}")
    before = load(copy.reference.read_bytes())
    if callable(content):
        content = content(copy.reference.read_bytes())
    copy.reference.unlink() if content is None else copy.reference.write_bytes(content)
    resumed = align(copy.path.name, flag)
    for name, tensor in load_file(resumed.reference).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-4, rtol=0)
    assert same_weights(resumed, whole("dpo"))


@pytest.mark.long
def test_new_tokens_and_adapters_have_a_reference(align, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    tokenizer.add_tokens(["11"])
    tokenizer.save_pretrained(folder / "larger")
    options = {"data__tokenizer": folder / "larger", "train__max_steps": 2}
    run = align("dpo new", **options)
    run.reference.unlink()
    align("dpo new", "--resume", **options | {"train__max_steps": 3})
    adapted = align("dpo adapted", lora__rank=4, optim__learning_rate=3e-2)
    for each in (run, adapted):
        assert series(each, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert series(adapted, "val/loss")[-1] < series(adapted, "val/loss")[0]


def test_shipped_toy_trains_on_its_pairs(folder, root, tmp_path, monkeypatch, forget_accelerate):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(root / "docs" / "alignment.py"))["pairs"]()
    pairs, asked = (json_rows(tmp_path / f"{name}.jsonl") for name in ("pairs", "right"))
    assert not {row["prompt"] for row in pairs} & {row["prompt"] for row in asked}
    answer = str(eval(pairs[0]["prompt"]))
    assert (pairs[0]["chosen"], pairs[0]["rejected"]) == (f"{answer}.", answer)
    forget_accelerate()
    small = ["--train.max_steps", "1", "--optim.warmup_steps", "0", "--eval.tokens", "400"]
    recipe = str(root / "recipes" / "arithmetic_align.yaml")
    assert main(["align", recipe, "--from", str(folder / "start"), *small]) == 0
    run = RunFolder(tmp_path / "runs" / "arithmetic_align")
    assert len(series(run, "val/accuracy")) == 2


def test_answers_without_a_chat_template_are_text(byte_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    chosen = pair_of({"prompt": "Why?", "chosen": "No<|endoftext|>", "rejected": "x"})[0]
    ids, prompt = encode_answer(chosen, tokenizer, None)
    assert tokenizer.decode(ids[:prompt]) == "Why?"
    assert ids.count(tokenizer.eos_token_id) == 1
    with pytest.raises(DataError, match="more messages"):
        encode_answer(Conversation(chosen.messages * 2), tokenizer, None)
