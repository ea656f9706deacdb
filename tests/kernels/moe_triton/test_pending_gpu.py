"""INT4 experts between pending norms on a GPU: eager, and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pending_case import Pending

from kernels.runtime.hopper import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
    ),
]

K2: dict[str, Any] = {"chosen": 8, "experts": 40, "hidden": 7168, "intermediate": 512}
"""Kimi K2's on four ranks, of fewer experts."""
SMALL: dict[str, Any] = {"chosen": 2, "experts": 32, "hidden": 1024, "intermediate": 256}


def make(tokens: int, sizes: dict[str, Any], **more: Any) -> Pending:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return Pending(tokens, multiprocessors, device="cuda", **sizes, **more)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("sizes", [K2, SMALL], ids=["K2", "small"])
@pytest.mark.parametrize("more", [{}, {"holes": True, "padded": (0,)}], ids=["all", "holes and padding"])
@pytest.mark.parametrize("settled", [False, True])
def test_eager(sizes: dict[str, Any], tokens: int, more: dict[str, Any], settled: bool) -> None:
    case = make(tokens, sizes, **more)
    out = case.pending()
    case.run(out, settled=settled)
    case.check(out)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("before", [False, True])
def test_a_part_of_a_sum_over_ranks(tokens: int, before: bool) -> None:
    case = make(tokens, K2, before=before)
    out = case.pending().x_TE
    case.run(out, settled=True)
    case.check(out)


@pytest.mark.parametrize("tokens", [1, 6])
def test_replayed(tokens: int) -> None:
    """The output is put back before every replay, as it is added to; the result is that of the first call, bit for
    bit."""
    case = make(tokens, K2)
    out = case.pending()
    case.run(out, settled=True)
    case.check(out)
    assert case.before is not None
    assert case.kept is not None
    want = case.before.clone(), out.x_TE.clone(), out.square_TP.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out, settled=True)
    for _ in range(5):
        case.before.copy_(case.kept)
        case.case.poison(case.workspace, case.tiling)
        graph.replay()
        got = case.before, out.x_TE, out.square_TP
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
