"""The page at `/`: how it is served, and that its files need nothing of other servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, say, serving
from tiny_tokenizer import tiny

import deploy.page
from deploy.api.app import POLICY, create_app
from deploy.config.api import ApiConfig

FOLDER = Path(deploy.page.__file__).parent
ASSETS = sorted(file for file in FOLDER.iterdir() if file.suffix not in (".py", ".pyc") and file.is_file())
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = (FOLDER / "index.html").read_text()


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = create_app(FakeEngine(say([5])), tiny(), ApiConfig(api_keys=("sesame",)))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


@pytest.mark.parametrize("file", ASSETS, ids=lambda file: file.name)
def test_every_file_is_served_without_a_key(http: httpx.Client, file: Path) -> None:
    answer = http.get(path_of(file))
    assert answer.status_code == 200
    assert answer.content == file.read_bytes()
    assert answer.headers["content-type"] == KINDS[file.suffix]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    head = http.head(path_of(file))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(file.stat().st_size)


def test_a_file_that_a_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    tag = http.get("/").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        answer = http.get("/", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
        assert answer.headers["content-security-policy"] == POLICY
    assert http.get("/", headers={"if-none-match": '"other"'}).status_code == 200
    assert http.get("/page/app.js").headers["etag"] != tag


@pytest.mark.parametrize("name", ["__init__.py", "index.html", "no.js", "..%2f..%2fapi%2fapp.py", "", "%00", "a/b.js"])
def test_nothing_else_is_served(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_it_can_be_switched_off() -> None:
    app = create_app(FakeEngine(say([5])), tiny(), ApiConfig(ui=False))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for path in ("/", "/page/app.js"):
            answer = http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "unknown_url"
        assert http.get("/live").status_code == 200
        assert http.get("/health").status_code == 200


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) <= {"'self'", "'none'"}
    assert {"script-src", "style-src", "connect-src", "base-uri", "form-action", "frame-ancestors"} <= rules.keys()


@pytest.mark.parametrize("file", ASSETS, ids=lambda file: file.name)
def test_no_file_asks_another_server(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
    assert re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+[^\s\"']*", text) == []
    assert not re.search(r"@import|data:(?!\")[a-z]+/|\burl\(", text)


def test_nothing_runs_inline() -> None:
    assert not re.search(r"\s(on\w+|style)=", INDEX)
    assert re.findall(r"<script(?![^>]*\ssrc=)", INDEX) == []
    assert "<style" not in INDEX
    scripts = "".join(file.read_text() for file in ASSETS if file.suffix == ".js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts)


def test_all_that_is_referred_to_is_there() -> None:
    names = {file.name for file in ASSETS}
    used = {*re.findall(r'(?:src|href)="page/([^"]+)"', INDEX), "index.html"}
    for file in ASSETS:
        if file.suffix == ".js":
            used |= set(re.findall(r'from "\./([^"]+)"', file.read_text()))
    assert used == names
    scripts = "".join(file.read_text() for file in ASSETS if file.suffix == ".js")
    there = set(re.findall(r'\sid="([^"]+)"', INDEX))
    assert set(re.findall(r'\bby\("([^"]+)"\)', scripts)) <= there
    assert set(re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', INDEX)) <= there
    assert set(re.findall(r'href="#([^"]+)"', INDEX)) <= there


def test_every_field_has_a_label() -> None:
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*>", INDEX)
    assert len(fields) > 10
    inside = "".join(re.findall(r"<label\b.*?</label>", INDEX, re.DOTALL))
    labelled = set(re.findall(r'<label for="([^"]+)"', INDEX))
    for field in fields:
        name = re.search(r'\sid="([^"]+)"', field)
        assert field in inside or (name and name[1] in labelled), field
    assert '<html lang="en">' in INDEX
    assert 'role="log" aria-live="polite"' in INDEX
    style = (FOLDER / "style.css").read_text()
    for rule in ("prefers-color-scheme: dark", "max-width: 700px", ":focus-visible"):
        assert rule in style
