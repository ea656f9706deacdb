"""Faults that no kernel may have are found, in kernels that are right without them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ptx_kernels import TILED, double, relay, ring_sum
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.support.ptx import Fault, Unordered, core, emulated

pytestmark = pytest.mark.long

TILES = 5
SEEDS = range(4)
Edit = Callable[[str], str]


def identity(ptx: str) -> str:
    return ptx


def sums(fault: str, seed: int, gathered: bool = False, edit: Edit = identity, short: int = 5) -> tuple[Any, Any]:
    """The sum of left @ tile, for a tensor that ends `short` rows inside the last tile, and what it should be."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(64, 16, generator=generator).bfloat16()
    x = torch.randn(TILES * 16 - short, 64, generator=generator).bfloat16()
    out = torch.full((64, 64), torch.nan)
    box = TensorDescriptor.from_tensor(x, [16, 64], TILED.value)
    with emulated(seed, edit=edit):
        ring_sum[(1,)](box, x, TILES * 16 - 5, left, out, TILES, GATHERED=gathered, FAULT=fault)
    tiles = torch.cat([x, torch.zeros(short, 64)]).double().view(TILES, 16, 64)
    return out, (left.double() @ tiles).sum(0)


def right(fault: str, seed: int, gathered: bool = False, edit: Edit = identity, short: int = 5) -> bool:
    """Whether the sum is what it should be."""
    out, want = sums(fault, seed, gathered, edit, short)
    return torch.allclose(out.double(), want, atol=1e-4)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_correct_ring_is_right_under_every_schedule(gathered: bool) -> None:
    assert all(right("none", seed, gathered) for seed in SEEDS)


@pytest.mark.parametrize("fault", ["hands back before the product", "reads before the copy"])
def test_a_race_gives_wrong_sums_under_some_schedule(fault: str) -> None:
    assert not all(right(fault, seed) for seed in range(8))


@pytest.mark.parametrize("fault", ["none", "reads before the copy"])
def test_the_core_does_not_change_the_schedule(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a race leaves behind depends on every draw: it is the same where instructions are executed one by one."""
    found = [sums(fault, seed)[0] for seed in range(8)]
    monkeypatch.setattr(core, "USED", False)
    for seed, out in enumerate(found):
        assert torch.equal(sums(fault, seed)[0].view(torch.int32), out.view(torch.int32))
    assert fault == "none" or len({tuple(out.view(torch.int32).flatten().tolist()) for out in found}) > 1


@pytest.mark.parametrize(
    ("fault", "gathered", "says"),
    [
        ("never hands back", False, "hangs; warps wait at .*mbarrier.try_wait"),
        ("hands back twice", False, "more arrivals at an mbarrier than it counts"),
        ("does not wait for its products", False, "ends with products that nobody waited for"),
        ("does not wait for its copies", True, "ends with copies that nobody waited for"),
        ("does not fence its copies", True, "without fence.proxy.async"),
    ],
)
def test_faults_of_rings_are_named(fault: str, gathered: bool, says: str) -> None:
    with pytest.raises(Fault, match=says):
        right(fault, 0, gathered)


def replaced(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Edit:
    def edit(ptx: str) -> str:
        changed = re.sub(pattern, by, ptx)
        assert changed != ptx
        return changed

    return edit


def test_a_copy_that_leaves_its_tensor() -> None:
    with pytest.raises(Fault, match=r"load of 16 bytes outside the arguments; .* at byte 9216"):
        right("none", 0, gathered=True, short=16)


def test_waits_for_the_wrong_phase() -> None:
    wait = r"(mbarrier\.try_wait\.parity\.shared\.b64 complete, \[%r\d+\]), (%r\d+);"
    assert not right("none", 0, edit=replaced(wait, r"xor.b32 %r99999, \2, 1; \1, %r99999;"))


def test_products_that_read_another_swizzle() -> None:
    """Mode 1 of a matrix descriptor is 128 bytes, mode 2 64 bytes."""
    other = replaced(r"\b(46116\d{14})\b", lambda found: str(int(found[1]) + (1 << 62)))
    assert not right("none", 0, edit=other)


def chain(*links: tuple[str, int, int], dependent: bool = True, edit: Edit = identity) -> None:
    """Launches of `double`, each with a fault and from one of three buffers into another."""
    buffers = [torch.full((32,), float(i)) for i in range(3)]
    with emulated(consecutive=True, edit=edit) as launches:
        for fault, source, target in links:
            want = 2 * buffers[source]
            double[(1,)](buffers[source], buffers[target], 32, fault, num_warps=1, launch_pdl=dependent)
            assert torch.equal(buffers[target], want)
    assert len(launches) == len(links)


TRIGGERS = "triggers first"


def test_a_correct_chain() -> None:
    chain(("", 0, 1), (TRIGGERS, 1, 2), (TRIGGERS, 2, 1), ("", 1, 2))


def test_reads_before_the_wait() -> None:
    with pytest.raises(Unordered, match="reads x before it waits, which double writes"):
        chain(("", 0, 1), ("reads before the wait", 1, 2))
    chain(("", 0, 1), ("reads before the wait", 0, 2))


def test_an_early_trigger_lets_launches_begin_beside_the_one_before_the_last() -> None:
    chain(("", 0, 1), ("", 0, 2), ("reads before the wait", 1, 0))
    with pytest.raises(Unordered, match="before it waits"):
        chain(("", 0, 1), (TRIGGERS, 0, 2), ("reads before the wait", 1, 0))


def test_a_launch_without_work_hands_on_its_place() -> None:
    """Such a launch lets the next begin at once, and ends when one of its programs has waited."""
    x, y = torch.ones(32), torch.zeros(32)

    def links(source: torch.Tensor) -> None:
        double[(1,)](x, y, 32, "", num_warps=1, launch_pdl=True)
        relay[(3,)](2, y, False, num_warps=1, launch_pdl=True)
        double[(1,)](source, torch.zeros(32), 32, "reads before the wait", num_warps=1, launch_pdl=True)

    with emulated(consecutive=True):
        links(x)
    with emulated(consecutive=True), pytest.raises(Unordered, match="before it waits, which double writes"):
        links(y)


@pytest.mark.parametrize(("waiting", "works", "blocks"), [(3, False, 3), (2, True, 2)], ids=["nobody", "who works"])
def test_a_launch_of_which_too_few_wait(waiting: int, works: bool, blocks: int) -> None:
    """One is enough where there is no work."""
    with emulated(), pytest.raises(Fault, match=f"relay ends without .* in {blocks} blocks"):
        relay[(3,)](waiting, torch.zeros(1), works, num_warps=1, launch_pdl=True)


def test_stale_lines_of_l1() -> None:
    links = (("", 0, 1), ("reads through L1", 1, 2), ("", 0, 1), ("reads through L1", 1, 2))
    with pytest.raises(Unordered, match="L1 may have it from before"):
        chain(*links)
    chain(*links, dependent=False)
    with pytest.raises(Unordered, match="L1"):  # the same by removing .cg
        chain(*((fault and "", *buffers) for fault, *buffers in links), edit=replaced(r"\.cg\b", ""))


@pytest.mark.parametrize(
    ("fault", "says"), [("stores before the wait", "stores before"), ("does not wait", "before it")]
)
def test_launches_that_do_not_wait(fault: str, says: str) -> None:
    with pytest.raises((Fault, Unordered), match=says):
        chain(("", 0, 1), (fault, 1, 2))


def test_a_launch_whose_wait_was_removed() -> None:
    with pytest.raises(Fault, match="stores before"):
        chain(("", 0, 1), edit=replaced(r"griddepcontrol\.wait;", ""))
