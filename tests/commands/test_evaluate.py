"""The `evaluate` command: output, JSON, two processes, mistakes."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import core_bundle
from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.model import load
from nanogpt_hf.model.load import load_model
from nanogpt_hf.place import replaced_folder
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("abc fed hag bed?\nhead ache cab beef?\n" * 40)
    return path


def measure(capsys, *arguments: object) -> str:
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_evaluate_text_prints_and_writes_figures(capsys, letter_model, text, tmp_path):
    output = tmp_path / "results.json"
    out = measure(capsys, letter_model, "--data", text, "--stride", 8, "--output", output)
    results = json.loads(output.read_text())
    figures = results["text"]
    assert (
        f"loss           {figures['loss']:.4f} ± {figures['loss_standard_error']:.4f} nats "
        "per token"
    ) in out
    assert f"perplexity     {figures['perplexity']:.2f} ± " in out
    assert f"bits per byte  {figures['bits_per_byte']:.4f} ± " in out
    assert "1 document, 1,480 tokens, 1,480 bytes" in out
    assert (
        results["model"]["sha256"]
        == hashlib.sha256((letter_model / "model.safetensors").read_bytes()).hexdigest()
    )
    assert figures["data_revision"] == f"sha256:{hashlib.sha256(text.read_bytes()).hexdigest()}"
    assert (figures["block_size"], figures["stride"]) == (32, 8)
    assert {"torch", "transformers", "nanogpt_hf"} <= results["versions"].keys()
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_model_without_a_tokenizer_is_named_without_a_knob(refused, letter_model, text, tmp_path):
    """No knob states the tokenizer of a model that is measured."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(letter_model / name, folder / name)
    line = refused("evaluate", folder, "--data", text)
    assert f"{folder}: no Hugging Face tokenizer in that folder: " in line
    assert "data.tokenizer" not in line


@pytest.mark.parametrize("replacements", [1, 3])
def test_model_that_is_replaced_while_it_is_read(
    capsys, letter_model, text, tmp_path, monkeypatch, replacements
):
    """As best/ by a run that trains: the digest is that of the weights that were measured."""
    folder = tmp_path / "best"
    shutil.copytree(letter_model, folder)
    left = [0.5, 0.3, 0.1][:replacements]

    def load_and_replace(path):
        model = load_model(path)
        if left:
            factor = left.pop()
            with replaced_folder(folder) as partial:
                shutil.copytree(letter_model, partial, dirs_exist_ok=True)
                tensors = load_file(folder / "model.safetensors")
                tensors = {name: factor * tensor for name, tensor in tensors.items()}
                save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        return model

    monkeypatch.setattr(load, "load_model", load_and_replace)
    output = tmp_path / "results.json"
    words = ["evaluate", str(folder), "--data", str(text), "--output", str(output)]
    if replacements == 3:
        assert main(words) == 2
        assert "was replaced whenever it was read" in capsys.readouterr().err
        return
    assert main(words) == 0
    results = json.loads(output.read_text())
    weights = (folder / "model.safetensors").read_bytes()
    assert results["model"]["sha256"] == hashlib.sha256(weights).hexdigest()
    monkeypatch.undo()
    measure(capsys, folder, "--data", text, "--output", output)
    assert json.loads(output.read_text())["text"] == results["text"]


