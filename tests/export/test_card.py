"""The model card: content, metadata for the Hub, escaping."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.export import card as module
from nanogpt_hf.export.card import model_card
from nanogpt_hf.model import GPTConfig
from nanogpt_hf.runs.metrics import Score
from nanogpt_hf.runs.state import MeasuredLoss, TrainState

MODEL = GPTConfig(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2, bias=False)
MANIFEST = Manifest(
    format=1,
    recipe={"validation_fraction": 0.1},
    revision="sha256:abc",
    file_state="x",
    tokenizer_hash="",
    vocab_size=4,
    end_of_text_id=None,
    train=SplitFacts(1, 9000, 9000),
    validation=SplitFacts(1, 1000, 2000),
    versions={},
)
STATE = TrainState(
    step=12,
    tokens=18_000,
    seconds=3725.4,
    evaluation=MeasuredLoss(2.0, 900, 2.0),
    evaluated_step=12,
)


def card_of(config, manifest=MANIFEST, state=STATE, **options) -> ModelCard:
    return ModelCard(model_card(config, MODEL, manifest, state, "2 × Abacus, fp32", **options))


def test_model_card_describes_training_evaluation_and_recipe(write_recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    recipe = write_recipe(data__source="/home/ada/my|text.txt", optim__name="muon")
    card = card_of(load_config(recipe))
    facts = {
        "data": r"~/my\|text.txt, revision sha256:abc",
        "training split": "1 document, 9,000 tokens",
        "tokens seen": "18,000 (2.00 times the training split)",
        "steps": "12 of 6",
        "learning rate": "0.01, cosine to 0.001",
        "trained on": "2 × Abacus, fp32 (when this was saved; a run can change machines)",
        "time": "1:02:05 (h:mm:ss) of training and evaluation",
        "validation loss": "2.0000 nats per token",
        "perplexity": "7.39 per token",
        "bits per byte": "1.4427",
        "measured on": "900 of the 1,000 tokens held out",
        "context window": "16 tokens",
    }
    lines = card.text.splitlines()
    assert {f"| {name} | {value} |" for name, value in facts.items()} <= set(lines)
    assert "- Its context is 8 tokens." in lines
    assert "trained from scratch" in card.text
    assert "update scale original" in card.text
    assert "for the rest AdamW, betas 0.9 and 0.95, weight decay 0.1 |" in card.text
    assert "/ada" not in card.text
    recipe = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert recipe["train"]["max_steps"] == 6


def test_metadata_is_read_by_huggingface_hub_and_unknown_facts_are_left_out(write_recipe):
    recipe = write_recipe(data__source="ada/stories", hub__license="mit")
    manifest = dataclasses.replace(MANIFEST, revision="f" * 40)
    card = card_of(load_config(recipe), manifest, base_model="gpt2")
    always = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    stated = {"base_model": "gpt2", "datasets": ["ada/stories"], "license": "mit"}
    found = card.data.to_dict()
    assert found.pop("tags")[1] == "nanogpt_hf"
    assert found == always | stated
    assert "mit, as stated" in card.text
    assert "The terms of gpt2 apply" in card.text
    unknown = card_of(load_config(write_recipe()), state=TrainState())
    assert "Not measured." in unknown.text
    assert "Not stated." in unknown.text
    assert unknown.data.to_dict() == always | {"tags": unknown.data.tags}


HOSTILE = (
    "<svg onload=alert(1)> <img src=x onerror=alert(2)> ![i](http://x) [l](javascript:0) "
    "a|b `` ` &lt; \\| *b*"
)
SECTIONS = ("How to load", "Training", "Evaluation", "Limits", "License", "Recipe")


def test_cards_escape_html_and_markdown_in_strings(write_recipe):
    markdown_it = pytest.importorskip("markdown_it", reason="a Markdown parser is not installed")
    recipe = write_recipe(
        data__source=f"{HOSTILE}\n\n# heading\n---\n",
        eval__samples=["```\n<script>x</script>\n```"],
    )
    config = dataclasses.replace(load_config(recipe), name=f"r{HOSTILE}\n---\nlicense: mit")
    config = replace_knobs(config, {"data.validation_split": HOSTILE})
    card = card_of(config, base_model=f"{HOSTILE}\n# heading")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(card.text)
    kinds = [token.type for token in tokens]
    inside = [token for block in tokens for token in block.children or ()]
    allowed = {"text", "softbreak", "code_inline", "text_special"}
    assert {token.type for token in inside} <= allowed
    assert not {"html_block", "hr"} & set(kinds)
    headings = [tokens[i + 1].content for i, kind in enumerate(kinds) if kind == "heading_open"]
    assert headings[1:] == [*SECTIONS]
    assert kinds.count("td_open") == 2 * (kinds.count("tr_open") - 2)  # two tables
    shown = [token.content for token in inside if token.type in ("text", "text_special")]
    assert "<svg onload=alert(1)> <img src=x onerror=alert(2)> !" in "".join(shown)
    assert "license" not in card.data.to_dict()
    recipe = yaml.safe_load(card.text.split("````yaml\n")[1].split("````")[0])
    assert recipe["eval"]["samples"] == config.eval.samples


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_card_states_the_end_of_a_schedule_that_has_one(write_recipe, schedule):
    text = card_of(load_config(write_recipe(optim__schedule=schedule))).text
    end = " to 0.001" if SCHEDULES[schedule].ends else ""
    assert f"| learning rate | 0.01, {schedule}{end} |" in text


# Fields of a state, and the score that its card states.
OLD = MeasuredLoss(2.0, 900, 2.0)
NAN = float("nan")
SCORES = {
    "last": ("dpo", {"score": 0.9, "best_loss": 0.5, "best_step": 3}, "0.9000"),
    "best": ("dpo", {"score": 0.5, "best_loss": 0.5, "best_step": 12}, "0.5000"),
    "older_best": ("dpo", {"best_loss": 0.5, "best_step": 12}, "0.5000"),
    "older_last": ("dpo", {"best_loss": 0.5, "best_step": 3}, None),
    "reward": ("rl", {"score": -0.2, "best_loss": -0.6, "best_step": 3}, "0.2000"),
    "text": ("text", {"score": 2.0, "best_loss": 1.0, "best_step": 3, "evaluation": OLD}, "2.0000"),
    "older_text": ("text", {"best_loss": 1.0, "best_step": 3, "evaluation": OLD}, "2.0000"),
    "diverged_pairs": ("dpo", {"score": NAN, "best_loss": 0.5, "best_step": 0}, "nan"),
    "diverged": ("text", {"score": NAN, "evaluation": MeasuredLoss(NAN, 9, 2.0)}, "nan"),
    "older_diverged": ("text", {"evaluation": MeasuredLoss(NAN, 9, 2.0)}, "nan"),
}


@pytest.mark.parametrize(("method", "fields", "expected"), SCORES.values(), ids=SCORES)
def test_card_states_the_score_of_its_weights(write_recipe, method, fields, expected):
    knobs = {"dpo": {"align.loss": "dpo"}, "rl": {"rl.task": "exact"}, "text": {}}[method]
    state = TrainState(step=12, evaluated_step=12, **fields)
    text = card_of(replace_knobs(load_config(write_recipe()), knobs), state=state).text
    names = "validation loss|dpo loss|mean reward"
    found = re.findall(rf"(?m)^\| (?:{names}) \| (\S+) .*\|$", text)
    assert found == ([expected] if expected else [])
    assert ("Training has diverged" in text) == (expected == "nan")
    assert ("Not measured." in text) == (expected is None)


def test_card_states_a_score_that_names_no_documents(write_recipe, monkeypatch):
    """Of a method that is not ours."""
    method = SimpleNamespace(score=Score("val/f1", "f1", "F1 of labels"))
    monkeypatch.setattr(module, "method_of", lambda config: method)
    state = TrainState(step=3, evaluated_step=3, score=0.25)
    text = card_of(load_config(write_recipe()), state=state).text
    assert "| F1 of labels | 0.2500 on held-out documents (step 3) |" in text
    assert "| training split | 1 document, 9,000 tokens |" in text
