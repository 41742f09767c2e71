"""LoRA: saved adapters open with peft on a plain GPT-2, with equal logits."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from decoder_types import VOCAB, accepted_types, tiny
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.method_sections import LORA_TARGETS
from nanogpt_hf.config.schema import FinetuneSection, LoraSection, ModelSection
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.model import GPTConfig
from nanogpt_hf.model.adapter_targets import lora_targets
from nanogpt_hf.model.architecture import GPT2, architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.load import load_model
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
    assert list(lora_targets(GPT2, GPTConfig())) == LORA_TARGETS


@pytest.mark.parametrize("architecture", ["llama4_text", "gemma3n_text", "mamba"])
def test_every_adapter_gets_a_gradient(architecture):
    """llama4_text's router returns more than its product; gemma3n_text reads a layer's weight
    without calling it.
    """
    model = tiny(architecture)
    targets = lora_targets(architecture_of(model), model.config)
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
    lora = LoraSection(rank=3, targets=list(lora_targets(row, base.config)))
    model = base_with_adapters(tmp_path / "base", lora)
    linear = [m for m in row.blocks(base).modules() if isinstance(m, torch.nn.Linear)]
    assert sum(".lora_A" in name for name, _ in model.named_parameters()) == len(linear)
    start = FinetuneSection(model=str(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", model.config, lora, start, model.state_dict())
    with torch.no_grad():
        expected = model(TOKENS).logits
        plain = base.eval()(TOKENS).logits
        assert (expected - plain).abs().max() > 1e-3
        opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert type(opened.base_model.model) is not type(base)
        torch.testing.assert_close(opened(input_ids=TOKENS).logits, expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(
            load_model(str(tmp_path / "adapter")).eval()(TOKENS).logits, expected, atol=2e-6, rtol=0
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A base model of transformers."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def save_with_peft(llama: Path, folder: Path, **options) -> torch.Tensor:
    """Write an adapter as peft does; return the logits of the model with it."""
    base = LlamaForCausalLM.from_pretrained(llama)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"]} | options
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["v_proj"]},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 5}, "use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"target_parameters": ["mlp.down_proj.weight"]},
    ],
    ids=str,
)
def test_whole_adapters_of_peft_open(llama, tmp_path, options):
    expected = save_with_peft(llama, tmp_path, **options)
    with torch.no_grad():
        logits = load_model(str(tmp_path)).eval()(TOKENS).logits
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


def _set(**fields):
    def damage(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def _text(text: str):
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def _tensors(change):
    def damage(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return damage


DAMAGES = {
    "one missing": (_tensors(lambda w: dict(list(w.items())[1:])), "missing keys"),
    "all B missing": (_tensors(lambda w: {k: w[k] for k in w if "_A" in k}), "missing keys"),
    "none": (_tensors(lambda w: {}), "missing keys"),
    "renamed": (_tensors(lambda w: {f"x.{k}": w[k] for k in w}), "missing keys"),
    "one more": (_tensors(lambda w: w | {"zzz": torch.ones(1)}), "unexpected keys: ['zzz']"),
    "shape": (_tensors(lambda w: {k: torch.ones(3, 3) for k in w}), "size mismatch"),
    "whole numbers": (_tensors(lambda w: {k: w[k].int() for k in w}), "is torch.int32"),
    "fewer targets": (_set(target_modules=["q_proj"]), "unexpected keys"),
    "more targets": (_set(target_modules=["q_proj", "v_proj", "k_proj"]), "missing keys"),
    "default targets": (_set(target_modules=None, layers_to_transform=1), "unexpected keys"),
    "no such target": (_set(target_modules=["zz"]), "Target modules {'zz'} not found"),
    "targets 5": (_set(target_modules=[5]), "target_modules [5] is not a name"),
    "fewer layers": (_set(layers_to_transform=[0]), "unexpected keys"),
    "layers x": (_set(layers_to_transform="x"), 'layers_to_transform "x" is not a whole number'),
    "excluded": (_set(exclude_modules=["v_proj"]), "unexpected keys"),
    "DoRA": (_set(use_dora=True), "missing keys"),
    "whole layer": (_set(modules_to_save=["lm_head"]), "missing keys: ['base_model.model.lm_head"),
    "rows of tokens": (_set(trainable_token_indices=[1]), "missing keys"),
    "larger rank": (_set(r=8), "size mismatch"),
    "IA3": (_set(peft_type="IA3"), 'peft_type "IA3" is not "LORA"'),
    "XX": (_set(peft_type="XX"), 'peft_type "XX" is not "LORA"'),
    "no type": (_set(peft_type=None), 'peft_type null is not "LORA"'),
    "r x": (_set(r="x"), 'r "x" is not a whole number from 1'),
    "r true": (_set(r=True), "r true is not a whole number from 1"),
    "alpha NaN": (_set(lora_alpha=float("nan")), "lora_alpha NaN is not a finite number"),
    "alpha large": (_set(lora_alpha=10**400), "is not a finite number"),
    "rank pattern": (_set(rank_pattern={"q_proj": 0}), "is not an object of whole numbers"),
    "alpha pattern": (_set(alpha_pattern=["q_proj"]), "is not an object of finite numbers"),
    "dropout": (_set(lora_dropout="x"), 'lora_dropout "x" is not a number from 0 to 1'),
    "no base": (_set(base_model_name_or_path=None), "base_model_name_or_path null is not"),
    "empty object": (_text("{}"), "adapter_config.json has no peft_type"),
    "list": (_text("[]"), "adapter_config.json is not a JSON object"),
    "no JSON": (_text("{"), "adapter_config.json is not JSON"),
    "no weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "there is no adapter_model.safetensors",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_adapters_are_one_line(llama, tmp_path, name):
    damage, reason = DAMAGES[name]
    save_with_peft(llama, tmp_path)
    damage(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(UserError) as error:
            load_model(str(tmp_path))
    assert not [str(warning.message) for warning in warned if "Found" in str(warning.message)]
    assert str(error.value).startswith(f"{tmp_path}: cannot be loaded as a language model: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [*accepted_types(), "gpt2 without biases"])
def test_adapters_of_every_type_sample_evaluate_and_export(architecture, tmp_path, capsys):
    """A field of a config, such as Falcon's `bias`, may mean something else in another type."""
    if architecture == "gpt2 without biases":
        base = build_model(build_config(ModelSection(**GPT2_SIZES, bias=False), VOCAB), seed=0)
    else:
        base = tiny(architecture)
    row = architecture_of(base)
    hf = char_tokenizer(CHARACTERS).hf
    write_model_folder(tmp_path / "base", base.config, base.state_dict(), hf)
    targets = lora_targets(row, base.config)
    if not targets:
        pytest.skip("no layer can have an adapter")
    section = LoraSection(rank=2, targets=list(targets))
    model = base_with_adapters(tmp_path / "base", section)
    adapter = tmp_path / "adapter"
    start = FinetuneSection(model=str(tmp_path / "base"))
    save_adapter(adapter, model.config, section, start, model.state_dict())
    hf.save_pretrained(adapter)
    with torch.no_grad():
        expected = model(TOKENS).logits
        plain = base.eval()(TOKENS).logits
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
