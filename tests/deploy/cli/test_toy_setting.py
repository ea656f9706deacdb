"""A new setting of the engine is one field, here that of toy_setting.py, and whatever reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def ran(*arguments: str, code: int = 0) -> str:
    """All that the command prints, on a wide terminal."""
    command = (sys.executable, "-m", "tests.deploy.cli.toy_setting", *arguments)
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", [("serve",), ("generate",), ("selftest",), ("fit",), ("bench", "latency")])
def test_help_tells_its_text_range_and_default(command: Sequence[str]) -> None:
    (line,) = (line for line in ran(*command, "--help").splitlines() if "--toy-pages" in line)
    assert re.search(r"INT \[2<=x<=9\] +Pages that a toy takes, beside \S*cache.pages\S* \[default: \(3\)\]", line)
    # The other setting is called as on this command's line, where it is there.
    assert ("--cache-pages" if command == ("serve",) else "`cache_pages`") in line


@pytest.mark.parametrize("command", [("serve",), ("generate", "--prompt", "x")])
def test_a_value_reaches_the_engine(command: Sequence[str]) -> None:
    assert "handed to the engine: 4\n" in ran(*command, "--toy-pages", "4")
    assert "handed to the engine: 3\n" in ran(*command)


def test_a_settings_file_has_it_and_a_flag_replaces_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine: {model: demo, toy_pages: 5}\n")
    assert ran("serve", "--config", str(file)) == "handed to the engine: 5\n"
    assert ran("serve", "--config", str(file), "--toy-pages", "6") == "handed to the engine: 6\n"


def test_mistakes_are_named_as_they_were_written(tmp_path: Path) -> None:
    out_of_range = "Input should be less than or equal to 9, not 10\n"
    assert ran("serve", "--toy-pages", "10", code=2) == f"error: --toy-pages: {out_of_range}"
    assert ran("generate", "--prompt", "x", "--toy-pages", "10", code=2) == f"error: --toy-pages: {out_of_range}"
    assert "--toy-pages" in ran("serve", "--toy-pages", "many", code=2)
    file = tmp_path / "serve.yaml"
    file.write_text("engine: {toy_pages: 10}\n")
    assert ran("serve", "--config", str(file), code=2) == f"error: engine.toy_pages: {out_of_range}"
    file.write_text("engine: {toy_pagse: 4}\n")
    assert "did you mean engine.toy_pages?" in ran("serve", "--config", str(file), code=2)


def test_the_documentation_has_it() -> None:
    page = ran("settings-page")
    assert yaml.safe_load(page)["engine"]["toy_pages"] == 3
    said = "--toy-pages: Pages that a toy takes, beside cache_pages. They are not used. [2<=x<=9]"
    assert f"  toy_pages: 3               # {said}\n" in page
