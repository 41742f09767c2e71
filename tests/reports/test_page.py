"""report.html as text, for finished, running and damaged runs. test_page_in_browser.py has the
rest.
"""

import json
import re
from html.parser import HTMLParser

import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.reports import page
from nanogpt_hf.reports.page import render, write_report
from nanogpt_hf.reports.reference import Reference, experiment_of
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics


def event(step: int, seconds: float, **values) -> dict:
    return {"step": step, "tokens": 128 * step, "seconds": seconds} | values


def losses(loss: float, perplexity: float, bits: float) -> dict[str, float]:
    return {"val/loss": loss, "val/perplexity": perplexity, "val/bits_per_byte": bits}


EVENTS = [
    event(0, 0.0, **losses(4.0, 54.6, 5.77)),
    event(0, 0.0, samples=[{"prompt": "The ", "text": "xq<z"}]),
    event(1, 1.0, **{"train/loss": 3.9, "train/tokens_per_second": 128.0}),
    event(2, 2.0, **{"train/loss": None, "train/tokens_per_second": 130.0}),
    event(3, 3700.0, **losses(3.5, 33.1, 5.05)),
    event(3, 3700.0, samples=[{"prompt": "The ", "text": "cat"}]),
]


@pytest.fixture
def folder(tmp_path, write_recipe):
    """A run folder as training writes it, without a model."""
    run = RunFolder(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.recipe.write_text(config_to_yaml(load_config(write_recipe(optim__beta2=0.97))))
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    start = {"step": 0, "time": "2026-11-21T10:00:00+00:00", "machine": "1 × CPU, fp32"}
    start |= {"versions": {"torch": "2.13.0"}, "processes": 1}
    start["command"] = "cli.py pretrain https://me:secret@host/x.yaml"
    second = start | {"step": 2, "machine": "8 × H200"}
    run.machine.write_text(json.dumps({"starts": [start, second]}))
    return run


class Parsed(HTMLParser):
    """The tags, the table cells, the text, and the JSON of the data script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = []
        self.cells = []
        self.text = ""
        self.data = None
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in = "data" if ("id", "data") in attributes else tag

    def handle_data(self, text):
        if self._in == "data":
            self.data = json.loads(text)
            self._in = ""
        elif self._in in ("td", "th"):
            self.cells.append(text)
        if self._in not in ("script", "style"):
            self.text += text


def test_report_shows_state_summary_recipe_machine_and_metrics(folder):
    write_report(folder, folder.report)
    parsed = Parsed(folder.report.read_text())
    assert "step 3 of 6, not finished" in parsed.text
    assert "2 layers, 2 heads, 16 wide" in parsed.text
    shown = "3.5000|33.1000|5.0500|384|1 h 1 min|optim.beta2|0.97|8 × H200"
    assert all(text in parsed.text for text in shown.split("|"))
    assert "secret" not in folder.report.read_text()
    assert "https://host/x.yaml" in parsed.text
    assert parsed.text.count("xq<z") == 1
    assert folder.report.read_text().count('<tr class="best">') == 1
    train, validation = parsed.data["groups"]
    assert train["step"] == [1, 2]
    assert train["metrics"]["train/loss"] == [3.9, None]
    assert validation["tokens"] == [0, 384]
    assert validation["metrics"]["val/loss"] == [4.0, 3.5]
    assert [path.name for path in folder.path.iterdir() if "partial" in path.name] == []


def test_report_loads_nothing_and_allows_only_its_script(folder):
    text = render(folder, read_metrics(folder))
    parsed = Parsed(text)
    policy = next(
        a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for _, attributes in parsed.tags:
        assert attributes.get("src", "data:").startswith("data:")
        assert not [n for n in attributes if n in ("href", "style") or n.startswith("on")]
    assert [tag for tag, _ in parsed.tags].count("script") == 2  # the data, and page.js
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", text.replace("https://host/x.yaml", "")
    )


def test_report_of_a_run_without_events(folder):
    assert "None yet" in Parsed(render(folder, [])).text


def test_long_curves_are_thinned_out(folder, monkeypatch):
    monkeypatch.setattr(page, "MAX_POINTS", 4)
    events = [{"step": i, "tokens": i, "seconds": i, "train/loss": float(i)} for i in range(1, 11)]
    (train,) = Parsed(render(folder, events)).data["groups"]
    assert train["step"] == train["metrics"]["train/loss"] == [1, 4, 7, 10]


def test_report_shows_how_to_load_the_model(folder):
    assert "No model yet" in render(folder, EVENTS)
    folder.best.mkdir()
    folder.final.mkdir()
    text = Parsed(render(folder, EVENTS)).text
    assert "done: 3 steps" in text
    assert f"AutoModelForCausalLM.from_pretrained('{folder.best}')" in text


def test_report_shows_the_band_of_the_reference(folder, monkeypatch):
    assert Parsed(render(folder, EVENTS)).data["band"] is None
    config = load_config(folder.recipe)
    band = {"step": [0, 3], "mean": [4.0, 3.0], "low": [3.9, 2.9], "high": [4.1, 3.1]}
    reference = Reference("tiny", experiment_of(config), band, seeds=[1, 2, 3])
    monkeypatch.setattr(page, "find_reference", lambda config: reference)
    parsed = Parsed(render(folder, EVENTS))
    assert parsed.data["band"] == band
    assert "Above the band of" in parsed.text
    assert [tag for tag, _ in parsed.tags].count("li") == 3  # causes


def test_report_of_reinforcement_learning_shows_rewards(folder, write_recipe):
    folder.metrics.write_text("")
    knobs = {"finetune__model": "start", "rl__task": "arithmetic", "rl__max_new_tokens": 4}
    folder.recipe.write_text(config_to_yaml(load_config(write_recipe(**knobs))))
    answer = {"prompt": "2+2", "text": "<4>", "reward": "0.25"}
    events = [
        event(0, 0, **{"val/reward": 0.5, "val/pass@1": 0.4, "val/pass@4": 0.7}),
        event(0, 0, samples=[answer]),
        event(1, 1, **{"train/loss": 0.1, "train/reward": 0.6}),
        event(2, 2, **{"val/reward": 0.75, "val/pass@1": 0.65, "val/pass@4": 0.9}),
    ]
    parsed = Parsed(text := render(folder, events))
    assert "best mean reward0.7500at step 2" in parsed.text
    assert "<b>2+2</b>\n&lt;4&gt;\n<i>reward 0.25</i>" in text
    assert text.count('<tr class="best">') == 1
    assert "reference" not in parsed.text
    assert {"train/reward", "val/pass@1"} <= {
        name for group in parsed.data["groups"] for name in group["metrics"]
    }


def test_report_of_a_teacher_alone_shows_the_divergence_that_chose_the_best_model(
    folder, write_recipe
):
    knobs = {"finetune__model": "start", "rl__task": "arithmetic", "rl__max_new_tokens": 4}
    knobs |= {"distill__teacher": "big", "distill__weight": 1.0}
    folder.recipe.write_text(config_to_yaml(load_config(write_recipe(**knobs))))
    events = [
        event(0, 0, **{"val/reward": 0.5, "val/divergence": 3.0}),
        event(2, 2, **{"val/reward": 0.75, "val/divergence": 2.0}),
        event(4, 4, **{"val/reward": 0.25, "val/divergence": 1.5}),
    ]
    text = render(folder, events)
    assert "best divergence from the teacher1.5000at step 4" in Parsed(text).text
    assert text.count('<tr class="best">') == 1
    events.append(event(6, 6, **{"val/reward": 0.5, "val/divergence": None}))
    assert "last divergence from the teachernanat step 6" in Parsed(render(folder, events)).text


def test_report_lists_the_rate_of_muon_for_a_run_that_reads_it(folder, write_recipe):
    rate = "optim.muon_learning_rate"
    # Earlier versions recorded it for AdamW, too.
    for knobs in ({}, {rate.replace(".", "__"): 0.02}):
        folder.recipe.write_text(config_to_yaml(load_config(write_recipe(**knobs))))
        assert rate not in render(folder, EVENTS)
    folder.recipe.write_text(config_to_yaml(load_config(write_recipe(optim__name="muon"))))
    assert rate in render(folder, EVENTS)
