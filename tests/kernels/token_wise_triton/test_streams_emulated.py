"""Residual streams as they were compiled, called twice with dependent launches, run by the PTX emulator: what the first
call has written the second reads, and not from L1, where the first one's lines may still be."""

from __future__ import annotations

import re

import pytest
import torch
from token_wise_case import Streams

from tests.support.ptx import Unordered, emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long


def run(gates: int, *, dependent: bool = True, edit=lambda ptx: ptx) -> tuple[Streams, list[str]]:  # type: ignore[no-untyped-def]
    """A case after two calls, and the kernels that were launched."""
    case = Streams(2, features=256, gates=gates)
    with emulated(consecutive=True, edit=edit) as launches:
        for _ in range(2):
            case.run(dependent)
    return case, launches


@pytest.mark.parametrize("gates", [2, 3])
def test_calls_behind_each_other_are_in_order(gates: int) -> None:
    (case, launches), (plain, _) = run(gates), run(gates, dependent=False)
    assert launches == 2 * ["add_to_streams_kernel", "read_streams_kernel"]
    for name in case.outputs:
        assert torch.equal(case.tensors[name], plain.tensors[name])
        assert bool(case.tensors[name].float().isfinite().all())


@pytest.mark.parametrize("kernel", ["add_to_streams_kernel", "read_streams_kernel"])
@pytest.mark.parametrize(("what", "by"), [(r"ld\.global\.cg", "ld.global"), (r"griddepcontrol\.wait;", "")])
def test_planted_faults_are_found(kernel: str, what: str, by: str) -> None:
    def edit(ptx: str) -> str:
        if not re.search(rf"\.entry {kernel}\(", ptx):
            return ptx
        assert re.search(what, ptx)
        return re.sub(what, by, ptx)

    with pytest.raises((Unordered, Fault)):  # what it reads, or a store before the wait
        run(3, edit=edit)
