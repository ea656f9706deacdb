"""Ray Serve is imported without pandas, and whoever else wants pandas gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas")

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
PRELOAD = "import deploy.serve.preload"
SERVE = "import sys, ray.serve; from ray.serve._private import utils; print('pandas' in sys.modules, utils.pd)"
USED = "import pandas; print(pandas.DataFrame({'a': [1, 2]})['a'].sum())"


def said(*lines: str, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_serve_imports_pandas_if_nobody_spares_it() -> None:
    """As long as it does, it is worth while."""
    assert said(SERVE)[0].startswith("True <module 'pandas'")


@pytest.mark.parametrize("process", ["", "rank"])
def test_processes_of_our_ray_import_serve_without_it(process: str) -> None:
    assert said(PRELOAD, SERVE, LATENTSERVE_PROCESS=process) == ["False None"]


def test_pandas_is_there_before_and_afterwards() -> None:
    assert said(PRELOAD, USED, "import ray", USED) == ["3", "3"]
    assert said(PRELOAD, SERVE, USED) == ["False None", "3"]


def test_another_thread_gets_pandas_while_serve_is_imported() -> None:
    begin = "import sys, threading, types; sys.modules['ray.serve._private.utils'] = types.ModuleType('half-imported')"
    other = f"one = threading.Thread(target=lambda: exec({USED!r})); one.start(); one.join()"
    assert said(PRELOAD, begin, other) == ["3"]


def test_serve_knows_pandas_that_was_imported_before() -> None:
    before, known = said(PRELOAD, USED, SERVE)
    assert before == "3"
    assert known.startswith("True <module 'pandas'")


def test_it_is_spared_once() -> None:
    count = "import sys; print(len(sys.meta_path))"
    spare = "from deploy.cluster.spared_pandas import spare_pandas"
    one, two = said(spare, "spare_pandas()", count, "spare_pandas()", count)
    assert one == two