def test_evaluate_run_on_prepared_data_equals_training(
    capsys, write_recipe, tmp_path, forget_accelerate
):
    config = load_config(write_recipe(eval__tokens="all"))
    prepare(config)
    run = prepare_run(config, tmp_path / "run")
    loop.train(run)
    state = run.state
    forget_accelerate()
    # Without anything to measure, a run is measured on its own text.
    measured = {}
    for name, options in {"stated": ("--data", config.data.dir), "own": ()}.items():
        output = tmp_path / f"{name}.json"
        measure(capsys, tmp_path / "run", *options, "--output", output)
        measured[name] = json.loads(output.read_text())["text"]
    assert measured["own"] == measured["stated"]
    figures = measured["own"]
    assert figures["loss"] == pytest.approx(state.best_loss, abs=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(state.evaluation.bits_per_byte, rel=1e-6)
    assert figures["data"].endswith("(validation)")


@pytest.mark.long
def test_run_is_not_measured_on_data_that_was_prepared_again(
    write_recipe, tmp_path, forget_accelerate, refused, capsys
):
    config = load_config(write_recipe())
    loop.train(prepare_run(config, tmp_path / "run"))
    forget_accelerate()
    folder = Path(config.data.dir)
    # The new validation split has text that the run was trained on.
    shutil.rmtree(folder)
    prepare(replace_knobs(config, {"data.validation_fraction": 0.4}))
    line = refused("evaluate", tmp_path / "run")
    assert f"{folder} was prepared again" in line
    assert "validation sha256" in line
    assert line.endswith("prepare the run's own in another folder, and name that by --data")
    own = replace_knobs(config, {"data.dir": str(tmp_path / "own")})
    prepare(own)
    measure(capsys, tmp_path / "run", "--data", own.data.dir)
    shutil.rmtree(folder)
    assert f"{folder} holds no text of its recipe" in refused("evaluate", tmp_path / "run")


def test_run_on_conversations_has_no_text_of_its_own(write_run, refused):
    run = write_run("chat", data__format="chat", data__tokenizer="gpt2")
    line = refused("evaluate", run.path)
    assert "learned a part of its data only, such as answers, so it has no text; give" in line
    assert "--metrics" in line


@pytest.mark.slow
def test_evaluate_on_two_processes_equals_one(
    capsys, letter_model, letter_tasks, text, tmp_path, launch_warm
):
    questions = tmp_path / "questions.jsonl"
    rows = [{"prompt": letter, "completion": "[ab]"} for letter in "abcdefgh"]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = argv(
        "{} --data {} --stride 5 --batch-size 3 --tasks {} --questions {} --samples 4 --core {} "
        "--max-new-tokens 2",
        *(letter_model, text, ",".join([*letter_tasks, "rl:regex"]), questions),
        core_bundle.write(tmp_path / "bundle"),
    )
    out = measure(capsys, *arguments, "--output", tmp_path / "one.json")
    assert "on task letters" in out
    ended = []
    launch_warm(
        *("cpu_ddp", "evaluate", *arguments, "--output", tmp_path / "two.json"),
        ends_with=lambda *end: ended.append(end),
    )
    ((status, output),) = ended
    assert status == 0, output
    assert output.count("on task letters") == output.count("on CORE") == 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["machine"].startswith("2 × ")
    assert two["text"] == pytest.approx(one["text"], abs=1e-6)
    assert two["core"] == one["core"]
    assert two["answers"] == one["answers"]
    assert 0 < one["answers"]["rl:regex"]["pass@1"] < 1
    for task, metric in (("letters", "acc"), ("letters", "acc_norm"), ("lines", "perplexity")):
        assert two["tasks"][task][metric] == pytest.approx(one["tasks"][task][metric], rel=1e-6)


@pytest.mark.slow
def test_nanogpt_checkpoint_has_its_known_loss(capsys, shared, tmp_path):
    checkpoint = shared / "models" / "nanogpt-shakespeare-char"
    model = tmp_path / "model"
    files = checkpoint / "ckpt.pt", model, checkpoint / "meta.pkl"
    assert main(argv("import-nanogpt {} {} --meta {}", *files)) == 0
    text = (shared / "data" / "tinyshakespeare.txt").read_text()
    (tmp_path / "validation.txt").write_text(text[int(len(text) * 0.9) :])
    files = model, tmp_path / "validation.txt", tmp_path / "out.json"
    capsys.readouterr()
    measure(capsys, *argv("{} --data {} --batch-size 64 --output {}", *files))
    figures = json.loads((tmp_path / "out.json").read_text())["text"]
    assert figures["loss"] == pytest.approx(1.8983, abs=1e-4)
    assert figures["tokens_predicted"] == 111_539
