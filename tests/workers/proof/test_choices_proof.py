"""The proofs let both sides of a comparison take the same experts; that the choices agree is proven by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kernels import moe
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import BatchLayout
from workers.step.decode import DecodeStep
from workers.step.parts import StepParts


@pytest.fixture
def parts(tmp_path: Path) -> StepParts:
    folder = write_tiny(tmp_path, "v3", n_routed_experts=16, num_experts_per_tok=2, n_group=1, topk_group=1)
    return engine(folder, width=1, max_rows=8, selftest=False).runner.parts


def check(parts: StepParts) -> tuple[str, ...]:
    step = DecodeStep(parts, BatchLayout(1, 8).graph_key(8, 0), Scratch(parts.device))
    [found] = SelfTest(parts).run([Candidate(step, step.run)])
    return found.problems


@pytest.mark.parametrize(("share", "noticed"), [(0.0, False), (0.25, False), (1.0, True)])
def test_choices(share: float, noticed: bool, parts: StepParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the prefill path's tokens chooses others."""
    distance, route = SelfTest._distance_from_prefill, moe.route

    def other(logit_TX: Tensor, bias: Any, id_TK: Tensor, *rest: Any, **options: Any) -> None:
        route(logit_TX, bias, id_TK, *rest, **options)
        chosen = id_TK[: int(share * len(id_TK)), :2]
        chosen.copy_((chosen + 7) % 16)

    def wrong(self: SelfTest, *of: Any) -> tuple[float, float]:
        with monkeypatch.context() as patch:
            patch.setattr(moe, "route", other)
            return distance(self, *of)

    monkeypatch.setattr(SelfTest, "_distance_from_prefill", wrong)
    problems = check(parts)
    assert any("agree with the prefill path in" in problem for problem in problems) is noticed
    assert noticed or not problems
