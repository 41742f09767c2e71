"""On-policy distillation: the divergence equals its definition and TRL's, the objective equals bare
PyTorch, and five steps end with the weights of TRL's DistillationTrainer.
"""

import importlib.util
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanogpt_hf.config.methods import POLICY
from nanogpt_hf.config.schema import Config, DistillSection, RlSection
from nanogpt_hf.evaluation.answers import Answers
from nanogpt_hf.evaluation.loss import pad_batch
from nanogpt_hf.generate import Completions
from nanogpt_hf.methods.distillation import TaughtData, divergence
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.methods.on_policy import (
    is_on_policy,
    taught_policy_objective,
    token_divergence,
)
from nanogpt_hf.methods.policy_loss import advantages, completion_loss
from nanogpt_hf.methods.rollouts import sequence_batch
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.step import take_step

VOCAB = 40
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl==1.16.0"
)


def recipe(rl: dict | None = None, **distill) -> Config:
    return replace(
        Config(),
        rl=RlSection(task="arithmetic", **(rl or {})),
        distill=DistillSection(teacher="x", **distill),
    )


def logits_of(seed: int, rows: int = 7, vocabulary: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergence_and_its_gradient_equal_the_definition(beta, temperature):
    student = logits_of(1).requires_grad_()
    teacher = logits_of(2)
    found = divergence(recipe(beta=beta, temperature=temperature), student, teacher)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    p = (teacher / temperature).softmax(-1)
    q = (student / temperature).softmax(-1)
    m = beta * p + (1 - beta) * q
    if beta in (0, 1):
        expected = (p * (p / q).log() if beta == 0 else q * (q / p).log()).sum(-1)
    else:
        expected = (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    assert (found > 0).all()


def test_default_divergence_is_forward_on_text_and_reverse_on_answers():
    student = logits_of(1)
    teacher = logits_of(2)
    for config, beta in ((recipe(), 1.0), (replace(recipe(), rl=RlSection()), 0.0)):
        explicit = replace(config, distill=replace(config.distill, beta=beta))
        found = divergence(config, student, teacher)
        assert torch.equal(found, divergence(explicit, student, teacher))


@pytest.mark.parametrize("vocabularies", [(VOCAB, VOCAB + 3), (VOCAB + 3, VOCAB)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_padded_vocabularies_are_compared_on_what_both_have(beta, vocabularies):
    student, teacher = (logits_of(n, vocabulary=v) for n, v in enumerate(vocabularies))
    student[:, VOCAB:] = teacher[:, VOCAB:] = -1e4
    config = recipe(beta=beta)
    expected = divergence(config, student[:, :VOCAB], teacher[:, :VOCAB])
    torch.testing.assert_close(divergence(config, student, teacher), expected)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_that_the_teacher_lacks_count_against_the_student(beta):
    """With q alone of the tokens of both, a student would win by giving them no probability."""
    student = logits_of(1, vocabulary=VOCAB + 3).requires_grad_()
    teacher = logits_of(2)
    found = divergence(recipe(beta=beta), student, teacher)
    both = student[:, :VOCAB]
    share = student.softmax(-1)[:, :VOCAB].sum(-1)
    expected = divergence(recipe(beta=beta), both, teacher) - share.log()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert (gradient[:, VOCAB:] > 0).all()
    equal = torch.cat([teacher, torch.full((7, 3), 9.0)], 1)
    assert (divergence(recipe(beta=beta), equal, teacher) > 0.5).all()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.29, 0.5, 2 / 3, 0.7, 1.0])
def test_share_of_on_policy_questions_is_exact(share):
    chosen = [is_on_policy(number, share) for number in range(1000)]
    for count in (1, 7, 100, 1000):
        assert sum(chosen[:count]) == pytest.approx(count * share, abs=1)
    if 0 < share < 1:
        # Spread evenly, so that each step has its share.
        places = [number for number, own in enumerate(chosen) if own]
        gaps = {after - before for before, after in pairwise(places)}
        assert max(gaps) - min(gaps) <= 1
    assert sum(chosen[:100]) == int(round(100 * share, 6))


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def build(seed: int, layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES, vocab_size=VOCAB, num_hidden_layers=layers)
    return architecture_of(config).model_class(config).double()


LENGTHS = [5, 1, 3, 2, 4, 5, 2, 1]


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Two questions with four answers each; the answers to the second one are given."""
    ids = torch.randint(2, VOCAB, (8, 5), generator=torch.Generator().manual_seed(0))
    ended = torch.ones(8, dtype=torch.bool)
    completions = Completions(ids, torch.tensor(LENGTHS), ended)
    prompts = [[3, 4, 5, 6]] * 4 + [[7, 8]] * 4
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    answers = Answers(prompts, completions, rewards, [], 4)
    gains = advantages(RlSection(), answers.grouped_rewards.double()).reshape(-1)
    sampled = torch.tensor([1.0] * 4 + [0.0] * 4)
    return sequence_batch(answers, range(8)) | {"advantages": gains, "sampled": sampled}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_process_with_few_rows_or_none_adds_its_own_divergence(rows):
    """It takes part in the forward pass of the others, with a batch of padding."""
    ids = torch.randint(2, VOCAB, (8, 5), generator=torch.Generator().manual_seed(0))
    completions = Completions(ids, torch.tensor(LENGTHS), torch.ones(8, dtype=torch.bool))
    answers = Answers([[3, 4, 5, 6]] * 8, completions, torch.zeros(8), [], 4)
    config = recipe(weight=1.0)
    model = build(1)
    data = TaughtData(*[None] * 4, teacher=build(2, layers=3))  # pyright: ignore
    batch = pad_batch(sequence_batch(answers, range(rows)), 4)
    assert batch["input_ids"].shape[0] == batch["shift_labels"].shape[0] == 4
    assert rows or batch["shift_labels"].shape[1] == 1
    found, _ = completion_loss(model, batch, token_divergence(config, data, model, batch))
    expected = 0.0
    for row in range(rows):
        alone = sequence_batch(answers, [row])
        divergence_of = token_divergence(config, data, model, alone)
        expected += completion_loss(model, alone, divergence_of)[0].item()
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_objective_and_gradients_equal_bare_pytorch(batch, weight, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", VOCAB * 7)
    config = recipe(weight=weight, beta=1.0, temperature=1.4)
    model = build(1)
    teacher = build(2, layers=3).eval().requires_grad_(False)
    data = TaughtData(*[None] * 4, teacher=teacher)  # pyright: ignore
    loss, metrics = taught_policy_objective(config, data)(model, batch)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    taught = torch.zeros((), dtype=torch.float64)
    start = batch["input_ids"].shape[1] - batch["shift_labels"].shape[1]
    logits, wanted = (m(input_ids=batch["input_ids"]).logits[:, start:] for m in (model, teacher))
    for row, place in (batch["shift_labels"] != -100).nonzero().tolist():
        own = logits[row, place].log_softmax(-1)[batch["shift_labels"][row, place]]
        # Of sampled tokens the gradient of REINFORCE; its value is minus the advantage.
        if batch["sampled"][row]:
            part = -batch["advantages"][row] * (own - own.detach()).exp()
        else:
            part = -own
        q = (logits[row, place] / 1.4).softmax(-1)
        p = (wanted[row, place] / 1.4).softmax(-1)
        kl = (q * (q / p).log()).sum()
        taught = taught + kl
        expected = expected + (1 - weight) * part + weight * 1.4**2 * kl
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(metrics["divergence"].double(), taught, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert all(gradient.abs().max() > 0 for gradient in ours.values())
    assert not any(parameter.grad is not None for parameter in teacher.parameters())


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_loss_and_gradients_equal_trls_gkd(batch, beta, temperature):
    """On sampled and on given answers: GKD has one loss for both."""
    from trl.experimental.gkd import GKDTrainer

    model = build(1)
    teacher = build(2, layers=3).eval().requires_grad_(False)
    config = recipe(weight=1.0, beta=beta, temperature=temperature)
    data = TaughtData(*[None] * 4, teacher=teacher)  # pyright: ignore
    loss = taught_policy_objective(config, data)(model, batch)[0] / sum(LENGTHS)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    start = batch["input_ids"].shape[1] - batch["shift_labels"].shape[1]
    theirs = GKDTrainer.generalized_jsd_loss(
        model(input_ids=batch["input_ids"]).logits[:, start:],
        teacher(input_ids=batch["input_ids"]).logits[:, start:],
        labels=batch["shift_labels"],
        beta=beta,
        temperature=temperature,
    )
    # Our loss has the factor T², as on text.
    theirs = theirs * temperature**2
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-5, rtol=1e-4)


STEPS = 5
RATE = 2e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory, byte_tokenizer):
    """Folders of a student and a teacher with three times its layers, and a file of questions."""
    from nanogpt_hf.data.own_template import chat_template

    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer, pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template(tokenizer)
    for name, seed, layers in (("student", 1, 1), ("teacher", 2, 3)):
        torch.manual_seed(seed)
        config = Qwen3Config(
            **SIZES,
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            # Many ends, so that answers of random weights have different lengths.
            eos_token_id=[tokenizer.eos_token_id, *range(100, 140)],
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"question": f"{number}+1", "answer": f"{number + 1}"} for number in range(1, 200, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_five_steps_equal_trls_distillation_trainer(models, beta, tmp_path, monkeypatch):
    """Losses, gradient norms and weights, on the answers that our run samples."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    monkeypatch.chdir(tmp_path)
    knobs = {
        "finetune.model": str(models / "student"),
        "rl.task": "exact",
        "data.source": str(models / "rows.jsonl"),
        "data.block_size": 48,
        "train.tokens_per_step": 8 * 48,
        "train.micro_batch_size": 8,
        "train.max_steps": STEPS,
        "rl.samples": 2,
        "rl.max_new_tokens": 6,
        "distill.teacher": str(models / "teacher"),
        "distill.weight": 1.0,
        "distill.beta": beta,
        "optim.learning_rate": RATE,
    }
    config, _ = finetune_config(None, knobs, POLICY)
    run = prepare_run(config, tmp_path / "run")
    drawn = []
    ours = []
    for step in range(STEPS):
        result = take_step(run, step, RATE)
        ours.append((result.loss.item(), result.grad_norm.item()))
        drawn.append(run.data.train._answers)
    run.folder.unlock()
    trained = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert len({len(prompt) for prompt in drawn[0].prompts}) > 1
    assert len(set(drawn[0].completions.lengths.tolist())) > 1

    def generate(self, prompts):
        answers = drawn[self.state.global_step]
        ids = answers.completions.ids
        lengths = answers.completions.lengths.tolist()
        rows = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
        return answers.prompts, rows, None, None, None

    monkeypatch.setattr(DistillationTrainer, "_generate", generate)
    losses = []
    compute_loss = DistillationTrainer.compute_loss

    def recorded(self, *arguments, **options):
        loss = compute_loss(self, *arguments, **options)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(DistillationTrainer, "compute_loss", recorded)
    optim = config.optim
    trainer = DistillationTrainer(
        model=Qwen3ForCausalLM.from_pretrained(models / "student"),
        teacher_model=Qwen3ForCausalLM.from_pretrained(models / "teacher"),
        args=DistillationConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=8,
            max_completion_length=6,
            max_steps=STEPS,
            beta=beta,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.max_grad_norm,
            logging_steps=1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(models / "student"),
    )
    trainer.train()
    norms = [event["grad_norm"] for event in trainer.state.log_history if "grad_norm" in event]
    assert [loss for loss, _ in ours] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [norm for _, norm in ours] == pytest.approx(norms, abs=1e-4, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-5, rtol=0)
    start = Qwen3ForCausalLM.from_pretrained(models / "student").state_dict()
    assert max((trained[name] - start[name]).abs().max() for name in trained) > 3 * RATE
