"""A GPT that was changed by a reader of the package: with a field of GPTConfig it is saved as its
own type, as soon as GPT-2 cannot represent it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

import nanogpt_hf
from arguments import argv
from assertions import series
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


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the package with the edits of QK_NORM, as CONTRIBUTING.md has them."""
    copy = tmp_path_factory.mktemp("changed") / "nanogpt_hf"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "recipes", copy.parent / "recipes")
    for name, old, new in QK_NORM:
        text = (copy / name).read_text()
        assert text.count(old) == 1, f"{name} has changed; change this test"
        (copy / name).write_text(text.replace(old, new))
    return copy


@pytest.fixture(scope="module")
def launch_changed(copy, start_warm):
    """`launch_warm` of the copy."""
    with start_warm(PYTHONPATH=str(copy.parent)) as launch:
        yield launch


# Layout, and the variables of its launch.
LAYOUTS = {
    "cpu_ddp": {},
    "fsdp2": {},
    "pp": {"PARALLELISM_CONFIG_PP_SIZE": "2"},
    "cp_fsdp2": {},
}


@pytest.mark.long
@pytest.mark.slow
def test_changed_model_trains_on_each_layout_as_on_one_process_or_is_refused(
    tmp_path, write_recipe, launch_changed
):
    recipe = write_recipe(
        model__extra={"qk_norm": True},
        train__max_steps=3,
        train__tokens_per_step=256,
        train__micro_batch_size=2,
        tracking__every=1,
    )

    def losses(layout: str, **variables: str) -> list[float]:
        run = launch_changed(
            layout, "pretrain", recipe, "--run-dir", str(tmp_path / layout), **variables
        )
        saved = json.loads((run.final / "config.json").read_text())
        assert (saved["model_type"], saved["qk_norm"]) == ("nanogpt_hf", True)
        return series(run, "train/loss")

    one = losses("cpu")
    assert len(one) == 3
    for layout, variables in LAYOUTS.items():
        assert losses(layout, **variables) == pytest.approx(one, abs=1e-5), layout

    def refused(status: int, output: str) -> None:
        assert status == 2
        assert "no plan that splits gpt2's attn.norms.0" in output
        assert "use accelerate_configs/fsdp2.yaml" in output
        assert "Traceback" not in output

    # The norms have no line in the plan of GPTConfig.
    launch_changed("tp", "pretrain", recipe, "--run-dir", str(tmp_path / "tp"), ends_with=refused)
    assert not (tmp_path / "tp").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_field_and_its_use_are_a_model_that_trains_resumes_samples_and_is_described(
    tmp_path, write_recipe, launch_changed
):
    """Each command in a fork of a process that has imported the copy."""
    folder = {name: tmp_path / name for name in ("run", "tuned", "lora", "aligned", "rewarded")}

    def run(line: str, *places: object, fails: bool = False) -> str:
        output = ""

        def ended(status: int, text: str) -> None:
            nonlocal output
            assert status == (2 if fails else 0), text
            output = text

        launch_changed("cpu", *argv(line, *places), ends_with=ended)
        return output

    recipe = write_recipe(model__extra={"qk_norm": True}, train__max_steps=4, eval__every=2)
    trained = run("pretrain {} --run-dir {}", recipe, folder["run"])
    assert "each opens with transformers after `import nanogpt_hf.model`" in trained
    best = folder["run"] / "best"
    assert "import nanogpt_hf.model\nfrom" in (best / "README.md").read_text()
    assert json.loads((best / "config.json").read_text())["qk_norm"] is True
    text, pairs, rows = (tmp_path / name for name in ("text.txt", "pairs.jsonl", "rows.jsonl"))
    text.write_text("The cat sat on the mat. " * 500)
    pair = {"prompt": "The cat", "chosen": " sat", "rejected": " mat"}
    pairs.write_text(f"{json.dumps(pair)}\n" * 20)
    row = {"question": "The cat", "answer": " sat"}
    rows.write_text(f"{json.dumps(row)}\n" * 20)
    run("resume {} --train.max_steps 6", folder["run"])
    run("sample {} --prompt T --max-new-tokens 4", folder["run"])
    start = f"--from {folder['run']} --train.max_steps 1 --run-dir"
    run(f"finetune --data {{}} {start} {{}}", text, folder["tuned"])
    run(f"finetune --data {{}} {start} {{}} --lora 2", text, folder["lora"])
    run("sample {} --prompt T --max-new-tokens 4", folder["lora"])
    run("sample {} --step 1 --prompt T --max-new-tokens 4", folder["lora"])
    short = "--train.tokens_per_step 256 --train.micro_batch_size 2"
    run(f"align --data {{}} {start} {{}} {short}", pairs, folder["aligned"])
    rewards = "--task exact --rl.max_new_tokens 4 --rl.samples 2"
    rewards += " --rl.updates 2 --rl.clip 0.1 --rl.loss gspo"
    run(f"rl --data {{}} {start} {{}} {rewards} {short}", rows, folder["rewarded"])
    run("export {} {}", folder["run"], tmp_path / "out")
    refused = run("export {} {} --format gguf", folder["run"], tmp_path / "gguf", fails=True)
    assert refused.count("\n") == 1
    assert "nanogpt_hf is not supported" in refused
    wrong = tmp_path / "wrong"
    refused = run("pretrain {} --run-dir {} --model.extra.qk_norm 3", recipe, wrong, fails=True)
    assert "qk_norm expected" in refused
    assert not wrong.exists()
