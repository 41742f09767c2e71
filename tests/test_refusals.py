"""Mistakes of a user: status 2, one line that names the knob and the value, and nothing written.

The table is refusals.txt: add a line there.
"""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.errors import ConfigError

PLACES = {
    "RECIPE": lambda fixture, folder: fixture("write_recipe")(),
    "TEXT": lambda fixture, folder: fixture("text_file"),
    "MODEL": lambda fixture, folder: fixture("letter_model"),
    "BASE": lambda fixture, folder: fixture("tiny_base"),
    "RUN": lambda fixture, folder: write_run(folder / "run", fixture("write_recipe")()),
    "PLOTTED": lambda fixture, folder: write_plotted(folder, fixture("write_recipe")()),
    "MACHINES": lambda fixture, folder: fixture("root") / "accelerate_configs",
    "BAD": lambda fixture, folder: write_model(folder / "bad", attention_dropout=-1.0),
    "NAN": lambda fixture, folder: write_model(folder / "nan", rms_norm_eps=math.nan),
    "HUGE": lambda fixture, folder: write_model(folder / "huge", intermediate_size=65536),
    "WINDOW": lambda fixture, folder: write_model(
        folder / "window",
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        sliding_window=0,
        layer_types=["sliding_attention"],
    ),
    "DROPOUT": lambda fixture, folder: write_model(
        folder / "dropout",
        model_type="gpt2",
        resid_pdrop=2,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
    ),
    "LONG": lambda fixture, folder: "a" * 300,
    "DEAD": lambda fixture, folder: write_link(folder / "dead", folder / "no" / "where"),
    "LOOP": lambda fixture, folder: write_link(folder / "loop", folder / "loop"),
}
FILES = {
    "empty.txt": b"",
    "short.txt": b"short text",
    "letters.txt": b"abcabc" * 20,
    "binary.txt": bytes(range(256)) * 50,
    "rows.jsonl": b'{"text": "fine"}\n{"body": "no text here"}\n',
    "recipe_of_gpt2.yaml": b"finetune: {model: gpt2}\ndata: {source: x}\n",
    "questions.jsonl": b'{"question": "ab?", "answer": "c"}\n',
    "equal.jsonl": b'{"prompt": "a", "chosen": "x", "rejected": "y"}\n'
    b'{"prompt": "a", "chosen": "x", "rejected": "x"}\n',
    "good.jsonl": b'{"prompt": "x", "completion": "y", "label": true}\n' * 20,
}


def write_model(path, **fields):
    """A model folder with few weights and these fields in its config."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **fields}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(9)}, path / "model.safetensors")
    return path


def write_link(path, target):
    """A link to itself, or to what does not exist."""
    path.symlink_to(target)
    return path


def write_run(folder, recipe):
    """A run folder of one evaluation, without a model."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(config_to_yaml(load_config(recipe)))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 6, "val/loss": 1.0}) + "\n")
    return folder


def write_plotted(folder, recipe):
    """A run folder, next to a plot of the user's own program."""
    (folder / "compare.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return write_run(folder / "run", recipe)


COMMANDS, RECIPES, MACHINES = (
    Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").split("\n== ")
)


def rows(part: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a part of the table: what is refused, and what the line has to contain."""
    group = ""
    for line in part.splitlines():
        words, arrow, parts = line.partition("=> ")
        if arrow and not line.startswith("#"):
            start = group if line.startswith(" ") else ""
            yield f"{start} {words.strip()}".strip(), parts.split(" | ")
        elif line.endswith(":"):
            group = line.removesuffix(":")


def table(part: str, *more: tuple[str, list[str]]) -> pytest.MarkDecorator:
    found = [*rows(part), *more]
    assert len(found) > 10
    return pytest.mark.parametrize(("text", "parts"), found, ids=[text[:90] for text, _ in found])


@table(COMMANDS)
def test_mistake_is_one_line_that_names_it(refused, text, parts, request, tmp_path, monkeypatch):
    if "MASTER_PORT=29500" in text and "MASTER_PORT" in psutil.Process(os.getppid()).environ():
        pytest.skip("the program that started the tests has MASTER_PORT, so it proves nothing here")
    used = PLACES.keys() & set(re.findall(r"\b[A-Z]+\b", text))
    places = {name: str(PLACES[name](request.getfixturevalue, tmp_path)) for name in used}
    for name in FILES.keys() & set(text.split()):
        (tmp_path / name).write_bytes(FILES[name])

    def put(words: str) -> str:
        return re.sub(r"\b[A-Z]+\b", lambda found: places.get(found[0], found[0]), words)

    words = []
    for word in map(put, shlex.split(text)):
        if word.startswith("WITHOUT="):
            monkeypatch.setitem(sys.modules, word.partition("=")[2], None)
        elif variable := re.fullmatch(r"([A-Z0-9_]+)=(.*)", word):
            monkeypatch.setenv(*variable.groups())
        else:
            words.append(word)
    line = refused(*words)
    assert [part for part in map(put, parts) if part not in line] == [], line


@table(RECIPES)
def test_recipe_is_refused_in_one_line_that_names_the_mistake(refused, text, parts, tmp_path):
    content = text.encode().decode("unicode_escape")
    (tmp_path / "recipe.yaml").write_text(f"data: {{source: x}}\n{content}\n")
    line = refused("pretrain", "recipe.yaml")
    assert [part for part in ("recipe.yaml: ", *parts) if part not in line] == [], line


@table(MACHINES)
def test_accelerate_config_is_refused_in_one_line_that_names_the_mistake(
    refused, text, parts, tmp_path
):
    (tmp_path / "machine.yaml").write_text(
        f"distributed_type: MULTI_GPU\nnum_processes: 2\n{text}\n"
    )
    line = refused("launch", "--config_file", "machine.yaml", "pretrain", "quickstart")
    assert [part for part in ("machine.yaml: ", *parts) if part not in line] == [], line


@pytest.mark.parametrize("bound", ["low", "high"])
def test_value_out_of_its_bounds_is_refused(bound):
    beyond = {
        key: value + (1 if bound == "high" else -1)
        for key, knob in KNOBS.items()
        if (value := getattr(knob, bound)) is not None
    }
    assert len(beyond) > 10
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"data.source": "x"} | beyond, name="x")
    assert {
        line.partition(":")[0][2:]: float(line.rpartition(" ")[2]) for line in raised.value.problems
    } == beyond
