"""The settings and the commands of the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from settings_page import lines, written

from deploy.config.application import ServeConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "command-line.md").read_text()
NAMES = ("serve", "generate", "fit", "selftest", "replay", "bench latency", "bench http", "bench compare")
PAGES = {
    str(path.relative_to(ROOT)): re.sub(r"\\\n\s*", " ", path.read_text())  # a command of several lines as one
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}
COMMAND = re.compile(r"latentserve ((?:bench |weights )?[a-z]+)\b([^`\n|]*)")
COMMANDS = sorted({found for text in PAGES.values() for found in COMMAND.findall(text)})
"""Names and what follows them, in blocks of code and within lines."""
SCRIPTS = sorted(
    {
        found
        for text in PAGES.values()
        for found in re.findall(r"python (?:-m )?((?:assets|bench|tests)[\w/.]*)([^`\n|]*)", text)
    }
)
FLAG = r"(?<!\S)--[a-z][a-z-]+"


def settings_of(data: dict, prefix: str = ""):
    """Dotted names and values."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_every_setting_is_documented_with_its_default():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    documented = dict(settings_of(yaml.safe_load(block)))
    real = dict(settings_of(ServeConfig.model_validate({"engine": {"model": "demo"}}).model_dump(mode="json")))
    assert {name: value for name, value in real.items() if documented.get(name, "undocumented") != value} == {}
    assert documented.keys() - real.keys() == set()


def test_what_is_said_of_the_settings_is_what_their_models_say():
    """`python -m tests.settings_page` writes it."""
    assert written(PAGE) == PAGE
    assert all(len(line) <= 130 for line in lines())


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"#.*?(--[a-z-]+)", PAGE))))
def test_every_flag_of_the_settings_exists(command, flag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(rf"{flag}\s", command("serve", "--help").out)


def test_commands_of_all_pages_exist():
    assert {name for name, _ in COMMANDS} == {*NAMES, "weights drop"}  # the latter has no flags


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_the_examples_exist(command, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    known = command(*name.split(), "--help").out
    flags = {flag for other, line in COMMANDS if other == name for flag in re.findall(FLAG, line)}
    assert flags
    assert {flag for flag in flags if not re.search(rf"{flag}\s", known)} == set()


def test_scripts_and_their_flags_exist():
    """Flags are looked for in the scripts' files: `--no-` goes before a switch that is on."""
    assert len(SCRIPTS) > 20
    wrong = []
    for name, line in SCRIPTS:
        path = ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
        text = path.read_text() if path.exists() else ""
        flags = re.findall(FLAG, line)
        wrong += [name] if not text else []
        wrong += [(name, flag) for flag in flags if f'"{flag.replace("--no-", "--")}"' not in text]
    assert wrong == []


def test_flags_within_lines_belong_to_something(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    known = "".join(command(*name.split(), "--help").out for name in NAMES)
    known += "".join(path.read_text() for name in ("assets", "bench", "tests") for path in (ROOT / name).glob("*.py"))
    others = {"--metrics-export-port"}  # Ray's
    flags = {flag for text in PAGES.values() for flag in re.findall(r"`(--[a-z][a-z-]+)[^`]*`", text)}
    assert len(flags) > 30
    assert {flag for flag in flags if not re.search(rf"{flag}[\s\"]", known)} == others


TABLE = re.findall(r"^\|(.*)\| (?:bf16|FP8|INT4),", (DOCS / "models.md").read_text(), re.MULTILINE)
PUBLISHED = set(re.findall(r"[\w.-]+", " ".join(TABLE)))


def test_commands_show_models_that_are_published_in_a_format_that_is_read(command):
    """A checkpoint that a command names is one that docs/models.md lists."""
    shown = [*PAGES.values(), *(command(*name.split(), "--help").out for name in NAMES)]
    named = re.findall(r"(?:--model |MODEL=)\S*?([\w.-]*(?:DeepSeek|Kimi|Moonlight|GLM)[\w.-]*)", "\n".join(shown))
    assert len(named) > 5
    assert {name.lstrip(".") for name in named} <= PUBLISHED
