"""The objective of reinforcement learning equals bare PyTorch, and TRL's GRPO if that is
installed.
"""

import dataclasses
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from allocations import peak_allocation
from nanogpt_hf.config.schema import KNOBS, RlSection, kind_options
from nanogpt_hf.evaluation.answers import Answers
from nanogpt_hf.generate import Completions
from nanogpt_hf.methods.policy_loss import (
    LOSSES,
    advantages,
    answer_weights,
    completion_log_probs,
    policy_objective,
)
from nanogpt_hf.methods.rollouts import sequence_batch
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt

PROMPTS = [[3, 4, 5, 6], [7, 8]]  # four completions each
LENGTHS = [5, 1, 3, 2, 4, 5, 2, 1]
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0]
VARIANTS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scaled": {"scale_advantages": True},
    "clipped": {"clip": 0.1, "updates": 2},
    "clipped higher": {"clip": 0.1, "clip_high": 0.3, "updates": 2},
    "cispo": {"clip": 0.1, "updates": 2, "loss": "cispo"},
    "cispo, clipped higher": {"clip": 0.1, "clip_high": 0.3, "updates": 2, "loss": "cispo"},
    "kl": {"kl": 0.3, "clip": 0.2, "updates": 2},
    "gspo": {"clip": 0.1, "updates": 2, "loss": "gspo", "temperature": 0.7},
    "gspo, clipped lower": {"clip": 0.1, "clip_high": 0.02, "updates": 2, "loss": "gspo"},
    "gspo and kl": {"clip": 0.2, "updates": 2, "loss": "gspo", "kl": 0.3},
    "gspo without a clip": {"updates": 2, "loss": "gspo"},
}


def build_model(seed: int) -> GPTForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = GPTForCausalLM(GPTConfig(**sizes, **ends, dropout=0.0))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double().train()


