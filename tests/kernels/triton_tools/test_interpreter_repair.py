"""The repaired interpreter computes what torch computes; the unrepaired one must not, or the repair can go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import interpreter

pytestmark = pytest.mark.long

HERE = Path(__file__).parent


def test_narrow_floats() -> None:
    interpreter.interpreted_pytest([HERE / "interpreted_narrow_floats.py"])


def test_the_plain_interpreter_fails_these_tests() -> None:
    """Shows that the tests can fail, and says when a Triton release has made the repair superfluous."""
    code = (
        "import sys, pytest; from tests.support import interpreter; interpreter.repair = lambda: None;"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(HERE / 'interpreted_narrow_floats.py')!r}]))"
    )
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    for name in ("arithmetic", "products", "rounds_to_nearest", "reductions"):
        assert any(name in line for line in failed), (name, done.stdout)


def test_repair_refuses_a_compiling_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        interpreter.repair()


def test_failures_of_the_inner_run_are_shown(tmp_path: Path) -> None:
    bad = tmp_path / "interpreted_bad.py"
    bad.write_text("def test_no(): assert 1 == 2, 'seen outside'\n")
    with pytest.raises(AssertionError, match="seen outside"):
        interpreter.interpreted_pytest([bad])
