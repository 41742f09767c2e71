"""The chat page in Chromium: streaming, stop, settings, keyboard, screen reader, script
injection.
"""

import time

import pytest

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
from chat_templates import CALLING
from nanogpt_hf.serving import generation

pytestmark = pytest.mark.long
HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>"
ENTER = "\ue007"
ESCAPE = "\ue00c"
TAB = "\ue004"


@pytest.fixture
def answers(monkeypatch, chat_server):
    """Scripted answers, each a text or (text, seconds per token); returns the requests: prompt
    and options.
    """
    asked = []
    answers = []

    def generate(model, ids, **options):
        asked.append({"prompt": chat_server.served.tokenizer.decode(ids), **options})
        text, seconds = answers.pop(0)
        for token in chat_server.served.tokenizer(text, add_special_tokens=False)["input_ids"]:
            time.sleep(seconds)
            yield [token]

    monkeypatch.setattr(generation, "generate_tokens", generate)
    return answers, asked


@pytest.fixture
def page(browser, chat_server):
    browser.requests()
    browser.errors()
    browser.ask("/url", {"url": f"http://127.0.0.1:{chat_server.port}/"})
    wait_for(browser, "document.title === 'Chat with parrot'")
    return browser


def wait_for(page, condition):
    for _ in range(500):
        if page.run(f"return {condition}"):
            return
        time.sleep(0.02)
    raise AssertionError(f"{condition} did not become true within 10 seconds: {page.text('body')}")


def ask(page, text):
    page.keys("#input", text + ENTER)
    wait_for(page, "running === null")


def texts(page):
    return page.run("return [...document.querySelectorAll('#log .text')].map(p => p.textContent)")


def test_an_answer_is_shown_as_text_and_nothing_else_is_requested(page, chat_server, answers):
    answers[0].append((f"Hi {HOSTILE}", 0))
    ask(page, f"Say {HOSTILE}")
    assert texts(page) == [f"Say {HOSTILE}", f"Hi {HOSTILE}"]
    assert page.run(
        "return window.hit === undefined && document.querySelectorAll('main img, main "
        "script').length === 0"
    )
    own = [
        f"http://127.0.0.1:{chat_server.port}{path}"
        for path in ("/", "/v1/models", "/v1/chat/completions")
    ]
    # the first tab
    assert [url for url in page.requests() if not url.startswith(("data:", "chrome"))] == own
    assert page.errors() == []


def test_the_content_security_policy_blocks_injected_scripts_and_other_hosts(page):
    injected = (
        "const s = document.createElement('script'); s.textContent = 'window.hit = 2'; "
        "document.body.append(s);"
    )
    assert page.run(f"try {{ {injected} }} catch {{}} return window.hit === undefined")
    assert page.run(
        "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }"
    )
    elsewhere = "return fetch('http://localhost:9/').then(() => 'sent', () => 'failed')"
    assert page.run(elsewhere) == "failed"
    assert any("Content Security Policy" in entry["message"] for entry in page.errors())


def test_the_conversation_is_kept_until_new_chat(page, answers):
    answers[0].extend([("One.", 0), ("Two.", 0), ("Three.", 0)])
    for question in ("A?", "B?"):
        ask(page, question)
    assert answers[1][1]["prompt"].startswith(
        "### User:\nA?\n\n### Assistant:\nOne.<|endoftext|>### User:\nB?"
    )
    page.click("#new")
    assert texts(page) == []
    ask(page, "C?")
    assert answers[1][2]["prompt"] == "### User:\nC?\n\n### Assistant:\n"


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer(page, answers, how):
    answers[0].extend([("x" * 200, 0.02), ("Done.", 0)])
    page.keys("#input", "Go" + ENTER)
    wait_for(page, "document.querySelectorAll('#log .text')[1]?.textContent.length > 3")
    assert page.run("return document.querySelector('.assistant').ariaBusy") == "true"
    if how == "key":
        page.keys("#input", ESCAPE)
    else:
        page.click("#stop")
    wait_for(page, "running === null")
    stopped = texts(page)[1]
    assert 3 < len(stopped) < 200
    assert "stopped" in page.text(".note")
    ask(page, "Next")
    assert f"Assistant:\n{stopped}<|endoftext|>" in answers[1][1]["prompt"]


