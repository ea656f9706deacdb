"""A test that outlives its time limit ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests.support import hanging

hanging.GRACE_S = 1.0
pytest_configure = hanging.pytest_configure
pytest_runtest_protocol = hanging.pytest_runtest_protocol
"""
TEST = """
import asyncio, time

async def spin():
    while True:
        time.sleep(60)

async def test_that_waits_for_a_task_beside_it():
    kept = asyncio.create_task(spin())
    await asyncio.Event().wait()
"""


MARKED = """
import pytest

@pytest.mark.timeout(timeout=0)
def test_that_has_no_limit():
    import time
    time.sleep(3)

@pytest.mark.timeout(60)
def test_of_a_limit_of_its_own():
    import time
    time.sleep(3)
"""


def test_limits_are_those_of_the_time_limit(tmp_path: Path) -> None:
    """Tests that take longer than the settings' limit and the grace, by limits of their own."""
    assert ended(tmp_path, MARKED).returncode == 0


def test_what_keeps_the_exception_of_its_time_limit_ends_all_the_same(tmp_path: Path) -> None:
    """The exception ends the task that spins, not the one that waits. Without the plugin this would wait for good."""
    found = ended(tmp_path, TEST)
    assert found.returncode != 0
    assert "Timeout (0:00:02)!" in found.stderr, found.stdout + found.stderr


def ended(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test file with limits of one second, behind which there is another one."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=1"]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    return subprocess.run(
        [*command, "--rootdir", folder, folder / "test_it.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
