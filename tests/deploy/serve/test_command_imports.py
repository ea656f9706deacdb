"""Imports of the command that starts an application: what it imports while it waits for Ray is all that follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
from deploy.config.application import ServeConfig
from deploy.serve import app
print(sorted({"ray", "torch", "transformers"} & set(sys.modules)))
app._import_what_follows()
before = set(sys.modules)
config = ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}})
app.build_app(config)
app._reached_at = lambda *_: ""
app.Running(config, None)
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("ray", "deploy", "workers")))
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_what_follows_is_imported_while_the_command_waits_for_ray() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "[]", "[]"]
