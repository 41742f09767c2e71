"""A GPT that was changed by a reader of the package: with a field of GPTConfig it is saved as its
own type, as soon as GPT-2 cannot represent it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

import nanogpt_hf
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.gpt2 import GPT2Architecture

SIZES = {"vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_TEXT = {"bos_token_id": None, "eos_token_id": None, "dropout": 0.0}
PACKAGE = Path(nanogpt_hf.__file__).parent
# What a reader changes for a norm of queries and keys: file, text there, what takes its place.
QK_NORM = [
    (
        "model/configuration_gpt.py",
        "    bias: bool = True\n",
        "    bias: bool = True\n    qk_norm: bool = False\n",
    ),
    (
        "model/modeling_gpt.py",
        "        # `_init_weights` reads this mark.\n",
        "        self.norms = nn.ModuleList(nn.RMSNorm(self.head_dim) for _ in 'qk')"
        " if config.qk_norm else 2 * [nn.Identity()]\n",
    ),
    (
        "model/modeling_gpt.py",
        "        if (cache := kwargs.pop(CACHE, None)) is not None:\n",
        "        query, key = self.norms[0](query), self.norms[1](key)\n"
        "        if (cache := kwargs.pop(CACHE, None)) is not None:\n",
    ),
]


class ChangedConfig(GPTConfig):
    gain: float | None = None


class Gain(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * self.gain


class ChangedGPT(GPTForCausalLM):
    config_class = ChangedConfig

    def __init__(self, config):
        super().__init__(config)
        if config.gain is not None:
            self.transformer.ln_f = Gain(config.n_embd)
            self.transformer.ln_f.gain = nn.Parameter(torch.tensor(config.gain))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize("padded", [None, 64])
@pytest.mark.parametrize("gain", [None, 1.5])
def test_changed_model_is_saved_as_its_own_type_and_an_unchanged_one_as_gpt2(
    tmp_path, gain, padded
):
    torch.manual_seed(0)
    config = ChangedConfig(**SIZES, **NO_TEXT, gain=gain, padded_vocab_size=padded)
    model = ChangedGPT(config)
    architecture = GPT2Architecture(ChangedConfig)
    architecture.model_class = ChangedGPT
    assert architecture.is_standard(config) == (gain is None)
    architecture.write_model(tmp_path, config, model.state_dict())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["vocab_size"]) == ("nanogpt_hf" if gain else "gpt2", 61)
    assert raw.get("gain") == gain
    opened = ChangedGPT.from_pretrained(tmp_path)
    assert torch.equal(logits(opened), logits(model))
    if gain is None:
        plain = GPT2LMHeadModel.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)
    else:
        assert opened.transformer.ln_f.gain.item() == gain
    # By itself, too, which keeps the padded rows of its own type.
    model.save_pretrained(tmp_path / "own")
    assert torch.equal(logits(ChangedGPT.from_pretrained(tmp_path / "own")), logits(model))


def test_parameter_without_a_field_of_the_config_is_refused_before_training(monkeypatch):
    class Forgotten(GPTForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.transformer.gain = nn.Parameter(torch.ones(()))

    architecture = GPT2Architecture(GPTConfig)
    architecture.model_class = Forgotten
    with pytest.raises(ValueError, match=r"GPT-2 has no transformer\.gain; .* field of GPTConfig"):
        architecture.on_meta(GPTConfig(**SIZES))


@pytest.mark.long
@pytest.mark.slow
def test_a_field_and_its_use_are_a_model_that_trains_resumes_samples_and_is_described(
    tmp_path, write_recipe
):
    """Two edits of a copy of the package, as CONTRIBUTING.md has them."""
    copy = tmp_path / "changed" / "nanogpt_hf"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "recipes", copy.parent / "recipes")
    for name, old, new in QK_NORM:
        text = (copy / name).read_text()
        assert text.count(old) == 1, f"{name} has changed; change this test"
        (copy / name).write_text(text.replace(old, new))

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nanogpt_hf", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(copy.parent)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    recipe = write_recipe(model__extra={"qk_norm": True}, train__max_steps=4, eval__every=2)
    trained = run("pretrain", recipe, "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert "each opens with transformers after `import nanogpt_hf.model`" in trained.stdout
    best = tmp_path / "run" / "best"
    assert "import nanogpt_hf.model\nfrom" in (best / "README.md").read_text()
    assert json.loads((best / "config.json").read_text())["qk_norm"] is True
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 500)
    finetune = ("finetune", "--from", "run", "--data", "text.txt", "--train.max_steps", 1)
    for command in (
        ("resume", "run", "--train.max_steps", 6),
        ("sample", "run", "--prompt", "T", "--max-new-tokens", 4),
        finetune,
        (*finetune, "--lora", 2, "--run-dir", "lora"),
        ("sample", "lora", "--prompt", "T", "--max-new-tokens", 4),
        ("export", "run", "out"),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    refused = run("export", "run", "gguf", "--format", "gguf")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "nanogpt_hf is not supported" in refused.stderr
    wrong = run("pretrain", recipe, "--run-dir", "wrong", "--model.extra.qk_norm", "3")
    assert (wrong.returncode, "qk_norm expected" in wrong.stderr) == (2, True), wrong.stderr
