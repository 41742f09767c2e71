"""report.html in Chromium, driven through chromedriver's HTTP interface: mouse, keyboard, script injection."""

import json
import re
import shutil
import subprocess
import urllib.request

import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.runs.folder import RunFolder

HOSTILE = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'><!--<script>"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--window-size=1000,900"]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key of an element's id
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page in Chromium (https://www.w3.org/TR/webdriver2/)."""

    def __init__(self, driver: str, folder):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        port = next(re.search(r"port (\d+)\.", line)[1] for line in self.process.stdout if "started" in line)
        self.root = f"http://127.0.0.1:{port}/session"
        options = {"binary": BROWSER, "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.root += "/" + self.ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.root + path, data), timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str):
        return self.ask("/execute/sync", {"script": script, "args": []})

    def element(self, css: str) -> str:
        return self.ask("/element", {"using": "css selector", "value": css})[_ELEMENT]

    def click(self, css: str) -> None:
        self.ask(f"/element/{self.element(css)}/click", {})

    def keys(self, css: str, text: str) -> None:
        self.ask(f"/element/{self.element(css)}/value", {"text": text})

    def hover(self, css: str, x: int) -> None:
        """Move the mouse to `x` pixels from the middle of an element."""
        move = {"type": "pointerMove", "origin": {_ELEMENT: self.element(css)}, "x": x, "y": 0, "duration": 0}
        self.ask("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def text(self, css: str) -> str:
        return self.run(f"return document.querySelector('{css}').textContent")

    def requests(self) -> list[str]:
        """The URLs requested since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.ask("/se/log", {"type": "performance"})]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = shutil.which("chromedriver")
    if not (driver and BROWSER):
        pytest.skip("no Chromium with its chromedriver on this machine: apt-get install chromium chromium-driver")
    browser = Browser(driver, tmp_path_factory.mktemp("browser"))
    yield browser
    urllib.request.urlopen(urllib.request.Request(browser.root, method="DELETE"), timeout=60).close()
    browser.process.terminate()
    browser.process.wait(30)
    browser.process.stdout.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory, make_recipe):
    """The report of a run in which every text contains a script."""
    folder = tmp_path_factory.mktemp("report")
    run = RunFolder(folder / "<svg onload='window.hit = 1'>&amp;")
    run.path.mkdir()
    config = load_config(make_recipe(folder / "tiny.yaml", train__max_steps=100, tracking__project=HOSTILE))
    run.recipe.write_text(config_to_yaml(config))
    run.machine.write_text(json.dumps({"starts": [{"step": 0, "machine": HOSTILE, "versions": {HOSTILE: HOSTILE}}]}))
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
    return browser.run("return [...document.querySelectorAll('#chart path[data-series]')].map(p => p.dataset.series)")


def test_text_of_a_run_is_escaped_and_nothing_is_fetched(open_page, report):
    assert open_page.run("return window.hit === undefined")
    assert open_page.text("h1") == "<svg onload='window.hit = 1'>&amp;"
    assert open_page.run("return document.querySelectorAll('script, img, h1 *').length") == 2  # data, page.js
    assert open_page.text(".sample:nth-last-of-type(1) pre") == f"{HOSTILE}{HOSTILE} at 100"
    assert HOSTILE in open_page.text("main")
    fetched = [url for url in open_page.requests() if not url.startswith(("data:", "chrome:"))]  # the first tab
    assert set(fetched) == {report.as_uri()}
    errors = [entry for entry in open_page.ask("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]
    assert errors == []


def test_the_content_security_policy_blocks_injected_scripts(open_page):
    injected = "const s = document.createElement('script'); s.textContent = 'window.hit = 2'; document.body.append(s);"
    assert open_page.run(injected + " return window.hit === undefined")


def test_the_mouse_shows_values(open_page):
    assert paths(open_page) == ["train/loss", "train/loss", "val/loss"]  # raw and smoothed, validation
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
    open_page.keys("#smoothing", "\ue011")  # to the left end: none
    assert paths(open_page) == ["train/loss", "val/loss"]


def test_the_menu_has_every_metric_and_groups_layers(open_page):
    names = open_page.run("return [...document.querySelector('#metric').options].map(o => o.value)")
    assert names == ["loss", "train/grad_norm", "layers/*/weight_norm", HOSTILE]
    open_page.click("#metric option:nth-child(3)")
    assert len(set(paths(open_page))) == 8
    assert open_page.run("return document.querySelectorAll('#legend button').length") == 8


def test_the_slider_selects_samples(open_page):
    visible = "return [...document.querySelectorAll('.sample')].filter(s => !s.hidden).map(s => s.dataset.name)"
    assert open_page.run(visible) == ["step 100, validation loss 2.000"]
    open_page.keys("#step-of-sample", "\ue011")
    assert open_page.run(visible) == ["step 0, validation loss 4.000"]
    assert open_page.run("return document.activeElement.ariaValueText") == "step 0, validation loss 4.000"
