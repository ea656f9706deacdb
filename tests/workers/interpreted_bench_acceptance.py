"""The kernels of synthetic acceptance, interpreted. Run with TRITON_INTERPRET=1, see test_bench_adaptive_width.py."""

from tests.support import interpreter

interpreter.repair()

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import agreement_case as case  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from synthetic_acceptance import Agreement  # noqa: E402


def test_drafts_are_accepted_as_often_as_is_said() -> None:
    agreement = Agreement(case.nowhere())
    case.check(agreement, agreement.launch)
    assert agreement._count.item() == 76


def test_drafts_are_random() -> None:
    agreement = Agreement(case.nowhere())
    case.check_drafts(agreement, agreement.launch_redraw)
