"""No kernel is left out of the gates without a failure that names it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gated import launched

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
BOOKKEEPING = {f"kernels.decode_state.kernel.{name}" for name in ("feed", "advance", "feed_draft")}


def test_launched_are_kernels_and_not_what_they_call() -> None:
    found = launched()
    assert found > BOOKKEEPING | {"kernels.mla_decode.wide.attend_wide", "kernels.mla_prefill.hopper.attend_hopper"}
    assert {"kernels.moe.kernel.down", "kernels.moe.single.down", "kernels.few_experts.stream.down"} < found
    assert "kernels.decode_state.kernel._cache_slot" not in found


@pytest.mark.parametrize("processes", [0, 2])
def test_gates_of_some_kernels_alone_fail_and_name_the_others(processes: int) -> None:
    gates = ROOT / "tests/kernels/decode_state_triton/test_decode_state_hopper.py"
    command = [sys.executable, "-m", "pytest", "-p", "tests.gated", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-m", "gate", "-n", str(processes), "-k", "without_spills and (3 or 8)", str(gates)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "failed" not in ran.stdout
    named = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith("FAILED ")}
    assert named == launched() - BOOKKEEPING
