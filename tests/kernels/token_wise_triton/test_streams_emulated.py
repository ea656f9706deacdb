"""Residual streams as they were compiled, called twice with dependent launches, run by the PTX emulator: what the first
call has written the second reads, and not from L1, where the first one's lines may still be."""

from __future__ import annotations

import re

import pytest
import torch
from token_wise_case import Streams

from kernels.residual_streams import FEWEST_TILED
from tests.support.ptx import Unordered, emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long


def run(gates: int, tokens: int = 2, *, dependent: bool = True, edit=lambda ptx: ptx) -> tuple[Streams, list[str]]:  # type: ignore[no-untyped-def]
    """A case after two calls, and the kernels that were launched."""
    case = Streams(tokens, features=256 if tokens < FEWEST_TILED else 64, gates=gates)
    with emulated(consecutive=True, edit=edit) as launches:
        for _ in range(2):
            case.run(dependent)
    return case, launches


@pytest.mark.parametrize(("gates", "tokens"), [(2, 2), (3, 2), (3, FEWEST_TILED)])
def test_calls_behind_each_other_are_in_order(gates: int, tokens: int) -> None:
    (case, launches), (plain, _) = run(gates, tokens), run(gates, tokens, dependent=False)
    many = "_many" if tokens >= FEWEST_TILED else ""
    assert launches == 2 * [f"add_to{many}_streams_kernel", f"read{many}_streams_kernel"]
    for name in case.outputs:
        assert torch.equal(case.tensors[name], plain.tensors[name])
        assert bool(case.tensors[name].float().isfinite().all())


@pytest.mark.parametrize("gates", [1, 2, 3])
def test_tiles_as_they_were_compiled(gates: int) -> None:
    """Tokens beyond a tile's, features of several programs, against formulas in float64."""
    case = Streams(FEWEST_TILED + 2, features=576, gates=gates, mixed=gates == 1)
    with emulated():
        case.run()
    case.check()


@pytest.mark.parametrize(("what", "by"), [(r"ld\.global\.cg", "ld.global"), (r"griddepcontrol\.wait;", "")])
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [
        ("add_to_streams_kernel", 2),
        ("read_streams_kernel", 2),
        ("add_to_many_streams_kernel", FEWEST_TILED),
        ("read_many_streams_kernel", FEWEST_TILED),
    ],
)
def test_planted_faults_are_found(kernel: str, tokens: int, what: str, by: str) -> None:
    def edit(ptx: str) -> str:
        if not re.search(rf"\.entry {kernel}\(", ptx):
            return ptx
        assert re.search(what, ptx)
        return re.sub(what, by, ptx)

    with pytest.raises((Unordered, Fault)):  # what it reads, or a store before the wait
        run(3, tokens, edit=edit)
