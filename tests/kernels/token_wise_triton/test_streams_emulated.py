"""Residual streams as they were compiled, called twice with dependent launches, run by the PTX emulator: what the first
call has written the second reads, and not from L1, where the first one's lines may still be."""

from __future__ import annotations

import re

import pytest
import torch
from token_wise_case import Streams

from kernels.residual_streams import FEWEST_LONG, FEWEST_TILED
from tests.support.ptx import Unordered, emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long


def run(gates: int, tokens: int = 2, *, dependent: bool = True, edit=lambda ptx: ptx) -> tuple[Streams, list[str]]:  # type: ignore[no-untyped-def]
    """A case after two calls, and the kernels that were launched."""
    case = Streams(tokens, features=256 if tokens < FEWEST_LONG else 32, gates=gates)
    with emulated(consecutive=True, edit=edit) as launches:
        for _ in range(2):
            case.run(dependent)
    return case, launches


@pytest.mark.parametrize(("gates", "tokens"), [(2, 2), (3, 2), (3, FEWEST_TILED), (3, FEWEST_LONG)])
def test_calls_behind_each_other_are_in_order(gates: int, tokens: int) -> None:
    (case, launches), (plain, _) = run(gates, tokens), run(gates, tokens, dependent=False)
    tiled, long = ("_many" if tokens >= fewest else "" for fewest in (FEWEST_TILED, FEWEST_LONG))
    assert launches == 2 * [f"add_to{tiled}_streams_kernel", f"read{long}_streams_kernel"]
    for name in case.outputs:
        assert torch.equal(case.tensors[name], plain.tensors[name])
        assert bool(case.tensors[name].float().isfinite().all())


@pytest.mark.parametrize(("gates", "tokens"), [(1, 66), (2, 66), (3, 66), (3, FEWEST_LONG)])
def test_tiles_as_they_were_compiled(gates: int, tokens: int) -> None:
    """More tokens than a tile has, and more features than a program, against formulas in float64."""
    case = Streams(tokens, features=320 if tokens < FEWEST_LONG else 288, gates=gates, mixed=gates == 1)
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
