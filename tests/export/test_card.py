"""The model card: content, metadata for the Hub, escaping."""

import dataclasses

import pytest
import yaml
from huggingface_hub import ModelCard

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.export.card import model_card, plain_card
from nanogpt_hf.model import GPTConfig
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
    best_step=12,
)


def card_of(config, manifest=MANIFEST, state=STATE, **options) -> ModelCard:
    return ModelCard(model_card(config, MODEL, manifest, state, "2 × Abacus, fp32", **options))


ADAMW = "AdamW, betas 0.9 and 0.95, weight decay 0.1"
MUON = (
    "Muon, learning rate 0.02, Nesterov momentum 0.95, update scale original, for the matrices "
    "inside the blocks"
)


def test_model_card_describes_training_evaluation_and_recipe(write_recipe):
    card = card_of(load_config(write_recipe()))
    facts = {
        "tokens seen": "18,000 (2.00 times the training split)",
        "steps": "12 of 6",
        "optimizer": ADAMW,
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
    assert all(fact in card.text for fact in ("sha256:abc", "trained from scratch"))
    recipe = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert recipe["train"]["max_steps"] == 6
    for knobs, optimizer in (
        ({"optim__state": "8bit"}, f"{ADAMW}, 8-bit state (torchao)"),
        ({"optim__name": "muon"}, f"{MUON}; for the rest {ADAMW}"),
    ):
        assert f"| optimizer | {optimizer} |" in card_of(load_config(write_recipe(**knobs))).text


def test_model_card_metadata_is_read_by_huggingface_hub(write_recipe):
    knobs = {"data__source": "ada/stories", "data__config": "plain", "hub__license": "mit"}
    recipe = write_recipe(data__validation_split="dev", **knobs)
    manifest = dataclasses.replace(MANIFEST, revision="f" * 40)
    card = card_of(load_config(recipe), manifest, base_model="gpt2")
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert (data["base_model"], data["datasets"], data["license"]) == (
        "gpt2",
        ["ada/stories"],
        "mit",
    )
    assert "`mit`" in card.text
    assert "gpt2" in card.text.partition("## License")[2]
    metrics = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert metrics == {"loss": 2.0, "perplexity": 7.3891, "bits_per_byte": 1.4427}
    for result in card.data.eval_results:
        where = (result.dataset_name, result.dataset_config, result.dataset_split)
        assert where == ("ada/stories", "plain", "dev")
        assert (result.task_type, result.dataset_revision) == ("text-generation", "f" * 40)


def test_cards_omit_unknown_metadata(write_recipe):
    config = load_config(write_recipe())
    diverged = dataclasses.replace(STATE, evaluation=MeasuredLoss(float("nan"), 900, 2.0))
    cards = [
        card_of(config, state=TrainState()),
        card_of(config, state=diverged),
        ModelCard(plain_card("name", MODEL, "by nanoGPT", {"trained with": "nanoGPT"})),
        ModelCard(plain_card("name", MODEL, "whose training is unknown")),
    ]
    for card in cards:
        assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
        assert "Not stated." in card.text
    assert "Not measured." in cards[0].text
    assert "whose training is unknown" in cards[-1].text


def test_model_card_redacts_the_home_folder(write_recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    card = card_of(load_config(write_recipe(data__source="/home/ada/my|text.txt"))).text
    assert "/ada" not in card
    assert r"| data | ~/my\|text.txt, revision " in card


HOSTILE = (
    "<svg onload=alert(1)> <img src=x onerror=alert(2)> ![i](http://x) [l](javascript:0) "
    "a|b `` ` &lt; \\| *b*"
)


def test_cards_escape_html_and_markdown_in_strings(write_recipe):
    markdown_it = pytest.importorskip("markdown_it", reason="a Markdown parser is not installed")
    recipe = write_recipe(
        data__source=f"{HOSTILE}\n\n# heading\n---\n",
        eval__samples=["```\n<script>x</script>\n```"],
    )
    config = dataclasses.replace(load_config(recipe), name=f"r{HOSTILE}\n---\nlicense: mit")
    config = replace_knobs(config, {"data.validation_split": HOSTILE})
    facts = {"trained with": f"{HOSTILE}\n| c | d |"}
    cards = [
        card_of(config, base_model=f"{HOSTILE}\n# heading"),
        ModelCard(plain_card(config.name, MODEL, "by nanoGPT", facts)),
    ]
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    for card in cards:
        tokens = parser.parse(card.text)
        kinds = [token.type for token in tokens]
        inside = [token for block in tokens for token in block.children or ()]
        allowed = {"text", "softbreak", "code_inline", "text_special"}
        assert {token.type for token in inside} <= allowed
        assert not {"html_block", "hr"} & set(kinds)
        headings = [tokens[i + 1].content for i, kind in enumerate(kinds) if kind == "heading_open"]
        assert headings[1:] == [name for name in SECTIONS if f"## {name}\n" in card.text]
        rows = kinds.count("tr_open") - 1 - ("Evaluation" in headings)
        assert kinds.count("td_open") == 2 * rows
        shown = [token.content for token in inside if token.type in ("text", "text_special")]
        assert "<svg onload=alert(1)> <img src=x onerror=alert(2)> !" in "".join(shown)
    assert cards[0].data.model_name == config.name
    assert "license" not in cards[0].data.to_dict()
    recipe = yaml.safe_load(cards[0].text.split("````yaml\n")[1].split("````")[0])
    assert recipe["eval"]["samples"] == config.eval.samples


SECTIONS = ("How to load", "Training", "Evaluation", "Limits", "License", "Recipe")
