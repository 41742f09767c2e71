"""Chromium, driven through chromedriver's HTTP interface."""

import json
import re
import shutil
import subprocess
import urllib.request

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
ARGUMENTS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--window-size=1000,900",
]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key of an element's id
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """A page in Chromium (https://www.w3.org/TR/webdriver2/)."""

    def __init__(self, driver: str, folder):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        port = next(
            re.search(r"port (\d+)\.", line)[1] for line in self.process.stdout if "started" in line
        )
        self.root = f"http://127.0.0.1:{port}/session"
        options = {"binary": BROWSER, "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.root += "/" + self.ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.root + path, data), timeout=60
        ) as answer:
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
        move = {
            "type": "pointerMove",
            "origin": {_ELEMENT: self.element(css)},
            "x": x,
            "y": 0,
            "duration": 0,
        }
        self.ask("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def text(self, css: str) -> str:
        return self.run(f"return document.querySelector('{css}').textContent")

    def requests(self) -> list[str]:
        """The URLs requested since the last call."""
        messages = [
            json.loads(entry["message"])["message"]
            for entry in self.ask("/se/log", {"type": "performance"})
        ]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[dict]:
        """The errors in the console since the last call."""
        return [
            entry
            for entry in self.ask("/se/log", {"type": "browser"})
            if entry["level"] == "SEVERE"
        ]

    def cdp(self, command: str, **parameters) -> None:
        """Send a command of Chrome's own protocol, for example to emulate a telephone."""
        self.ask("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        urllib.request.urlopen(
            urllib.request.Request(self.root, method="DELETE"), timeout=60
        ).close()
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()
