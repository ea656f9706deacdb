"""docs/command-line.md tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deploy.config.application import ServeConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "command-line.md").read_text()
COMMANDS = re.findall(
    r"latentserve (serve|generate|fit|selftest|replay|bench latency|bench http) (.*--.*)",
    PAGE + (DOCS / "quick-start.md").read_text(),
)


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


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"#.*?(--[a-z-]+)", PAGE))))
def test_every_flag_of_the_settings_exists(command, flag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(rf"{flag}\s", command("serve", "--help").out)


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_flags_of_the_examples_exist(command, name, line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    known = command(*name.split(), "--help").out
    flags = re.findall(r"(?<!\S)--[a-z-]+", line)
    assert flags
    assert [flag for flag in flags if not re.search(rf"{flag}\s", known)] == []


README = DOCS.parent / "README.md"
TABLE = re.findall(r"^\|(.*)\| (?:bf16|FP8|INT4),", (DOCS / "models.md").read_text(), re.MULTILINE)
PUBLISHED = set(re.findall(r"[\w.-]+", " ".join(TABLE)))


def test_commands_show_models_that_are_published_in_a_format_that_is_read(command):
    """Where a command names a checkpoint, it is one that docs/models.md lists."""
    commands = ("serve", "generate", "fit", "selftest", "replay", "bench latency", "bench http")
    shown = [page.read_text() for page in (README, *DOCS.glob("*.md"))]
    shown += [command(*name.split(), "--help").out for name in commands]
    named = re.findall(r"(?:--model |MODEL=)\S*?([\w.-]*(?:DeepSeek|Kimi|Moonlight|GLM)[\w.-]*)", "\n".join(shown))
    assert len(named) > 5
    assert {name.lstrip(".") for name in named} <= PUBLISHED
