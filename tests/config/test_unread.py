"""Knobs that nothing reads are refused, for each knob of the schema that declares its readers."""

import typing
from pathlib import Path
from types import NoneType

import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.optimizers import OPTIMIZERS
from nanogpt_hf.config.schedules import ENDLESS
from nanogpt_hf.config.schema import KNOBS, get_value, kind_options
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.errors import ConfigError

# The words of these readers follow from tables.
OF_BETAS = KNOBS["optim.betas"].readers[0].words
OF_AN_END = KNOBS["optim.min_learning_rate"].readers[0].words
WITHOUT_BETAS = [name for name, row in OPTIMIZERS.items() if not row.has_betas]
# By the words of a reader: a recipe that has its choice, and one that lacks it. Both are changes
# of a recipe for text in a file of rows, with the schema's defaults.
RECIPES: dict[str, tuple[dict, dict]] = {
    "with model.depth": ({"model.depth": 2}, {}),
    "without model.depth": ({}, {"model.depth": 2}),
    "without train.budget": ({}, {"train.budget": "5m"}),
    "without train.epochs": ({}, {"train.epochs": 2}),
    "with model.architecture gpt2": ({}, {"model.architecture": "llama"}),
    "without model.architecture gpt2": ({"model.architecture": "llama"}, {}),
    "from a data.source that is a URL": ({"data.source": "https://example.org/a.jsonl"}, {}),
    "from a data.source on the Hub": ({"data.source": "user/name"}, {}),
    "from a data.source whose rows have columns": ({}, {"data.source": "texts/a.txt.gz"}),
    "with data.format text": ({}, {"data.format": "chat"}),
    "without data.format datatrove": ({}, {"data.format": "datatrove"}),
    "without data.validation_split": (
        {},
        {"data.source": "user/name", "data.validation_split": "test"},
    ),
    "with data.tokenizer bpe": ({"data.tokenizer": "bpe", "data.vocab_size": 300}, {}),
    # None if each optimizer that there is reads them.
    OF_BETAS: ({}, {"optim.name": WITHOUT_BETAS[0]} if WITHOUT_BETAS else None),
    "with optim.name muon": ({"optim.name": "muon"}, {}),
    "with optim.schedule wsd": ({"optim.schedule": "wsd"}, {}),
    OF_AN_END: ({}, {"optim.schedule": ENDLESS[-1]}),
    "with eval.tasks": ({"eval.tasks": "hellaswag"}, {}),
    "with eval.metrics": ({"eval.metrics": "exact_match"}, {}),
    "with eval.samples": ({"eval.samples": "a"}, {}),
    "with finetune.model": ({"finetune.model": "gpt2"}, {}),
    "without finetune.model": ({}, {"finetune.model": "gpt2"}),
    "with finetune.freeze_layers": ({"finetune.freeze_layers": 0, "finetune.model": "gpt2"}, {}),
    "with lora.rank": ({"lora.rank": 4, "finetune.model": "gpt2"}, {}),
    "with rl.task": ({"rl.task": "arithmetic"}, {}),
    "without rl.task": ({}, {"rl.task": "arithmetic"}),
    "with rl.tools": ({"rl.tools": ["calculator"]}, {}),
    "with rl.updates above 1": ({"rl.updates": 2}, {}),
    "with rl.clip": ({"rl.clip": 0.2, "rl.updates": 2}, {}),
    "with align.loss": ({"align.loss": "ipo"}, {}),
    "without align.loss": ({}, {"align.loss": "ipo"}),
    "with align.loss dpo": ({"align.loss": "dpo"}, {}),
    "with align.loss simpo": ({"align.loss": "simpo"}, {}),
    "with align.loss kto": ({"align.loss": "kto"}, {}),
    "with distill.teacher": ({"distill.teacher": "gpt2"}, {}),
    "with hub.push": ({"hub.push": "final"}, {}),
    "with hub.repo": ({"hub.repo": "user/name"}, {}),
}
READERS = [(key, reader.words) for key, knob in KNOBS.items() for reader in knob.readers]


def another_value(key):
    """A value of a knob that is not its default, as the command line states it."""
    # Rules of their own refuse other values.
    stated = {"data.packing": "padded", "hub.repo": "user/name", "train.budget": "5m"}
    if value := stated.get(key):
        return value
    knob = KNOBS[key]
    options = [option for option in kind_options(knob.kind) if option != knob.default]
    if literals := [option for option in options if isinstance(option, str)]:
        return literals[-1]
    kind = next(option for option in options if option is not NoneType)
    if kind is bool:
        return not knob.default
    if kind in (int, float):
        values = (knob.low, knob.high, (knob.low or 0) + 0.25, 2, 300)
        return next(v for v in values if v not in (None, 0, knob.default) and kind(v) == v)
    if typing.get_origin(kind) is dict:
        return {"x": 1}
    return "q_proj" if kind == list[str] else "x"


def refused(knobs):
    """The knobs that are refused, since nothing reads them, with the words of the reader."""
    try:
        load_config(None, {"data.source": "rows.jsonl"} | knobs, name="x")
    except ConfigError as error:
        lines = [line for line in error.problems if " is read only " in line]
        return {line.partition(": ")[0].removeprefix("--"): line for line in lines}
    return {}


def choices(key, but=""):
    """The choices of all readers of a knob, except one."""
    chosen = {}
    for reader in KNOBS[key].readers:
        if reader.words != but:
            chosen |= RECIPES[reader.words][0]
    return chosen


