"""The `finetune` command: without a recipe, with one, and mistakes that write nothing."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from arguments import argv
from assertions import column
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.finetuning import check_tokenizer, finetune_config
from nanogpt_hf.model.build import start_model
from nanogpt_hf.model.load import load_model
from nanogpt_hf.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
SHORT = (
    "--optim.learning_rate 1e-2 --optim.min_learning_rate 1e-3 --train.max_steps 12 "
    "--train.tokens_per_step 256 --eval.every 4 --eval.tokens 512 --checkpoint.every 4 "
    "--tracking.every 1"
)


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    shutil.copy(text_file, "my.txt")
    return tmp_path


@pytest.fixture
def run(tiny_base, tmp_path, forget_accelerate):
    """Fine-tune the tiny base on my.txt with these options; return the run folder."""

    def run(options: str = "", name: str = "run") -> RunFolder:
        forget_accelerate()
        command = f"finetune --from {{}} --data my.txt --run-dir {{}} {SHORT} {options}"
        assert main(argv(command, tiny_base, name)) == 0
        return RunFolder(tmp_path / name)

    return run


@pytest.mark.long
def test_finetune_defaults_without_a_recipe(tiny_base, tmp_path, capsys):
    command = (
        "finetune --from {} --data my.txt --freeze-layers 2 --train.max_steps 10 --eval.every 5 "
        "--eval.samples '[The cat]' --eval.sample_tokens 12"
    )
    assert main(argv(command, tiny_base)) == 0
    run = RunFolder(tmp_path / "runs" / "tiny-gpt2-my")
    config = load_config(run.recipe)
    assert (config.optim.learning_rate, config.optim.min_learning_rate) == (6e-5, 6e-6)
    assert (config.optim.warmup_steps, config.model.dropout, config.eval.patience) == (1, 0.1, 4)
    assert (config.model.n_layer, config.model.n_positions, config.data.block_size) == (4, 32, 32)
    assert config.train.tokens_per_step == 32 * 32
    assert config.data.dir == "data/my-tiny-gpt2"
    printed = capsys.readouterr().out
    trained = (
        sum(p.numel() for p in load_model(str(run.best)).transformer.h[2:].parameters()) + 2 * 16
    )
    assert f"trains {trained:,} of " in printed

    # the run folder's recipe gives the same run
    assert main(argv("finetune {} --run-dir repeated", run.recipe)) == 0
    repeated = RunFolder(tmp_path / "repeated")
    first, second = (folder.final / "model.safetensors" for folder in (run, repeated))
    assert first.read_bytes() == second.read_bytes()
    assert list(column(run, "samples")) == [0, 5, 10]
    assert column(run, "samples") == column(repeated, "samples")


@pytest.mark.parametrize(("words", "length"), [("", 16), ("--data.block_size 24", 12)])
def test_answers_leave_half_of_a_short_block_to_the_question(tiny_base, capsys, words, length):
    """With 256 tokens, the default for long blocks, no run without a recipe could start."""
    command = f"rl --from {{}} --task arithmetic {words} --dry-run"
    assert main(argv(command, tiny_base)) == 0
    assert f"  max_new_tokens: {length}\n" in capsys.readouterr().out


@pytest.mark.long
def test_finetune_from_run_folder_keeps_architecture(run, tmp_path, make_recipe, forget_accelerate):
    recipe = make_recipe(tmp_path / "first.yaml", model__dropout=0.0)
    assert main(["pretrain", str(recipe)]) == 0
    forget_accelerate()
    command = f"finetune --from runs/first --data my.txt {SHORT} --train.max_steps 2"
    assert main(argv(command)) == 0
    second = RunFolder(tmp_path / "runs" / "first-my")
    config = load_config(second.recipe)
    assert config.finetune.model == "runs/first/best"
    assert config.model.bias is False
    model = load_model(str(second.final))
    assert model.config.bias is False
    assert len(AutoTokenizer.from_pretrained(second.final)) == model.config.vocab_size


@pytest.mark.long
def test_patience_stops_the_run(run, capsys):
    early = run(
        "--optim.learning_rate 3 --optim.min_learning_rate 3 --eval.every 1 --eval.patience 3"
    )
    losses_by_step = column(early, "val/loss")
    best = min((loss, step) for step, loss in losses_by_step.items())[1]
    assert max(losses_by_step) == best + 3 < 12
    assert "stopped early: no better in 3 evaluations" in capsys.readouterr().out
    assert json.loads((early.newest_checkpoint() / "state.json").read_text())["step"] == best + 3
    assert all(math.isfinite(loss) for loss in losses_by_step.values())


@pytest.mark.long
def test_finetune_with_recipe_freezes_layers(tiny_base, tmp_path, make_recipe):
    tree = yaml.safe_load(make_recipe(tmp_path / "r.yaml").read_text())
    tree |= {"model": {"dropout": 0.0}, "finetune": {"model": str(tiny_base), "freeze_layers": 0}}
    del tree["data"]["tokenizer"]
    Path("r.yaml").write_text(yaml.safe_dump(tree))
    assert main(["finetune", "r.yaml"]) == 0
    base, tuned = (
        load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "runs/r/final")
    )
    assert torch.equal(base["transformer.wte.weight"], tuned["transformer.wte.weight"])
    assert not torch.equal(
        base["transformer.h.0.mlp.c_fc.weight"], tuned["transformer.h.0.mlp.c_fc.weight"]
    )


def test_model_without_tokenizer_needs_one(tiny_base, working_folder, capsys):
    shutil.copytree(tiny_base, "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(argv("finetune --from bare --data my.txt")) == 2
    assert "has no tokenizer beside it" in capsys.readouterr().err
    assert main(argv("finetune --from bare --data my.txt --data.tokenizer char")) == 2
    assert "char is not the tokenizer of" in capsys.readouterr().err
    char_tokenizer([chr(c) for c in range(32, 127)]).hf.save_pretrained("large")
    assert main(argv("finetune --from bare --data my.txt --data.tokenizer large")) == 2
    line = capsys.readouterr().err
    assert "large has 95 tokens, bare only" in line
    assert line.endswith("; name the tokenizer that it was trained with\n")
    config, base = finetune_config(None, [("finetune.model", "bare"), ("data.source", "my.txt")])
    assert check_tokenizer(replace_knobs(config, {"data.tokenizer": str(tiny_base)}), base)
    # One that is beside the model, and has more tokens.
    shutil.copytree("large", "bare", dirs_exist_ok=True)
    for options in ("", "--data.tokenizer large"):
        assert main(argv(f"finetune --from bare --data my.txt {options}")) == 2
        line = capsys.readouterr().err
        assert line.endswith("; put the tokenizer that it was trained with into bare\n"), line
    shutil.copytree(tiny_base, "bare", dirs_exist_ok=True)
    config, base = finetune_config(None, [("finetune.model", "bare"), ("data.source", "my.txt")])
    assert check_tokenizer(config, base)


def test_finetune_dry_run_prints_trainable_parameters(tiny_base, working_folder, capsys):
    assert main(argv("finetune --from {} --data my.txt --lora 2 --dry-run", tiny_base)) == 0
    printed = capsys.readouterr().out
    adapters = 4 * (4 * 2 * (16 + 16) + 2 * 2 * (16 + 64))
    assert f"trains {adapters:,} of " in printed
    assert "learning_rate: 0.0006" in printed
    assert sorted(path.name for path in working_folder.iterdir()) == ["my.txt"]


@pytest.mark.parametrize("revision", [[], [("finetune.revision", "main")]], ids=["newest", "main"])
def test_hub_model_is_recorded_with_its_commit(tiny_base, tmp_path, monkeypatch, revision):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache_folder = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_base, cache_folder / "snapshots" / commit)
    (cache_folder / "refs").mkdir()
    (cache_folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config, _ = finetune_config(
        None, [("finetune.model", "someone/tiny"), ("data.source", "my.txt"), *revision]
    )
    assert (config.finetune.model, config.finetune.revision) == ("someone/tiny", commit)
    assert (config.data.dir, config.name) == ("data/my-tiny", "tiny-my")
    assert start_model(config, 7, None).config.n_layer == 4


TINY = (
    "--data.sha256 null --train.max_steps 2 --optim.warmup_steps 0 --eval.tokens 256 "
    "--eval.sample_tokens 5 --data.block_size {} --train.tokens_per_step {}"
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["finetune_shakespeare", "finetune_lora", "finetune_smollm2"])
def test_shipped_finetune_recipes_train(name, tiny_base, chat_model, chat_file, tmp_path):
    base = tiny_base
    data = "my.txt"
    block_size = 32
    if name == "finetune_smollm2":
        base = chat_model
        data = chat_file
        block_size = 128
    command = f"finetune {{}} --from {{}} --data.tokenizer {{}} --data {{}} {TINY}"
    assert main(argv(command, name, base, base, data, block_size, 8 * block_size)) == 0
    assert (tmp_path / "runs" / name / "final").is_dir()


def test_finetune_from_adapter_is_refused(run, tiny_base, capsys):
    run("--lora 2 --train.max_steps 1", name="adapter")
    with pytest.raises(UserError, match=r"is an adapter.*export"):
        finetune_config(None, [("finetune.model", "adapter"), ("data.source", "my.txt")])
