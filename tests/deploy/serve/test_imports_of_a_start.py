"""Imports of the command that starts an application, and of a front: which come when, and which do not come."""

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
print(sorted({"ray", "torch", "transformers", "httpx"} & set(sys.modules)))
app._import_what_follows()
before = set(sys.modules)
config = ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}})
app.build_app(config)
app._reached_at = lambda *_: ""
app.Running(config, None)
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("ray", "deploy", "workers", "httpx")))
app._health_problem("http://127.0.0.1:1")
print("httpx" in set(sys.modules) - before)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""

FRONT = """
import sys
import deploy.serve.replica as replica
def there():
    names = {"deploy.api.app", "deploy.api.job.job", "deploy.serve.heir", "transformers", "torch"}
    return sorted(names & set(sys.modules))
print(there())
replica.import_what_answers()
print(there())
before = set(sys.modules)
from deploy.api.app import create_app
from deploy.serve.heir import Heir
from deploy.serve.journals import Journals
from deploy.serve.under_serve import UnderServe
print(sorted(set(sys.modules) - before))
"""


def run(program: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_front_begins_its_ranks_before_it_imports_what_makes_answers() -> None:
    """Ranks are begun with what is imported with the class of the front."""
    assert run(FRONT) == ["[]", "['deploy.api.app', 'deploy.api.job.job', 'deploy.serve.heir']", "[]"]


def test_what_follows_is_imported_while_the_command_waits_for_ray() -> None:
    assert run(PROGRAM) == ["[]", "[]", "False", "[]"]
