"""A model with `data.tokenizer: bpe` in every command that reads it."""

from pathlib import Path

import pytest
import yaml

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long

SIZE = 280


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_recipe, forget_accelerate):
    """A short run with `data.tokenizer: bpe`, in a folder of recipe, prepared data and run."""
    folder = tmp_path_factory.mktemp("bpe")
    path = make_recipe(folder / "tiny.yaml")
    recipe = yaml.safe_load(path.read_text())
    recipe["data"] |= {"tokenizer": "bpe", "vocab_size": SIZE, "dir": str(folder / "data")}
    path.write_text(yaml.safe_dump(recipe))
    forget_accelerate()
    assert main(argv("pretrain {} --run-dir {}", path, folder / "run")) == 0
    return RunFolder(folder / "run")


def test_bpe_model_is_sampled_and_evaluated(run, text_file, capsys):
    capsys.readouterr()
    assert main(argv("sample {} --prompt 'the cat 日本' --max-new-tokens 5", run.path)) == 0
    assert "the cat 日本" in capsys.readouterr().out
    assert main(argv("evaluate {} --data {}", run.path, text_file)) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_bpe_model_is_exported_to_gguf(run, tmp_path, capsys):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    assert main(argv("export {} {} --format gguf", run.path, tmp_path / "out")) == 0
    facts = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields.items()
    }
    assert (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(facts["tokenizer.ggml.tokens"]) == SIZE
    assert len(facts["tokenizer.ggml.merges"]) >= SIZE - 257
    assert facts["tokenizer.ggml.eos_token_id"] == SIZE - 1


def test_bpe_model_is_fine_tuned_with_its_own_tokenizer(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("Zebras graze at night. " * 100)
    options = argv("--train.max_steps 2 --eval.every 1 --run-dir tuned")
    command = [*argv("finetune --from {} --data my.txt", run.path), *options]
    assert main([*command, "--data.tokenizer", "bpe", "--data.vocab_size", "280"]) == 2
    assert "data.tokenizer: bpe is not the tokenizer of" in capsys.readouterr().err
    assert main(command) == 0
    assert (Path("tuned/final/tokenizer.json")).read_bytes() == (
        run.final / "tokenizer.json"
    ).read_bytes()


def test_resume_with_another_vocab_size_is_refused(run, tmp_path, capsys):
    recipe, other = str(run.path.parent / "tiny.yaml"), str(tmp_path / "data")
    resumed = argv("pretrain {} --run-dir {} --resume", recipe, run.path)
    assert main([*resumed, "--data.vocab_size", str(SIZE + 1), "--data.dir", other]) == 2
    assert f"data.vocab_size: {SIZE} -> {SIZE + 1}" in capsys.readouterr().err


def test_the_dry_run_counts_a_bpe_vocabulary_before_prepare(write_recipe, tmp_path, capsys):
    knobs = argv("--data.tokenizer bpe --data.vocab_size 4096 --data.dir {}", tmp_path / "none")
    smaller = argv("--data.vocab_size 4095")
    assert main(["pretrain", str(write_recipe()), "--dry-run", *knobs]) == 0
    larger = parameters_in(capsys.readouterr().out)
    assert main(["pretrain", str(write_recipe()), "--dry-run", *knobs, *smaller]) == 0
    width = yaml.safe_load(write_recipe().read_text())["model"]["n_embd"]
    assert larger - parameters_in(capsys.readouterr().out) == width


def parameters_in(printed: str) -> int:
    (line,) = [line for line in printed.splitlines() if line.startswith("parameters: ")]
    return int(line.removeprefix("parameters: ").replace(",", ""))
