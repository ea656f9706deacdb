"""Imports of the command that starts an application, and of a front: which come when, and which do not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.config.application import ServeConfig
from deploy.serve import replica

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

GRAMMARS = """
import sys
from deploy.config.application import ServeConfig
from deploy.serve.replica import import_what_checks_grammars, read_what_answers
def there():
    return sorted({"torch", "xgrammar", "transformers"} & set(sys.modules))
def config(gpus_per_rank):
    return ServeConfig.model_validate({"engine": {"model": "demo"}, "gpus_per_rank": gpus_per_rank})
tokenizer = read_what_answers(config(0))
print(there())
print(import_what_checks_grammars(config(0)))
import_what_checks_grammars(config(1)).join()
print(there())
from deploy.api.job.constraint import problem_of
from workers.protocol.grammar import Grammar
try:
    print(problem_of(Grammar("regex", "[a-z]+")), problem_of(Grammar("regex", "(")) is None)
except OSError as error:
    print(error)
print(tokenizer.encode("a") == read_what_answers(config(0)).encode("a"))
"""


def run(program: str, **environment: str) -> list[str]:
    given = {**os.environ, **environment}
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=given, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_front_of_ranks_on_gpus_can_check_grammars_before_it_serves() -> None:
    assert run(GRAMMARS) == [
        "['transformers']",
        "None",
        "['torch', 'transformers', 'xgrammar']",
        "None False",
        "True",
    ]


def test_a_front_that_cannot_check_grammars_serves_whatever_has_none(tmp_path: Path) -> None:
    (tmp_path / "xgrammar.py").write_text("raise OSError('libxgrammar.so: cannot open shared object file')")
    assert run(GRAMMARS, PYTHONPATH=str(tmp_path)) == [
        "['transformers']",
        "None",
        "['transformers']",
        "libxgrammar.so: cannot open shared object file",
        "True",
    ]


@pytest.mark.parametrize("ready", [False, True])
async def test_a_front_whose_ranks_are_there_before_it_imports_no_more(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that started ahead of Ray may be: what the front imports then would hold up its first answer."""
    imported: list[ServeConfig] = []
    monkeypatch.setattr(replica, "read_what_answers", lambda config: None)
    monkeypatch.setattr(replica, "import_what_checks_grammars", imported.append)

    async def start() -> Any:
        return SimpleNamespace(serves=ready, ready=stop)

    async def stop(timeout_s: float) -> None:
        raise TimeoutError

    made: Any = SimpleNamespace(
        config=ServeConfig.model_validate({"engine": {"model": "demo"}}),
        status_store=SimpleNamespace(say=lambda line: None),
        processes=SimpleNamespace(asks_ahead=True, not_ahead="", placements=[]),
        _start_processes=start,
    )
    with pytest.raises(TimeoutError):
        await replica.EngineReplica._bring_up(made)
    assert bool(imported) != ready


def test_a_front_begins_its_ranks_before_it_imports_what_makes_answers() -> None:
    """Ranks are begun with what is imported with the class of the front."""
    assert run(FRONT) == ["[]", "['deploy.api.app', 'deploy.api.job.job', 'deploy.serve.heir']", "[]"]


def test_what_follows_is_imported_while_the_command_waits_for_ray() -> None:
    assert run(PROGRAM) == ["[]", "[]", "False", "[]"]
