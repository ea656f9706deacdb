"""The oldest transformers that pyproject.toml allows reads tokenizers and chat templates as the newest does.

All other tests run with the one in constraints.txt, whose models are the reference of ours; what serves takes its
tokenizers and templates alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/deploy/text", "tests/workers/vocabulary")
"""Tests of what is read with transformers."""


def oldest() -> str:
    """Return the lower bound of transformers."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (found[1] for line in asked if (found := re.fullmatch(r"transformers>=([\d.]+)", line)))
    return bound if bound.count(".") == 2 else f"{bound}.0"


def install(folder: Path, *requirements: str) -> None:
    """Put packages into `folder`, none of those that they ask for."""
    where = "--no-deps", "--python", sys.executable, "--target", str(folder)
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", *where, *requirements]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if ran.returncode and "no version of" not in ran.stderr:
        pytest.skip(f"cannot be fetched here: {ran.stderr.strip()[-200:]}")
    assert ran.returncode == 0, ran.stderr


def unmet(folder: Path) -> list[str]:
    """What the transformers in `folder` asks for that this environment has not, or has in other versions."""
    (old,) = distributions(name="transformers", path=[str(folder)])
    found = []
    for text in old.requires or ():
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            there = asked.specifier.contains(version(asked.name))
        except PackageNotFoundError:
            there = False
        if not there:
            found.append(f"{asked.name}{asked.specifier}")
    return found


@pytest.mark.long
def test_the_oldest_reads_tokenizers_and_templates(tmp_path: Path) -> None:
    """One minor version before it reads a tekken.json as other ids."""
    install(tmp_path, f"transformers=={oldest()}")
    if needed := unmet(tmp_path):
        install(tmp_path, *needed)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": paths}
    said = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    ran = subprocess.run(said, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ran.stdout.strip() == oldest(), ran.stderr
    marked = "not long and not soak and not alone and not gpu"
    tests = [sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(tests, env=environment, capture_output=True, text=True, timeout=480, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-4000:]
