"""Shipped recipes and accelerate configs: they load, state only differences, and train two
steps.
"""

import dataclasses
from pathlib import Path

import datasets
import pytest

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.build import build_config
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# gpt2_124m with other sizes, which the test shrinks
LARGER = ("gpt2_350m", "gpt2_774m", "gpt2_1558m")
FROM_SCRATCH = [
    path
    for path in RECIPES
    if not path.stem.startswith("finetune_") and not path.stem.endswith(("_rl", "_align"))
]
TRAINED = [path for path in FROM_SCRATCH if path.stem not in LARGER]
MACHINES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))

# The same experiment, small enough for a test: sizes change, GPT-2's vocabulary becomes bytes, a
# source that would be downloaded is replaced, and nothing is sent to a tracker.
SHRINK = (
    "--model.n_layer 2 --model.n_head 2 --model.n_embd 16 --model.n_positions 32 "
    "--model.n_kv_head null --model.n_inner null --data.block_size 32 "
    "--data.validation_fraction 0.1 --optim.warmup_steps 1 --train.max_steps 2 "
    "--train.tokens_per_step 128 --train.micro_batch_size 2 --eval.tokens 256 "
    "--tracking.every 1 --tracking.trackers []"
)


def rows_of_hub_set(name, config=None, *, split, revision, streaming, trust_remote_code):
    """Twenty rows with the columns of the Hub data set."""
    numbers = range(20)
    exchange = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, how can I help?"},
    ]
    rows = {
        ("HuggingFaceTB/smol-smoltalk", None, "train"): {
            "messages": [exchange * (number % 2 + 1) for number in numbers],
            "source": ["everyday-conversations"] * 20,
        },
        ("openai/gsm8k", "main", "train"): {
            "question": [f"What is {number} + 1?" for number in numbers],
            "answer": [f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}" for n in numbers],
        },
    }
    for part in ("auxiliary_train", "validation"):
        rows["cais/mmlu", "all", part] = {
            "question": [f"Which is {number % 4}?" for number in numbers],
            "subject": [""] * 20,
            "choices": [["0", "1", "2", "3"]] * 20,
            "answer": [number % 4 for number in numbers],
        }
    answer = (
        {"answer": datasets.ClassLabel(names=["A", "B", "C", "D"])} if name == "cais/mmlu" else {}
    )
    made = datasets.Dataset.from_dict(rows[name, config, split])
    return made.cast(datasets.Features(made.features | answer))


@pytest.mark.long
@pytest.mark.one_row_per(recipe=lambda path: path.stem.partition("_")[0])
@pytest.mark.parametrize("recipe", TRAINED, ids=lambda path: path.stem)
def test_recipe_trains_two_steps(
    recipe, tmp_path, text_file, chat_file, byte_tokenizer, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = [*argv("pretrain {}", recipe), *argv(SHRINK)]
    data = load_config(recipe).data
    if isinstance(data.source, list):
        monkeypatch.setattr(datasets, "load_dataset", rows_of_hub_set)
    elif data.source != "python-docs":
        source = chat_file if data.format == "chat" else text_file
        command += argv("--data.source {} --data.sha256 null", source)
    if data.max_tokens:  # the text is one document, of which no part is held out under a limit
        command += ["--data.max_tokens", "null"]
    if data.tokenizer == "bpe":
        command += ["--data.vocab_size", "260"]
    elif data.tokenizer == "gpt2":
        command += argv("--data.tokenizer {}", byte_tokenizer)
    if data.format == "chat":
        command += argv("--model.n_positions 256 --data.block_size 256 --eval.tokens 768")
        command += ["--train.tokens_per_step", "512"]
    assert main(command) == 0
    run = RunFolder(tmp_path / "runs" / recipe.stem)
    assert [event["step"] for event in read_metrics(run) if "train/loss" in event] == [1, 2]
    assert (run.final / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "with_biases"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_350m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1558m", 1_557_611_200),
    ],
)
def test_gpt2_recipes_have_gpt2_shapes_and_nanogpt_tokens(name, with_biases):
    config = load_config(ROOT / "recipes" / f"{name}.yaml")
    model = build_config(dataclasses.replace(config.model, bias=True), 50257)
    assert count_parameters(model) == with_biases
    assert model.padded_vocab_size == 50304
    assert config.train.tokens_per_step == 12 * 1024 * 5 * 8


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
def test_accelerate_config_loads_and_states_its_use(machine):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(machine))
    assert config.num_processes >= 1
    assert machine.read_text().startswith("# ")
