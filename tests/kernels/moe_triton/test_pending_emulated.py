"""INT4 experts between pending norms as they were compiled, run by the PTX emulator under drawn schedules, on memory
that holds poison."""

import re
from typing import Any

import pytest
import torch
from pending_case import Pending

from kernels.moe.pending import takes
from kernels.moe.schedule import ExpertsShape
from tests.support.ptx import Fault, Unordered, emulated


def case(tokens: int, chosen: int = 2, experts: int = 8, sizes: tuple[int, int] = (512, 256), **more: Any) -> Pending:
    return Pending(tokens, 1, chosen=chosen, experts=experts, hidden=sizes[0], intermediate=sizes[1], **more)


def check(found: Pending, seed: int = 0, *, settled: bool = True, tensor: bool = False, **how: Any) -> None:
    out = found.pending()
    with emulated(seed, consecutive=True, **how) as launches:
        found.run(out.x_TE if tensor else out, settled=settled)
    behind = ["product", "product", "combine_pending"]
    assert launches[-4:] == (["stream_gate_up"] if settled else launches[-4:-3]) + behind
    found.check(out.x_TE if tensor else out)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("settled", [False, True])
def test_from_pending_norm_to_pending_norm(tokens: int, settled: bool) -> None:
    check(case(tokens, experts=2 * tokens + 2), tokens, settled=settled)


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        case(1, 3, holes=True),
        case(1, padded=(0,)),
        case(1, 3, 5, shared=1),
        case(3, 3, 9, (768, 256), holes=True, padded=(1,)),
        case(2, sizes=(1280, 256)),
    ],
    ids=["pairs of no expert", "padding", "a shared expert", "several tokens", "many features"],
)
def test_calls_of_every_kind(found: Pending) -> None:
    check(found, 1)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("before", [False, True])
def test_a_part_of_a_sum_over_ranks(tokens: int, before: bool) -> None:
    check(case(tokens, before=before), tensor=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokens", "kernel", "what", "by"),
    [
        (3, "stream_gate_up", "mov.u32", "griddepcontrol.launch_dependents; mov.u32"),
        (1, "product", "griddepcontrol.wait;", ""),
        (3, "product", "griddepcontrol.wait;", ""),
        (1, "combine_pending", "griddepcontrol.wait;", ""),
    ],
    ids=[
        "the launch before starts them early",
        "the product of one token does not wait",
        "nor of several",
        "nor the sum",
    ],
)
def test_planted_faults_are_found(tokens: int, kernel: str, what: str, by: str) -> None:
    """The tiles, which several tokens have, are read behind that launch's start."""

    def edit(ptx: str) -> str:
        return ptx.replace(what, by) if re.search(rf"\.entry {kernel}\(", ptx) else ptx

    with pytest.raises((Fault, Unordered)):
        check(case(tokens), edit=edit)


def test_what_it_takes() -> None:
    """Hopper's kernels for few tokens with INT4 weights take some shapes and not others."""
    sizes: dict[str, Any] = {"chosen": 8, "experts": 384, "hidden": 7168, "intermediate": 2048, "hopper": 132}
    assert all(takes(ExpertsShape(tokens, **sizes)) for tokens in (1, 2, 16))
    for wrong in ({"hopper": 0}, {"hidden": 7296}, {"intermediate": 128}, {"groups": 2}, {"dtype": torch.float16}):
        assert not any(takes(ExpertsShape(tokens, **sizes | wrong)) for tokens in (1, 2, 16))