@pytest.fixture(scope="module")
def answers() -> Answers:
    ids = torch.randint(2, 12, (8, 5), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(LENGTHS)
    ids[torch.arange(8), lengths - 1] = 1
    ids[torch.arange(5) >= lengths[:, None]] = 0
    completions = Completions(ids, lengths, torch.ones(8, dtype=torch.bool))
    return Answers(
        [PROMPTS[row // 4] for row in range(8)], completions, torch.tensor(REWARDS), [], 4
    )


def plain_log_probs(model, answers, row, temperature) -> torch.Tensor:
    """Of one completion, without padding."""
    prompt = answers.prompts[row]
    length = LENGTHS[row]
    ids = torch.tensor([prompt + answers.completions.ids[row, :length].tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return F.log_softmax(logits, -1)[torch.arange(length), ids[0, len(prompt) :]]


def highest_clip(rl) -> float:
    return rl.clip if rl.clip_high is None else rl.clip_high


def full_batch(answers, rl, old, reference) -> dict[str, torch.Tensor]:
    """All answers as one batch, with the log-probabilities that the knobs need."""
    batch = sequence_batch(answers, range(8))
    batch["advantages"] = advantages(rl, answers.grouped_rewards.double()).reshape(-1)
    batch |= answer_weights(rl, answers.learned.sum(1))
    models = {
        "old_log_probs": old if rl.updates > 1 else None,
        "reference_log_probs": reference if rl.kl else None,
    }
    for name, model in models.items():
        if model is not None:
            batch[name] = torch.zeros(batch["shift_labels"].shape, dtype=torch.float64)
            with torch.no_grad():
                rows = [plain_log_probs(model, answers, row, rl.temperature) for row in range(8)]
            batch[name][batch["shift_labels"] != -100] = torch.cat(rows)
    return batch


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_and_gradients_equal_bare_pytorch(answers, variant, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 257 * 7)
    rl = RlSection(**VARIANTS[variant])
    model, old, reference = map(build_model, (1, 2, 3))
    loss, metrics = policy_objective(rl)(model, full_batch(answers, rl, old, reference))
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(8):
        group = torch.tensor(REWARDS[row // 4 * 4 : row // 4 * 4 + 4], dtype=torch.float64)
        advantage = REWARDS[row] - group.mean()
        if rl.scale_advantages:
            advantage = advantage / (group.std() + 1e-4)
        log_probs = plain_log_probs(model, answers, row, rl.temperature)
        behavior = (
            plain_log_probs(old, answers, row, rl.temperature) if rl.updates > 1 else log_probs
        )
        log_ratio = log_probs - behavior.detach()
        is_gspo = rl.loss == "gspo"
        ratio = log_ratio.mean().exp() if is_gspo else log_ratio.exp()
        gain = ratio * advantage
        if rl.clip is not None:
            highest = torch.tensor(1 + highest_clip(rl))
            if rl.loss == "cispo":
                gain = torch.minimum(ratio, highest).detach() * advantage * log_probs
            else:
                gain = torch.minimum(gain, ratio.clamp(1 - rl.clip, highest) * advantage)
        # A sum over tokens; of gspo over answers, which is then as large as one over tokens.
        size = sum(LENGTHS) / 8
        expected = expected - (gain * size if is_gspo else gain.sum())
        if rl.kl:
            log_ratio = (
                plain_log_probs(reference, answers, row, rl.temperature).detach() - log_probs
            )
            kl = ratio * (log_ratio.exp() - log_ratio - 1)
            expected = expected + rl.kl * (kl.mean() * size if is_gspo else kl.sum())
    expected.backward()
    # A sum of float32 terms, slice by slice; CPUs round their exponentials differently.
    torch.testing.assert_close(loss.double(), expected, atol=3e-6, rtol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-5)
    assert all(gradient.abs().max() > 0 for name, gradient in ours.items() if "wpe" not in name)
    assert 0 < metrics["entropy"] / sum(LENGTHS) < torch.tensor(257.0).log()
    if rl.clip:
        assert 0 < metrics["clipped"] < sum(LENGTHS)


def test_each_loss_of_a_recipe_is_a_row_and_is_compared_with_bare_pytorch():
    assert set(kind_options(KNOBS["rl.loss"].kind)) == LOSSES.keys()
    assert {RlSection(**knobs).loss for knobs in VARIANTS.values()} == LOSSES.keys()


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_logits_of_a_chunk_alone_are_in_memory(loss, monkeypatch):
    """512 tokens with 20,000 logits each, 41 MB; a chunk has 52 tokens."""
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 2**20)
    config = GPTConfig(vocab_size=20_000, n_positions=64, n_embd=16, n_layer=1, n_head=1)
    model = GPTForCausalLM(config)
    ids = torch.randint(20_000, (8, 64))
    batch = {"input_ids": ids, "shift_labels": ids, "advantages": torch.ones(8)}
    rl = RlSection(loss=loss)
    batch |= answer_weights(rl, torch.full((8,), 64))

    def train():
        loss, metrics = policy_objective(rl)(model, batch)
        assert metrics["entropy"] > 0
        loss.backward()

    logits = ids.numel() * 20_000 * 4
    assert peak_allocation(train) < logits / 2
    assert peak_allocation(lambda: completion_log_probs(model, batch, 1.0)) < logits / 2


def test_log_probs_of_chunks_equal_bare_pytorch(answers, monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 257 * 7)
    model = build_model(1)
    batch = sequence_batch(answers, range(8))
    found = completion_log_probs(model, batch, 0.7)[batch["shift_labels"] != -100]
    expected = [plain_log_probs(model, answers, row, 0.7) for row in range(8)]
    torch.testing.assert_close(found.double(), torch.cat(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_has_no_loss_however_unlikely_its_tokens_are(answers, loss):
    """At a low temperature a token that was not sampled has a log-probability of -1,000."""
    rl = RlSection(temperature=0.01, kl=0.5, updates=2, clip=0.2, loss=loss)
    model = build_model(1)
    with torch.no_grad():
        model.lm_head.weight[0] -= 30 * model.transformer.ln_f.bias
    batch = full_batch(answers, rl, model, model)
    assert (batch["shift_labels"] == -100).any()
    value, metrics = policy_objective(rl)(model, batch)
    value.backward()
    assert value.isfinite()
    # The reference is the model itself.
    assert metrics["kl"].item() == pytest.approx(0, abs=1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl==1.16.0"
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("default")
def test_loss_and_gradients_equal_trl(answers, variant, tmp_path, byte_tokenizer):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    # TRL pads prompts on the left without position ids, which moves learned positions: prompts of
    # one length
    answers = dataclasses.replace(answers, prompts=[[3, 4, 5, 6 + row // 4] for row in range(8)])
    rl = RlSection(**VARIANTS[variant])
    model, old, reference = map(build_model, (1, 2, 3))
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer, pad_token="<|endoftext|>")
    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=5,
        loss_type={"grpo": "dapo", "cispo": "cispo", "gspo": "grpo"}[rl.loss],
        importance_sampling_level="sequence" if rl.loss == "gspo" else "token",
        epsilon_high=1 + highest_clip(rl) if rl.loss == "cispo" else rl.clip_high,
        temperature=rl.temperature,
        beta=0.0,
        epsilon=1e9 if rl.clip is None else rl.clip,
        scale_rewards="group" if rl.scale_advantages else "none",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    rows = [answers.completions.ids[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    outputs = {"prompt_ids": answers.prompts, "completion_ids": rows, "logprobs": None}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: REWARDS,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: outputs,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(
        [{"prompt": "ab"[row // 4]} for row in range(8)]
    )
    for name, source, wanted in (("old", old, rl.updates > 1), ("ref", reference, rl.kl)):
        if wanted:
            values = torch.zeros(8, 5, dtype=torch.float64)
            for row, length in enumerate(LENGTHS):
                values[row, :length] = plain_log_probs(
                    source, answers, row, rl.temperature
                ).detach()
            inputs[f"{name}_per_token_logps"] = values
    trainer.beta = rl.kl
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    ours = policy_objective(rl)(model, full_batch(answers, rl, old, reference))[0] / sum(LENGTHS)
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].to(parameter.grad), atol=1e-5, rtol=1e-5
        )
