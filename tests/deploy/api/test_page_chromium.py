"""The page in headless Chromium, where both Chromium and playwright are installed; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from chromium_path import chromium
from fake_engine import FakeEngine, out, serving
from test_selftest_endpoint import REPORT
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.messages import Distribution, EngineStats
from workers.protocol.plan import TopLogprobs

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=60_000)
CHROMIUM = chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; CONTRIBUTING.md says how to install one"),
    pytest.mark.timeout(300),
    pytest.mark.alone,
    pytest.mark.long,
]

KEY = "sesame"
FOX, JUMPS = (tiny().encode(text, add_special_tokens=False)[-1] for text in (" fox", " jumps"))
STATS = EngineStats(
    running=2,
    waiting=1,
    slots=64,
    pages_total=100,
    pages_free=60,
    acceptance=(0.8, 0.5),
    acceptance_falls=1,
    step_seconds={"decode": Distribution((10, 0), 0.05)},
    step_decode_rows={"decode": Distribution((10, 0), 30.0)},
    generated_tokens=50,
)


class Live(FakeEngine):
    """Says foxes, the second of three tokens a draft that was accepted; gets on a little whenever it is looked at."""

    looks = 0

    @property
    def stats(self) -> EngineStats:
        self.looks += 1
        return msgspec.structs.replace(STATS, generated_tokens=50 * self.looks)

    @stats.setter
    def stats(self, value: EngineStats) -> None: ...


def script(request: Any) -> Iterator[Any]:
    scores = [TopLogprobs(-0.25, (FOX, JUMPS), (-0.25, -1.5))] if request.sampling.logprobs >= 0 else []
    yield out(FOX, logprobs=scores)
    for _ in range(min(request.sampling.max_tokens, 200) // 2 - 1):
        yield out(FOX, JUMPS, logprobs=scores * 2)
        if request.sampling.max_tokens > 100:
            yield 0.05  # long enough to be stopped
    yield out(JUMPS, logprobs=scores, finish="length")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = Live(script)
    engine.selftest = REPORT
    with serving(create_app(engine, tiny(), ApiConfig(api_keys=(KEY,)))) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page with its key given; every error of its scripts, and all that its policy forbids, fails the test."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
    page.goto(url)
    page.fill("#api-key", KEY)
    expect(page.locator("#model-name")).to_have_text("tiny")
    yield page
    context.close()
    assert wrong == []


def test_a_chat_shows_drafts_and_how_likely_tokens_were(page: Any) -> None:
    page.click("summary")
    page.fill("[name=max_tokens]", "6")
    page.fill("#prompt", "hi")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#stats")).to_contain_text("Ended by: length")
    assert page.inner_text("#transcript .turn:nth-child(2) .said") == " fox" + " fox jumps" * 2 + " jumps"
    assert "6 tokens" in page.inner_text("#stats")
    assert "2 from accepted drafts" in page.inner_text("#stats")
    assert page.locator(".token").count() == 6
    assert page.locator(".token.drafted").count() == 2
    page.hover(".token.drafted >> nth=0")
    tip = page.inner_text("#tip")
    assert "78 %" in tip
    assert "an accepted draft" in tip
    assert "22 %" in tip
    page.mouse.move(0, 0)
    page.focus("#transcript")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.className") == "token drafted"
    assert page.is_visible("#tip")
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_a_completion_can_be_stopped(page: Any) -> None:
    page.check("[value=completion]")
    page.click("summary")
    page.fill("[name=max_tokens]", "200")
    page.fill("#prompt", "the")
    page.click("#send")
    expect(page.locator(".token >> nth=4")).to_be_attached()
    assert page.is_disabled("#send")
    page.click("#stop")
    expect(page.locator("#stats")).to_contain_text("Stopped.")
    assert page.is_enabled("#send")
    assert page.locator(".error:visible").count() == 0


def test_what_the_server_refuses_is_said(page: Any) -> None:
    page.click("summary")
    page.fill("[name=max_tokens]", "100000")
    page.fill("#prompt", "hi")
    page.click("#send")
    page.wait_for_selector("#transcript .error")
    assert "context" in page.inner_text("#transcript .error")


def test_markup_of_a_prompt_stays_text(page: Any) -> None:
    page.fill("#prompt", "<img src=x onerror=alert(1)><b>hi</b>")
    page.click("#send")
    page.wait_for_selector("#transcript .turn")
    assert "<b>hi</b>" in page.inner_text("#transcript")
    assert page.locator("#transcript img").count() == 0


def test_live_figures_and_the_self_test(page: Any) -> None:
    expect(page.locator("#charts path.series-0").first).to_have_attribute("d", re.compile("L"))
    assert page.locator("#charts figure").count() == 9
    texts = page.inner_text("#charts")
    assert "running 2" in texts
    assert "used 40" in texts
    assert "draft 1: 80 %" in texts
    assert "fell to half of what was usual: once" in texts
    assert "serving" in page.inner_text("#replicas")
    assert "4 x 3" in page.inner_text("#proof")
    assert "passed" in page.inner_text("#proof")
    assert "1 serving" in page.inner_text("#health")


def test_the_key_is_kept_for_the_session_and_asked_for_without(page: Any, browser: Any, url: str) -> None:
    assert page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])") == (
        '[{"latentserve-api-key":"sesame"},{}]'
    )
    page.reload()
    expect(page.locator("#model-name")).to_have_text("tiny")
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(url)
        expect(other.locator("#health")).to_contain_text("API key")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_phones_and_both_schemes(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    columns = page.evaluate("getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length")
    assert columns == (1 if width < 700 else 2)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 28)") == (scheme == "dark")


def test_everything_can_be_reached_by_keyboard(page: Any) -> None:
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body")
    assert {"api-key", "transcript", "prompt", "send", "clear", "SUMMARY", "which"} <= reached
