"""The proofs let both sides of a comparison take the same experts; that the choices agree is proven by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.models.choices import Taken
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import BatchLayout
from workers.step.decode import DecodeStep
from workers.step.parts import StepParts


@pytest.fixture
def parts(tmp_path: Path) -> StepParts:
    folder = write_tiny(tmp_path, "v3", n_routed_experts=16, num_experts_per_tok=2, n_group=1, topk_group=1)
    return engine(folder, width=1, max_rows=8, selftest=False).runner.parts


def check(parts: StepParts, *, plain: bool) -> tuple[str, ...]:
    step = DecodeStep(parts, BatchLayout(1, 8).graph_key(8, 0), Scratch(parts.device))
    [found] = SelfTest(parts, plain=plain).run([Candidate(step, step.run)])
    return found.problems


@pytest.mark.parametrize("reference", ["the plain forward pass", "the prefill path"])
@pytest.mark.parametrize(("share", "noticed"), [(0.0, False), (0.25, False), (1.0, True)])
def test_choices(
    share: float, noticed: bool, reference: str, parts: StepParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of the reference's tokens chooses others."""
    distance, settle = SelfTest._distance_from_reference, Taken.settle

    def other(self: Taken, id_TK: Tensor, weight_TK: Tensor) -> None:
        chosen = id_TK[: int(share * len(id_TK)), :2]
        chosen.copy_((chosen + 7) % 16)
        settle(self, id_TK, weight_TK)

    def wrong(self: SelfTest, *of: Any) -> tuple[float, float]:
        with monkeypatch.context() as patch:
            patch.setattr(Taken, "settle", other)
            return distance(self, *of)

    monkeypatch.setattr(SelfTest, "_distance_from_reference", wrong)
    problems = check(parts, plain=reference == "the plain forward pass")
    assert any(f"agree with {reference} in" in problem for problem in problems) is noticed
    assert noticed or not problems
