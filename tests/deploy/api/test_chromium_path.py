"""Chromium is found where people have it, so that the tests of the page are not skipped in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium_path import chromium


def made(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return str(path)


def test_playwright_s_own_are_found_where_none_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PLAYWRIGHT_BROWSERS_PATH", raising=False)
    assert chromium() is None
    own = tmp_path / "cache" / "ms-playwright"
    shell = made(own / "chromium_headless_shell-1255" / "chrome-headless-shell-linux64" / "chrome-headless-shell")
    assert chromium() == shell
    made(own / "chromium-999" / "chrome-linux64" / "chrome")
    whole = made(own / "chromium-1255" / "chrome-linux64" / "chrome")
    assert chromium() == whole
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "elsewhere"))
    assert chromium() is None
    other = made(tmp_path / "elsewhere" / "chromium-1" / "chrome-linux-arm64" / "chrome")
    assert chromium() == other
    assert chromium() != made(tmp_path / "bin" / "google-chrome") == chromium()


def test_it_is_where_playwright_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    with sync_api.sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    assert chromium() is None
    assert made(Path(path)) == chromium()
