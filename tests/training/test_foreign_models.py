"""Fine-tune a model that plain transformers trained, and go back to plain transformers."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import processors

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import train_bpe_tokenizer
from nanogpt_hf.model.load import load_model

START = "<|begin|>"
END = "<|endoftext|>"
TURN = "<|eot|>"
pytestmark = pytest.mark.long
TEMPLATE = (
    "{{- bos_token }}{% for m in messages %}"
    "{{- '[' + m['role'] + ']\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '[assistant]\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    """A folder with a Llama in bfloat16, tokenizer included, that a loop of a few lines trained."""
    folder = tmp_path_factory.mktemp("llama")
    hf = train_bpe_tokenizer([text_file.read_text()], 280, "gpt4").hf
    hf.add_special_tokens({"bos_token": START, "additional_special_tokens": [TURN]})
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, hf.convert_tokens_to_ids(START))]
    )
    hf.chat_template = TEMPLATE
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 2048}
    sizes |= {"vocab_size": len(hf), "pad_token_id": None}
    config = transformers.LlamaConfig(
        **sizes, bos_token_id=hf.bos_token_id, eos_token_id=hf.eos_token_id
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [hf.eos_token_id, 5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor(hf(text_file.read_text())["input_ids"][:2048]).view(-1, 32)
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder)
    hf.save_pretrained(folder)
    return folder


@pytest.fixture
def finetune(base, text_file, tmp_path, monkeypatch, forget_accelerate):
    monkeypatch.chdir(tmp_path)

    def finetune(*options: str, data=text_file, status: int = 0):
        forget_accelerate()
        start = "finetune --from {} --data {} --run-dir run --data.block_size 32 --eval.every 4 "
        start += "--train.tokens_per_step 128 --train.max_steps 4 --train.micro_batch_size 2 "
        start += "--eval.tokens 128 --optim.learning_rate 0.01"
        assert main([*argv(start, base, data), *options]) == status
        return tmp_path / "run" / "final"

    return finetune


def test_finetune_continues_a_llama_of_transformers_and_saves_one(base, finetune, text_file):
    final = finetune()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, final))
    assert after == before | {"dtype": "float32", "eos_token_id": [before["eos_token_id"], 5]}
    weights, trained = (load_file(folder / "model.safetensors") for folder in (base, final))
    assert weights.keys() == trained.keys()
    assert all(0 < (trained[name] - weights[name]).abs().max() < 0.1 for name in weights)
    opened = transformers.AutoTokenizer.from_pretrained(final)
    ids = opened(text_file.read_text()[:200], return_tensors="pt")["input_ids"]
    assert ids[0, 0] == opened.bos_token_id
    models = {
        f: transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)
        for f in (base, final)
    }
    loss = {folder: model(ids, labels=ids).loss for folder, model in models.items()}
    assert loss[final] < loss[base]


def test_documents_of_a_finetuning_run_start_with_the_tokenizers_start_token(
    base, finetune, text_file, tmp_path
):
    import datasets

    finetune()
    opened = transformers.AutoTokenizer.from_pretrained(base)
    (folder,) = (path.parent for path in tmp_path.glob("data/*/train"))
    (ids,) = datasets.load_from_disk(str(folder / "train"))["input_ids"]
    assert ids == opened(opened.decode(ids, skip_special_tokens=True))["input_ids"]
    assert (
        json.loads((folder / "manifest.json").read_text())["start_of_text_id"]
        == opened.bos_token_id
    )


def test_chat_finetuning_keeps_the_template_and_records_the_end_of_a_turn(
    base, finetune, chat_file, capsys, monkeypatch
):
    final = finetune("--data.format", "chat", "--data.block_size", "64", data=chat_file)
    opened = transformers.AutoTokenizer.from_pretrained(final)
    assert opened.chat_template == TEMPLATE
    ends = [opened.eos_token_id, 5, opened.convert_tokens_to_ids(TURN)]
    assert json.loads((final / "generation_config.json").read_text())["eos_token_id"] == ends


# do_sample false makes transformers refuse to save the temperature
GENERATION = {
    "bos_token_id": 1,
    "do_sample": False,
    "eos_token_id": [7, 5],
    "field_of_a_server": {"a": [1, None]},
    "max_length": 40,
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("", ["best", "final"]),
        ("--lora 2", ["best", "final"]),
        ("--lora 2 --lora.merge true", ["best", "final", "best/adapter", "final/adapter"]),
    ],
)
def test_generation_config_keeps_all_fields(
    base, finetune, chat_file, tmp_path, monkeypatch, options, places
):
    start = shutil.copytree(base, tmp_path / "start")
    (start / "generation_config.json").write_text(json.dumps(GENERATION))
    umask = os.umask(0o027)
    try:
        chat = argv("--data.format chat --data.block_size 64")
        finetune("--from", str(start), *chat, *argv(options), data=chat_file)
        assert main(argv("export run out")) == 0
    finally:
        os.umask(umask)
    hf = transformers.AutoTokenizer.from_pretrained(base)
    ends = {*GENERATION["eos_token_id"], hf.eos_token_id, hf.convert_tokens_to_ids(TURN)}
    for folder in (*(tmp_path / "run" / place for place in places), tmp_path / "out"):
        found = json.loads((folder / "generation_config.json").read_text())
        assert set(found.pop("eos_token_id")) == ends
        del found["transformers_version"]
        assert found == {name: GENERATION[name] for name in GENERATION if name != "eos_token_id"}
        assert {path.stat().st_mode & 0o777 for path in folder.glob("*.*")} == {0o640}


def test_new_tokens_get_the_mean_of_the_others_and_are_trained(base, finetune, tmp_path, capsys):
    hf = transformers.AutoTokenizer.from_pretrained(base)
    before = len(hf)
    hf.add_special_tokens({"additional_special_tokens": [f"<|tool{n}|>" for n in range(3)]})
    hf.save_pretrained(tmp_path / "more")
    more = ["--data.tokenizer", str(tmp_path / "more")]
    final = finetune(*more, "--optim.learning_rate", "0", "--optim.min_learning_rate", "0")
    weights, trained = (load_file(folder / "model.safetensors") for folder in (base, final))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name].float()
        torch.testing.assert_close(trained[name], torch.cat([old, old.mean(0).expand(3, -1)]))
    assert json.loads((final / "config.json").read_text())["vocab_size"] == before + 3
    finetune(*more, "--lora", "2", "--overwrite", status=2)
    error = capsys.readouterr().err
    assert all(word in error for word in ("lora.rank 2", str(tmp_path / "more"), "3 new tokens"))


@pytest.mark.one_row_per
@pytest.mark.parametrize(("kind", "added"), [("llama", 2), ("llama", 6), ("gptj", 6), ("qwen2", 6)])
def test_new_tokens_in_rows_that_pad_the_vocabulary(
    base, finetune, tmp_path, text_file, kind, added
):
    """Four rows have no token: new ones lie in them, and beyond; some heads have biases."""
    hf = transformers.AutoTokenizer.from_pretrained(base)
    count = len(hf)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48}
    sizes |= {"vocab_size": count + 4, "bos_token_id": None, "eos_token_id": None}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": kind == "qwen2"}
    if kind == "gptj":
        sizes["rotary_dim"] = 8
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **sizes)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "padded")
    hf.save_pretrained(tmp_path / "padded")
    hf.add_special_tokens({"additional_special_tokens": [f"<|tool{n}|>" for n in range(added)]})
    hf.save_pretrained(tmp_path / "more")
    still = "--optim.learning_rate 0 --optim.min_learning_rate 0 --data.tokenizer"
    final = finetune("--from", str(tmp_path / "padded"), *argv(still), str(tmp_path / "more"))
    opened = load_model(str(final))
    for layer, trained in (
        (model.get_input_embeddings(), opened.get_input_embeddings()),
        (model.get_output_embeddings(), opened.get_output_embeddings()),
    ):
        parameters = dict(trained.named_parameters())
        for name, old in layer.named_parameters():
            new = parameters[name].detach()
            assert len(new) == max(count + 4, count + added)
            torch.testing.assert_close(new[:count], old[:count])
            mean = old[:count].mean(0)
            torch.testing.assert_close(
                new[count : count + added], mean.expand_as(new[count : count + added])
            )
            torch.testing.assert_close(new[count + added :], old[count + added :])


def test_a_tokenizer_with_other_ids_is_refused(base, finetune, byte_tokenizer, capsys):
    finetune("--data.tokenizer", str(byte_tokenizer), status=2)
    assert (
        f"{byte_tokenizer} is not the tokenizer of {base}, whose tokens the model has learned"
        in capsys.readouterr().err
    )


def test_default_block_is_not_as_long_as_all_rotary_positions(base, finetune, text_file, capsys):
    assert main(["finetune", "--from", str(base), "--data", str(text_file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "block_size: 1024" in out
    assert "n_positions: 2048" in out
    finetune("--model.n_positions", "512", status=2)
    assert "model.n_positions" in capsys.readouterr().err
