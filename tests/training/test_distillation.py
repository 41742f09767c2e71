"""Distillation: loss and gradients equal plain PyTorch, no logits are whole, runs learn the teacher
and export the student alone, teachers that do not fit are refused.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, LlamaConfig

from assertions import column, file_contents, weights
from nanogpt_hf.config.schema import Config, DistillSection
from nanogpt_hf.methods import distillation
from nanogpt_hf.methods.distillation import TaughtData
from nanogpt_hf.methods.terms import text_objective
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.model.architecture import architecture_of

VOCAB = 40
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = {"max_position_embeddings": 32, "hidden_size": 16, "num_key_value_heads": 1} | SIZES


def build(kind: str, seed: int, vocab_size: int = VOCAB):
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "dropout": 0.0}
        sizes |= {"bos_token_id": None, "eos_token_id": None, "vocab_size": vocab_size}
        return GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.3))
    sizes = LLAMA | {"vocab_size": vocab_size, "initializer_range": 0.3}
    config = LlamaConfig(**sizes)
    if kind == "gemma2":  # caps its logits
        config = Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=2.0)
    return architecture_of(config).model_class(config)


def batch_of(rows: int = 3, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    labels = ids[:, 1:].clone()
    labels[0, 3:7] = labels[2] = -100
    return {"input_ids": ids[:, :-1], "shift_labels": labels}


def objective_of(teacher, **distill):
    teacher.eval().requires_grad_(False)
    data = TaughtData(*[None] * 4, teacher=teacher)  # pyright: ignore
    config = replace(Config(), distill=DistillSection(teacher="x", **distill))
    return text_objective(config, data)


def plain(student, teacher, batch, weight: float, temperature: float):
    """The summed loss and its KL, token by token."""
    logits = student(input_ids=batch["input_ids"]).logits
    with torch.no_grad():
        taught = teacher(input_ids=batch["input_ids"]).logits
    shared = min(logits.shape[-1], taught.shape[-1])
    total = torch.zeros(())
    divergence = torch.zeros(())
    for row, column_ in (batch["shift_labels"] != -100).nonzero().tolist():
        own = logits[row, column_]
        label = batch["shift_labels"][row, column_]
        q = (taught[row, column_, : logits.shape[-1]] / temperature).softmax(-1)
        p = (own / temperature).log_softmax(-1)[:shared]
        kl = (q * (q.log() - p)).sum()
        total = total - (1 - weight) * own.log_softmax(-1)[label] + weight * temperature**2 * kl
        divergence = divergence + kl
    return total, divergence


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize(
    ("student", "teacher", "vocabularies", "weight", "temperature"),
    [
        ("gpt2", "gpt2", (VOCAB, VOCAB), 0.5, 1.0),
        ("gpt2", "llama", (VOCAB, VOCAB + 3), 0.3, 2.5),
        ("llama", "gemma2", (VOCAB + 2, VOCAB), 1.0, 0.7),
        ("gemma2", "gpt2", (VOCAB, VOCAB), 0.8, 4.0),
        ("gpt2", "gpt2", (VOCAB, VOCAB), 0.0, 1.0),
    ],
)
def test_loss_and_gradients_equal_plain_pytorch(
    monkeypatch, chunks, student, teacher, vocabularies, weight, temperature
):
    if chunks:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 7 * VOCAB)
    model = build(student, 1, vocabularies[0])
    taught = build(teacher, 2, vocabularies[1])
    batch = batch_of()
    objective = objective_of(taught, weight=weight, temperature=temperature)
    expected, divergence = plain(model, taught, batch, weight, temperature)
    (expected / 30).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss, metrics = objective(model, batch)
    (loss / 30).backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(metrics["kl"], divergence, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-5)
    assert not any(parameter.grad is not None for parameter in taught.parameters())


def test_evaluation_has_the_cross_entropy_alone():
    model = build("gpt2", 1)
    batch = batch_of()
    with torch.no_grad():
        loss, metrics = objective_of(build("gpt2", 2), weight=1.0)(model, batch)
        expected = model(**batch, num_items_in_batch=1).loss
    assert torch.equal(loss, expected)
    assert metrics == {}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_teacher_is_sharded_as_the_student(kind):
    """Sums over processes: distributed/test_equalities.py. This is one of a fake group of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = build("gpt2", 1)
        taught = build(kind, 2)
        whole = sum(p.numel() for p in architecture_of(taught).blocks(taught).parameters())
        for block in architecture_of(model).blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        objective_of(taught)(model, batch_of())[0].backward()
        blocks = architecture_of(taught).blocks(taught)
        assert sum(p.to_local().numel() for p in blocks.parameters()) <= 0.55 * whole
    finally:
        dist.destroy_process_group()


