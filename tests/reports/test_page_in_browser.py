"""report.html in Chromium: mouse, keyboard, script injection."""

import json
import re

import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long

HOSTILE = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'><!--<script>"


@pytest.fixture(scope="module")
def report(tmp_path_factory, make_recipe):
    """The report of a run in which every text contains a script."""
    folder = tmp_path_factory.mktemp("report")
    run = RunFolder(folder / "<svg onload='window.hit = 1'>&amp;")
    run.path.mkdir()
    config = load_config(
        make_recipe(
            folder / "tiny.yaml",
            train__max_steps=100,
            train__stages=[{"at": 60, "optim.beta1": 0.5}],
            tracking__project=HOSTILE,
        )
    )
    run.recipe.write_text(config_to_yaml(config))
    run.machine.write_text(
        json.dumps({"starts": [{"step": 0, "machine": HOSTILE, "versions": {HOSTILE: HOSTILE}}]})
    )
    with run.metrics.open("w") as file:
        for step in range(101):
            where = {"step": step, "tokens": 1000 * step, "seconds": 2 * step}
            if step % 25 == 0:
                loss = 4 - step / 50
                samples = [{"prompt": HOSTILE, "text": f"{HOSTILE} at {step}"}]
                file.write(json.dumps(where | {"val/loss": loss, HOSTILE: 1.0}) + "\n")
                file.write(json.dumps(where | {"samples": samples}) + "\n")
            if step:
                train = {"train/loss": 4 - step / 50 + step % 2 / 10, "train/grad_norm": 1 / step}
                layers = {f"layers/{n}/weight_norm": step + n for n in range(8)}
                file.write(json.dumps(where | train | layers) + "\n")
    write_report(run, run.report)
    page = folder / "report.html"  # a name that needs no escaping in a URL
    run.report.replace(page)
    return page


@pytest.fixture
def open_page(browser, report):
    browser.requests()
    browser.ask("/url", {"url": report.as_uri()})
    return browser


def paths(browser) -> list[str]:
    return browser.run(
        "return [...document.querySelectorAll('#chart path[data-series]')].map(p "
        "=> p.dataset.series)"
    )


def test_text_of_a_run_is_escaped_and_nothing_is_fetched(open_page, report):
    assert open_page.run("return window.hit === undefined")
    assert open_page.text("h1") == "<svg onload='window.hit = 1'>&amp;"
    # data, page.js
    assert open_page.run("return document.querySelectorAll('script, img, h1 *').length") == 2
    assert open_page.text(".sample:nth-last-of-type(1) pre") == f"{HOSTILE}{HOSTILE} at 100"
    assert HOSTILE in open_page.text("main")
    marked = "return [...document.querySelectorAll('#chart .stage + text')].map(t => t.textContent)"
    assert open_page.run(marked) == ["stage 2"]
    own = ("data:", "chrome:", "chrome-untrusted:")  # the first tab
    fetched = [url for url in open_page.requests() if not url.startswith(own)]
    assert set(fetched) == {report.as_uri()}
    assert open_page.errors() == []


def test_the_content_security_policy_blocks_injected_scripts(open_page):
    injected = (
        "const s = document.createElement('script'); s.textContent = 'window.hit = 2'; "
        "document.body.append(s);"
    )
    assert open_page.run(injected + " return window.hit === undefined")


def test_the_mouse_shows_values(open_page):
    # raw and smoothed, validation
    assert paths(open_page) == ["train/loss", "train/loss", "val/loss"]
    open_page.hover("#chart", 40)
    where = re.fullmatch(r"step (\d+) · (\S+) tokens · (\S+) (s|min)", open_page.text("#reading"))
    step = int(where[1])
    assert 51 <= step <= 60
    assert where[2] == f"{step}K"
    value = float(re.search(r"train/loss ([\d.]+)", open_page.text("#legend"))[1])
    assert value == pytest.approx(4 - step / 50 + step % 2 / 10, abs=1e-3)
    assert "val/loss 3 (at 50)" in open_page.text("#legend")
    assert open_page.run("return document.querySelectorAll('#chart .cursor').length") == 1


def test_the_arrow_keys_show_values(open_page):
    open_page.keys("#chart", "\ue010")  # End
    assert open_page.text("#reading").startswith("step 100 ·")
    open_page.keys("#chart", "\ue012")  # left
    assert open_page.text("#reading").startswith("step 99 ·")
    open_page.keys("#chart", "\ue011")  # Home
    assert open_page.text("#reading").startswith("step 0 ·")


def test_series_axes_and_scales_can_be_selected(open_page):
    open_page.click("#legend button:nth-child(1)")
    assert paths(open_page) == ["val/loss"]
    open_page.click("#legend button:nth-child(2)")  # the last series cannot be hidden
    assert paths(open_page) == ["val/loss"]
    open_page.click("#legend button:nth-child(1)")
    ticks = "return [...document.querySelectorAll('#chart text')].map(t => t.textContent)"
    by_step = open_page.run(ticks)
    open_page.keys("#axis", "time")
    assert {"100 s", "time"} <= set(open_page.run(ticks))
    open_page.keys("#axis", "\ue011")  # Home
    assert open_page.run(ticks) == by_step
    shape = "return document.querySelector('#chart path:not(.raw)[data-series]').getAttribute('d')"
    before = open_page.run(shape)
    open_page.click("#log-y")
    assert open_page.run(shape) != before
    open_page.click("#log-x")
    assert "NaN" not in open_page.run("return document.querySelector('#chart').outerHTML")
    # This key moves to the left end, which is no smoothing.
    open_page.keys("#smoothing", "\ue011")
    assert paths(open_page) == ["train/loss", "val/loss"]


def test_the_menu_has_every_metric_and_groups_layers(open_page):
    names = open_page.run("return [...document.querySelector('#metric').options].map(o => o.value)")
    assert names == ["loss", "train/grad_norm", "layers/*/weight_norm", HOSTILE]
    open_page.click("#metric option:nth-child(3)")
    assert len(set(paths(open_page))) == 8
    assert open_page.run("return document.querySelectorAll('#legend button').length") == 8


def test_the_slider_selects_samples(open_page):
    visible = (
        "return [...document.querySelectorAll('.sample')].filter(s => !s.hidden).map(s => "
        "s.dataset.name)"
    )
    assert open_page.run(visible) == ["step 100, validation loss 2.000"]
    open_page.keys("#step-of-sample", "\ue011")
    assert open_page.run(visible) == ["step 0, validation loss 4.000"]
    assert (
        open_page.run("return document.activeElement.ariaValueText")
        == "step 0, validation loss 4.000"
    )