def test_settings_are_sent(page, answers):
    answers[0].extend([("One.", 0)] * 2)
    page.click("#toggle")
    page.run("document.querySelectorAll('aside input').forEach((input) => { input.value = ''; })")
    values = {"temperature": "0.5", "top-p": "0.9", "top-k": "7", "seed": "42", "max-tokens": "9"}
    for name, value in values.items():
        page.keys(f"#{name}", value)
    page.keys("#system", "Be brief.")
    ask(page, "A?")
    sent = answers[1][0]
    assert sent.pop("prompt").startswith("### System:\nBe brief.")
    sizes = {"top_k": 7, "seed": 42, "max_new_tokens": 9, "end_ids": {256}}
    assert sent == {"temperature": 0.5, "top_p": 0.9} | sizes


def test_an_error_is_shown_and_the_text_is_not_lost(page):
    ask(page, "long " * 60)
    assert "The request failed: messages:" in page.text("#error")
    assert (
        page.run("return document.querySelector('#input').value").strip() == "long " * 59 + "long"
    )
    assert texts(page) == []


def test_keyboard_and_screen_reader(page, answers):
    answers[0].append(("Spoken.", 0))
    assert page.run("return document.activeElement.id") == "input"
    ask(page, "A?")
    assert page.run("return document.activeElement.id") == "input"
    status = "document.querySelector('[role=status]').textContent"
    assert page.run(f"return {status}") == "Answer: Spoken."
    unnamed = (
        "[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length)"
    )
    assert page.run(f"return {unnamed}.length") == 0
    page.run("document.querySelector('#new').focus()")
    page.keys("#new", TAB)
    page.keys("#toggle", ENTER)
    assert page.run("return document.querySelector('#toggle').ariaExpanded") == "true"


def test_a_model_without_chat_template_continues_texts(browser, letter_model, running):
    with running(letter_model, "letters") as server:
        browser.ask("/url", {"url": f"http://127.0.0.1:{server.port}/"})
        wait_for(browser, "document.title === 'letters'")
        assert browser.text("#send") == "Continue"
        ask(browser, "abc")
        question, answer = texts(browser)
        assert question == "abc"
        assert len(answer) == 29
        browser.ask("/url", {"url": "about:blank"})


@pytest.fixture(scope="module")
def thinker(save_chat_model, tmp_path_factory, running):
    """A server of a model whose template writes thoughts."""

    def change(model, tokenizer):
        template = CALLING["hermes that thinks"]
        tokenizer.chat_template = template.replace("<|im_end|>", "<|endoftext|>")

    folder = tmp_path_factory.mktemp("models") / "thinker"
    save_chat_model(folder, change, n_positions=2048)
    with running(folder, "thinker") as server:
        yield server


def test_a_thought_is_folded_before_its_answer_and_sent_back(browser, thinker, monkeypatch):
    answers = [
        (f"<think>\nHm {HOSTILE}\n</think>\n\nFour.", 0),
        ("<think>\n" + "Hm. " * 40, 0.02),
        ("Yes.", 0),
    ]
    prompts = []

    def generate(model, ids, **options):
        tokenizer = thinker.served.tokenizer
        prompts.append(tokenizer.decode(ids))
        text, seconds = answers.pop(0)
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            time.sleep(seconds)
            yield [token]

    monkeypatch.setattr(generation, "generate_tokens", generate)
    browser.errors()
    browser.ask("/url", {"url": f"http://127.0.0.1:{thinker.port}/"})
    wait_for(browser, "document.title === 'Chat with thinker'")
    ask(browser, "2+2?")
    assert texts(browser) == ["2+2?", "Four."]
    fold = "document.querySelector('.assistant details')"
    assert browser.run(f"return {fold}.open") is False
    assert browser.text(".assistant summary") == "Thought"
    assert browser.text(".assistant details p") == f"Hm {HOSTILE}"
    assert browser.run(f"return {fold}.nextElementSibling.textContent") == "Four."
    browser.click(".assistant summary")
    assert browser.run(f"return {fold}.open") is True
    assert browser.run("return window.hit === undefined")
    # A thought that is stopped has no text after it.
    browser.keys("#input", "Sure?" + ENTER)
    wait_for(browser, "document.querySelectorAll('summary')[1]?.textContent === 'Thinking …'")
    browser.keys("#input", ESCAPE)
    wait_for(browser, "running === null")
    assert texts(browser)[3] == ""
    assert browser.run("return document.querySelectorAll('summary')[1].textContent") == "Thought"
    ask(browser, "Really?")
    assert texts(browser)[5] == "Yes."
    assert browser.run("return document.querySelectorAll('details').length") == 2
    assert f"<think>\nHm {HOSTILE}\n</think>\n\nFour.<|endoftext|>" in prompts[2]
    assert browser.errors() == []
    browser.ask("/url", {"url": "about:blank"})