class Largest(TorchDispatchMode):
    """Records the most values of a result whose last dimension is the vocabulary."""

    values = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        results = function(*arguments, **(options or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,):
                self.values = max(self.values, tensor.numel())
        return results


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_logits_of_neither_model_are_whole(monkeypatch, kind):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 8 * VOCAB)
    model = build(kind, 1)
    objective = objective_of(build(kind, 2))
    batch = batch_of()
    with Largest() as largest:
        objective(model, batch)[0].backward()
    assert largest.values == 16 * VOCAB  # the head, transposed; whole logits have 48 rows


@pytest.fixture
def knobs() -> dict:
    return {"train__max_steps": 6, "checkpoint__every": 2, "checkpoint__keep": 9, "eval__every": 3}


@pytest.fixture
def teacher(tmp_path, tiny_base, text_file):
    """A model folder with the tokenizer of the tiny recipe's data."""
    from nanogpt_hf.data.tokenizer import char_tokenizer

    tokenizer = char_tokenizer(sorted(set(text_file.read_text()))).hf
    config = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(3)
    sizes = config | {"bos_token_id": None, "eos_token_id": None, "vocab_size": len(tokenizer)}
    GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.5)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_run_learns_the_teacher_and_exports_the_student(start, teacher, caplog):
    caplog.set_level("INFO", "nanogpt_hf")
    run = start(distill__teacher=str(teacher), distill__weight=1.0, train__max_steps=30)
    # The loss does not compare with the validation loss, so that its parts have names.
    found = re.search(r"train loss (\S+) \(cross-entropy (\S+), kl (\S+)\), ", caplog.text)
    assert found
    parts = [column(run, f"train/{name}")[1] for name in ("loss", "cross_entropy", "kl")]
    assert [float(number) for number in found.groups()] == pytest.approx(parts, abs=1e-4)
    divergences = column(run, "train/kl")
    assert divergences[30] < 0.7 * divergences[1]
    alone = start("alone")
    assert {name: p.shape for name, p in weights(run).items()} == {
        name: p.shape for name, p in weights(alone).items()
    }


def test_changed_teacher_is_one_line_at_resume(pretrain, teacher):
    options = ("--distill.teacher", teacher)
    run = pretrain(*options).run
    before = file_contents(run.path)
    ended = pretrain(*options, "--distill.weight", "0.4", "--resume")
    assert (ended.status, "distill.weight" in ended.line) == (2, True), ended.err
    tensors = load_file(teacher / "model.safetensors")
    tensors["transformer.wte.weight"][0, 0] += 1
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    ended = pretrain(*options, "--resume")
    assert ended.status == 2
    assert "distill.teacher: its weights changed: sha256:" in ended.line
    assert len(re.findall(r"sha256:[0-9a-f]{8}\b", ended.line)) == 2
    assert file_contents(run.path) == before


CONFIGS = {
    "n_head": (1, True),
    "layer_norm_epsilon": (0.1, True),
    "activation_function": ("relu", True),
    "transformers_version": ("1.0", False),
    "architectures": (["GPT2LMHeadModel"], False),
}


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_changed_config_of_the_teacher_is_one_line_at_resume(pretrain, teacher, flags):
    options = ("--distill.teacher", teacher)
    run = pretrain(*options).run
    before = file_contents(run.path)
    path = teacher / "config.json"
    facts = json.loads(path.read_text())
    for name, (value, decides) in CONFIGS.items():
        path.write_text(json.dumps(facts | {name: value}, indent=7))
        if decides or flags:
            ended = pretrain(*options, "--resume", *flags)
            assert ended.status == (2 if decides else 0), (name, ended.err)
            assert ("distill.teacher: config.json changed: sha256:" in ended.err) == decides
            assert file_contents(run.path) == before


def test_run_that_did_not_record_the_config_of_its_teacher_resumes(pretrain, teacher, monkeypatch):
    options = ("--distill.teacher", teacher)
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "_config_of", lambda name: None)
        pretrain(*options)
    assert pretrain(*options, "--resume", "--train.max_steps", "8").status == 0


def test_teacher_of_another_tokenizer_is_one_line(pretrain, letter_model):
    ended = pretrain("--distill.teacher", letter_model)
    assert ended.status == 2
    assert ended.line.startswith("distill.teacher: ")
    assert "its tokenizer has 11 tokens" in ended.line
