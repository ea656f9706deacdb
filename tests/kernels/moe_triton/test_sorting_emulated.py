"""The sort of few tokens' pairs as it was compiled, run by the PTX emulator."""

import pytest
import torch
from experts_case import Experts

from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "shared", "skewed", "rows"),
    [
        (17, 8, 66, 2, False, 16),
        (64, 8, 66, 2, True, 16),
        (300, 8, 66, 2, True, 64),
        (40, 9, 100, 0, False, 16),
        (4, 8, 66, 2, True, 2),
        (40, 4, 66, 1, True, 8),
    ],
)
def test_pairs_lie_expert_by_expert(
    tokens: int, chosen: int, experts: int, shared: int, skewed: bool, rows: int
) -> None:
    holes = not skewed
    case = Experts(tokens, chosen, experts, 16, 16, shared=shared, holes=holes, skewed=skewed, padded=(0, tokens - 1))
    tiling = case.tiling(spread=skewed, rows=rows)
    call = case.call(tiling, case.workspace(tiling))
    with emulated(fences=False) as launches:
        call.sort()
    assert launches == ["sort_few"]
    id = case.tensors["id"].flatten()
    in_order = torch.cat([(id == expert).nonzero().flatten() for expert in range(experts)])
    assert torch.equal(call.scratch.sorted_Y[: len(in_order)].long(), in_order)
    want, begin = [], 0
    for expert in range(experts):
        left = int((id == expert).sum())
        while left > 0:
            want.append([expert, begin, min(left, tiling.rows)])
            begin, left = begin + want[-1][2], left - tiling.rows
    table = call.scratch.table.view(-1, 4)
    settled = experts - shared if skewed else experts
    assert table[0].tolist() == [len(want), sum(expert < settled for expert, _, _ in want), 0, 0]
    assert table[1 : 1 + len(want), :3].tolist() == want