def test_every_reader_has_its_recipes():
    assert len(READERS) > 60
    assert {words for _, words in READERS} == RECIPES.keys()


@pytest.mark.parametrize("key", dict(READERS))
def test_knob_that_is_read_is_accepted(key):
    assert key not in refused(choices(key) | {key: another_value(key)})


@pytest.mark.parametrize(("key", "words"), READERS)
def test_knob_that_nothing_reads_is_refused(key, words):
    lacking = RECIPES[words][1]
    if lacking is None:
        pytest.skip("all optimizers of the package read it")
    stated = choices(key, but=words) | lacking
    line = refused(stated | {key: another_value(key)}).get(key, "")
    assert f" is read only {words}; " in line
    assert line.endswith("leave it out")
    assert str(another_value(key)) in line
    default = KNOBS[key].default
    assert key not in refused(stated | {key: "null" if default is None else default})


def test_line_says_how_to_choose_the_reader():
    assert refused({"lora.rank": 4})["lora.rank"].endswith(
        "4 is read only with finetune.model; give --from MODEL, or leave it out"
    )
    assert "; set that, or leave it out" in refused({"optim.decay_fraction": 0.5}).popitem()[1]


@pytest.fixture
def write(tmp_path):
    """Write a recipe; return its path."""

    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(f"data: {{source: x.txt}}\n{text}")
        return path

    return write


def problems(*arguments):
    with pytest.raises(ConfigError) as raised:
        load_config(*arguments)
    return raised.value.problems


def test_recipe_that_states_an_unread_knob_is_refused(write):
    path = write("lora: {alpha: 3}\n")
    (line,) = problems(path)
    assert line.startswith(f"{path}: lora.alpha: 3.0 is read only with lora.rank; give --lora RANK")
    assert problems(path, {"train.seed": 1}) == [line]
    assert load_config(path, {"lora.rank": 4, "finetune.model": "gpt2"}).lora.alpha == 3


def test_knob_that_a_left_out_one_had_replaced_is_read(tmp_path):
    """Text on this machine has no splits of the Hub, so a share of it is held out."""
    recipe = Path(__file__).parents[2] / "recipes/fineweb_124m.yaml"
    overrides = {"data.source": str(tmp_path / "a.txt"), "data.validation_fraction": "0.1"}
    data = load_config(recipe, overrides).data
    assert data.validation_split is None
    assert data.validation_fraction == 0.1


def test_knob_whose_reader_an_override_takes_away_is_left_out(write, caplog):
    caplog.set_level("INFO")
    path = write("optim: {name: muon, muon_momentum: 0.8, beta1: 0.8}\n")
    optim = load_config(path, {"optim.name": "adamw"}).optim
    assert (optim.muon_momentum, optim.beta1) == (0.95, 0.8)
    assert caplog.messages == [
        f"{path}: optim.muon_momentum: left out, 0.8 is read only with optim.name muon; set that, "
        "or leave it out"
    ]
    (line,) = problems(path, {"optim.name": "adamw", "optim.muon_momentum": 0.8})
    assert line.startswith("--optim.muon_momentum: ")


def test_recipe_that_a_run_wrote_may_have_knobs_that_nothing_reads(write, tmp_path):
    config = load_config(write("optim: {name: muon, muon_momentum: 0.8}\n"))
    run = tmp_path / "recipe.yaml"
    run.write_text(config_to_yaml(config).replace("name: muon", "name: adamw"))
    assert load_config(run).optim.muon_momentum == 0.8
    assert load_config(run, {"train.seed": 1}).optim.muon_momentum == 0.8
    assert problems(run, {"rl.kl": 0.5})


def test_knob_of_stages_is_read_in_one_of_them(write):
    config = load_config(
        write(
            "optim: {decay_fraction: 0.5, warmup_steps: 0}\n"
            "train: {max_steps: 9, stages: [{at: 3, optim.schedule: wsd}]}\n"
        )
    )
    assert "optim.decay_fraction" in read_knobs(config)
    assert "optim.muon_momentum" not in read_knobs(config)
    path = write(
        "optim: {decay_fraction: 0.5, warmup_steps: 0}\n"
        "train: {max_steps: 9, stages: [{at: 3, optim.schedule: wsd, optim.decay_fraction: 0.4}]}\n"
    )
    (line,) = problems(path)
    assert line.startswith(f"{path}: optim.decay_fraction: 0.5 is read only")


def test_knob_of_a_stage_that_nothing_reads_is_refused(write):
    stages = "{at: 3, optim.decay_fraction: 0.5}, {at: 5, optim.schedule: wsd%s}"
    path = write(f"optim: {{warmup_steps: 0}}\ntrain: {{max_steps: 9, stages: [{stages}]}}\n" % "")
    assert load_config(path)
    stages %= ", optim.decay_fraction: 0.4"
    path = write(f"optim: {{warmup_steps: 0}}\ntrain: {{max_steps: 9, stages: [{stages}]}}\n")
    (line,) = problems(path)
    assert line.startswith(f"{path}: train.stages: at 3: optim.decay_fraction: 0.5 is read only")


def test_knob_of_one_source_that_nothing_reads_is_refused():
    sources = [{"source": "user/name", "weight": 1}, {"source": "a.txt", "weight": 1}]
    config = load_config(None, {"data.source": sources, "data.split": "test"}, name="x")
    assert get_value(config, "data.split") == "test"
    sources[1]["split"] = "test"
    (line,) = problems(None, {"data.source": sources}, None, "x")
    assert line.startswith("--data.source: entry 2: split: test is read only from a data.source on")
