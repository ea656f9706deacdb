"""Takes the pictures of the page that the documentation shows, in Chromium, of an endpoint with some load.

    latentserve serve --model demo --replicas 2 --width 4
    python tests/page_pictures.py http://127.0.0.1:8000 docs

Writes page.png, page-dark.png and page-phone.png to the folder: an answer with its accepted drafts and the
probabilities of one of them, the charts of half a minute, and the result of the self-test.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent / "deploy" / "api"))

from chromium_path import chromium

PROMPT = "def read_lines(path):"
STREAMS = 6
LOOK_MS = 30_000
"""Milliseconds for which the charts are filled."""
PICTURES = {
    "page": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True},
}


def stream(url: str, number: int, over: Event) -> None:
    """Ask for one completion after the other."""
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        while not over.is_set():
            body = {"model": model, "prompt": f"class Part{number}:\n", "max_tokens": 200, "seed": number}
            client.post("/v1/completions", json=body).raise_for_status()


def take(browser: Any, url: str, options: dict[str, Any], to: Path) -> None:
    """One picture: ask, look at the charts for a while, point at a draft."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(url)
    page.click("summary")
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "40")
    page.click("summary")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    page.locator("#stats", has_text="Ended by").wait_for()
    page.wait_for_timeout(LOOK_MS)
    page.locator(".token.drafted").nth(1).hover()
    page.screenshot(path=to, full_page=True)
    context.close()


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if (path := chromium()) is None:
        sys.exit("there is no Chromium; CONTRIBUTING.md says how to install one")
    from playwright.sync_api import sync_playwright

    over = Event()
    with ThreadPoolExecutor(STREAMS) as pool, sync_playwright() as playwright:
        load = [pool.submit(stream, given.url, number, over) for number in range(STREAMS)]
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for name, options in PICTURES.items():
                take(browser, given.url, options, given.folder / f"{name}.png")
                print(given.folder / f"{name}.png", flush=True)
            browser.close()
        finally:
            over.set()
        for each in load:
            each.result()


if __name__ == "__main__":
    main()
