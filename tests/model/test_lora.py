"""LoRA: saved adapters open with peft on a plain GPT-2, with equal logits."""

import json
from pathlib import Path

import pytest
import torch
from decoder_types import VOCAB, accepted_types, tiny
from peft import AutoPeftModelForCausalLM

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import LORA_TARGETS, FinetuneSection, LoraSection, ModelSection
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.model import GPTConfig
from nanogpt_hf.model.architecture import GPT2, architecture_of
from nanogpt_hf.model.build import build_config, build_model, load_model
from nanogpt_hf.model.lora import add_adapters, merged_weights, save_adapter


def base_with_adapters(base: Path, section: LoraSection):
    """The base with adapters whose B is not zero."""
    model = load_model(str(base)).eval()
    add_adapters(model, section, seed=1)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
    return model


SECTIONS = {
    "all": LoraSection(rank=3),
    "q and v": LoraSection(rank=2, alpha=5.0, targets=["q_proj", "v_proj"]),
    "k alone": LoraSection(rank=4, alpha=3.0, targets=["k_proj"]),
    "outputs": LoraSection(rank=2, targets=["o_proj", "proj"]),
    "mlp": LoraSection(rank=1, alpha=1.0, targets=["fc"]),
}
TOKENS = torch.arange(24)[None] % 20
CHARACTERS = ["\n", *map(chr, range(ord("A"), ord("A") + VOCAB - 1))]
GPT2_SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}


@pytest.mark.parametrize("name", SECTIONS)
def test_merged_weights_have_equal_logits(tiny_base, tmp_path, name):
    section = SECTIONS[name]
    model = base_with_adapters(tiny_base, section)
    expected = model(input_ids=TOKENS).logits
    merged = load_model(str(tiny_base)).eval()
    assert (expected - merged(input_ids=TOKENS).logits).abs().max() > 1e-4
    merged.load_state_dict(merged_weights(model.state_dict(), section))
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, atol=2e-6, rtol=0)
    save_adapter(
        tmp_path / "adapter",
        model.config,
        section,
        FinetuneSection(model=str(tiny_base)),
        model.state_dict(),
    )
    opened = load_model(str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(opened(input_ids=TOKENS).logits, expected, atol=2e-6, rtol=0)


def test_adapter_folder_names_base_and_revision(tiny_base, tmp_path):
    section = SECTIONS["all"]
    start = FinetuneSection(model="someone/gpt2", revision="abc")
    model = base_with_adapters(tiny_base, section)
    save_adapter(tmp_path, model.config, section, start, model.state_dict())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/gpt2", "abc")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6, "LORA")


def test_every_linear_layer_of_gpt2_is_a_target():
    assert list(GPT2.lora_targets(GPTConfig())) == LORA_TARGETS


@pytest.mark.parametrize("architecture", ["llama4_text", "gemma3n_text", "mamba"])
def test_every_adapter_gets_a_gradient(architecture):
    """llama4_text's router returns more than its product; gemma3n_text reads a layer's weight
    without calling it.
    """
    model = tiny(architecture)
    targets = architecture_of(model).lora_targets(model.config)
    add_adapters(model, LoraSection(rank=2, targets=list(targets)), 0)
    batch = {"input_ids": TOKENS, "shift_labels": TOKENS, "num_items_in_batch": 1}
    model(**batch, use_cache=False).loss.backward()
    adapters = [p.grad for name, p in model.named_parameters() if ".lora_B." in name]
    assert adapters
    assert all(grad.any() for grad in adapters)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("architecture", ["qwen3", "nanochat"])
def test_adapters_of_decoders_open_with_peft(architecture, tmp_path):
    section = ModelSection(
        architecture=architecture, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_positions=24
    )
    base = build_model(build_config(section, 20), seed=0)
    row = architecture_of(base)
    row.write_model(tmp_path / "base", base.config, base.state_dict())
    lora = LoraSection(rank=3, targets=list(row.lora_targets(base.config)))
    model = base_with_adapters(tmp_path / "base", lora)
    linear = [m for m in row.blocks(base).modules() if isinstance(m, torch.nn.Linear)]
    assert sum(".lora_A" in name for name, _ in model.named_parameters()) == len(linear)
    start = FinetuneSection(model=str(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", model.config, lora, start, model.state_dict())
    with torch.no_grad():
        expected, plain = model(TOKENS).logits, base.eval()(TOKENS).logits
        assert (expected - plain).abs().max() > 1e-3
        opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert type(opened.base_model.model) is not type(base)
        torch.testing.assert_close(opened(input_ids=TOKENS).logits, expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(
            load_model(str(tmp_path / "adapter")).eval()(TOKENS).logits, expected, atol=2e-6, rtol=0
        )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [*accepted_types(), "gpt2 without biases"])
def test_adapters_of_every_type_sample_evaluate_and_export(architecture, tmp_path, capsys):
    """A field of a config, such as Falcon's `bias`, may mean something else in another type."""
    if architecture == "gpt2 without biases":
        base = build_model(build_config(ModelSection(**GPT2_SIZES, bias=False), VOCAB), seed=0)
    else:
        base = tiny(architecture)
    row, hf = architecture_of(base), char_tokenizer(CHARACTERS).hf
    write_model_folder(tmp_path / "base", base.config, base.state_dict(), hf)
    targets = row.lora_targets(base.config)
    if not targets:
        pytest.skip("no layer can have an adapter")
    section = LoraSection(rank=2, targets=list(targets))
    model = base_with_adapters(tmp_path / "base", section)
    adapter = tmp_path / "adapter"
    start = FinetuneSection(model=str(tmp_path / "base"))
    save_adapter(adapter, model.config, section, start, model.state_dict())
    hf.save_pretrained(adapter)
    with torch.no_grad():
        expected, plain = model(TOKENS).logits, base.eval()(TOKENS).logits
        assert (expected - plain).abs().max() > 1e-4
        opened = load_model(str(adapter)).eval()
        torch.testing.assert_close(opened(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    (tmp_path / "text.txt").write_text("".join(CHARACTERS[1:]))
    for command in (
        argv("sample {} --prompt a --max-new-tokens 2", adapter),
        argv("evaluate {} --data {} --block-size 16", adapter, tmp_path / "text.txt"),
        argv("export {} {}", adapter, tmp_path / "out"),
    ):
        assert main(command) == 0, capsys.readouterr().err
    exported = load_model(str(tmp_path / "out")).eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
