"""Samples during training: logged at each evaluation, reproducible, without effect on training."""

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.data.hf_tokenizer import load_tokenizer
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import Subject
from nanogpt_hf.evaluation.samples import Samples
from nanogpt_hf.generate import generate_tokens
from nanogpt_hf.model.load import load_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

PROMPTS = ["A cat ", "The"]


def samples(run: RunFolder) -> dict[int, list[dict[str, str]]]:
    logged = [
        (event["step"], event["samples"]) for event in read_metrics(run) if "samples" in event
    ]
    assert logged
    assert len(dict(logged)) == len(logged)
    return dict(logged)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_recipe):
    """A run with samples and one without.

    Prompt and twelve tokens exceed the model's 16 positions.
    """
    folder = tmp_path_factory.mktemp("samples")
    recipe = make_recipe(
        folder / "tiny.yaml",
        model__dropout=0.1,
        eval__samples=PROMPTS,
        eval__sample_tokens=12,
        train__max_steps=9,
    )
    for name, options in (("with", []), ("without", ["--eval.samples", "[]"])):
        assert main([*argv("pretrain {} --run-dir {}", recipe, folder / name), *options]) == 0
    return RunFolder(folder / "with"), RunFolder(folder / "without"), recipe


@pytest.mark.long
def test_samples_are_logged_at_every_evaluation_and_do_not_change_training(runs):
    logged = samples(runs[0])
    assert list(logged) == [0, 3, 6, 9]
    for text in logged.values():
        assert [sample["prompt"] for sample in text] == PROMPTS
        assert all(len(sample["text"]) == 12 for sample in text)
    assert len({sample["text"] for text in logged.values() for sample in text}) == 8
    assert not [event for event in read_metrics(runs[1]) if "samples" in event]
    first, second = (load_file(run.final / "model.safetensors") for run in runs[:2])
    assert len(first) > 10
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
def test_samples_depend_only_on_model_seed_and_step(runs):
    run, _, recipe = runs
    config = load_config(recipe)
    tokenizer = load_tokenizer(run.final)
    model = load_model(str(run.final))
    before = torch.get_rng_state()
    model.train()

    def write(step: int, config: Config = config) -> list[dict[str, str]]:
        subject = Subject("run", model, tokenizer, Accelerator(cpu=True), 4, step=step)
        measure = Samples().load_for_training(config, tokenizer)
        return next(measure(subject)).samples

    assert write(9) == samples(run)[9]
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert write(9, replace_knobs(config, {"train.seed": 5})) != samples(run)[9]


def test_end_of_text_ends_the_sample_but_not_the_computation(letter_model):
    model = load_model(str(letter_model)).eval()
    calls = []
    model.config.eos_token_id = list(range(11))  # every token ends the sample
    model.register_forward_hook(lambda *_: calls.append(1))
    steps = list(generate_tokens(model, [1, 2], max_new_tokens=5, to_the_end=True))
    assert steps == [[None]] * 5
    assert len(calls) == 5
    assert list(generate_tokens(model, [1, 2], max_new_tokens=5)) == []


def test_prompt_with_unknown_characters_is_skipped(write_recipe):
    config = load_config(write_recipe(eval__samples=["é", "cat"], eval__sample_tokens=2))
    tokenizer = char_tokenizer(list("act")).hf
    assert [prompt for prompt, _ in Samples().load_for_training(config, tokenizer).args[1]] == [
        "cat"
    ]


def test_empty_prompt_is_refused_before_training(write_recipe):
    config = load_config(write_recipe(eval__samples=["cat", ""]))
    with pytest.raises(UserError, match=r"eval\.samples: "):
        Samples().load_for_training(config, char_tokenizer(list("act")).hf)
