"""Copies that run beside the threads, and the mbarriers that tell of them (PTX ISA: asynchronous copy, mbarrier).

A copy may write its target from when it is issued to when it is waited for. So the target is poisoned at once, and
what was copied arrives as late as it can: cp.async's at the wait, a box's any time before its mbarrier's phase ends.
Both read global memory at once, which is the earliest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.support.ptx.memory import Fault
from tests.support.ptx.parse import inside
from tests.support.ptx.step import Step, executes
from tests.support.ptx.values import LANES, Lanes


@dataclass
class MBarrier:
    """Barrier whose phase ends when nothing is pending: arrivals, nor bytes of copies."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def move(self, arrivals: int, bytes_expected: int) -> None:
        """Arrivals, and bytes that are expected or, below 0, have come."""
        self.pending -= arrivals
        self.bytes += bytes_expected
        if self.pending < 0:
            raise Fault("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


@dataclass(frozen=True)
class Box:
    """A tensor map: boxes of a tensor. Sizes and strides are in elements, the outermost dimension first."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    """Bytes."""
    swizzle: int
    """0 none, 1, 2, 3: 32, 64, 128 bytes."""

    def __post_init__(self) -> None:
        """Refuse what cuTensorMapEncodeTiled refuses.

        Raises:
            ValueError: no such map exists.
        """
        if self.begin % 16 or self.strides[-1] != 1 or any(s * self.element % 16 for s in self.strides[:-1]):
            raise ValueError(f"a descriptor begins and has rows at multiples of 16 bytes: {self}")
        if max(self.box) > 256 or (self.swizzle and self.box[-1] * self.element > 16 << self.swizzle):
            raise ValueError(f"a descriptor's box is too large: {self}")


@dataclass(frozen=True, eq=False)
class BoxCopy:
    """A box under way."""

    address: Lanes
    bytes: Lanes
    barrier: MBarrier


@dataclass(frozen=True, eq=False)
class ThreadCopies:
    """Copies of a warp's threads under way, whose end is one arrival of each thread."""

    copies: list[tuple[Lanes, Lanes]]
    """Targets and bytes."""
    barrier: MBarrier
    warp: int
    arrivals: int


def swizzled(address: Lanes, mode: int) -> Lanes:
    """Return where in shared memory lies what lies at `address` without a swizzle (PTX ISA: swizzling modes)."""
    return np.asarray(address ^ (((address >> 7) & ((1 << mode) - 1)) << 4))


@executes("cp.async.cg.shared.global cp.async.ca.shared.global", "L2::cache_hint L2::128B L2::256B")
def _copy(step: Step) -> None:
    lanes, size = step.lanes, int(step.operands[2], 0)
    target, source = step.address(step.operands[0])[lanes], step.address(step.operands[1])[lanes]
    given = step.read(3, np.uint32)[lanes] if len(step.operands) > 3 else np.full(lanes.sum(), size)
    if ((given != 0) & (given != size)).any():
        raise Fault("copies of a part are not emulated")
    if (source % np.uint64(size)).any():
        raise Fault(f"a copy's source is no multiple of {size}")
    values = np.zeros((len(target), size), np.uint8)
    if given.any():
        cached = step.parts[2] == "ca"
        values[given > 0] = step.block.memory.load(source[given > 0], size, waited=step.warp.waited, cached=cached)
    step.block.shared.poison(target, size)
    step.warp.copies.append((target, values))


@executes("cp.async.commit_group")
def _commit(step: Step) -> None:
    step.warp.copy_groups.append(step.warp.copies)
    step.warp.copies = []


@executes("cp.async.wait_group")
def _wait_group(step: Step) -> None:
    while len(step.warp.copy_groups) > int(step.operands[0]):
        for target, values in step.warp.copy_groups.pop(0):
            step.block.shared.store(target, values, step.warp.number)


@executes("cp.async.mbarrier.arrive.noinc", "shared shared::cta")
def _arrive_behind_copies(step: Step) -> None:
    warp, address = step.warp, step.address(step.operands[0])[step.lanes]
    if len(set(address)) > 1:
        raise Fault("lanes arrive at different mbarriers")
    copies = [copy for group in [*warp.copy_groups, warp.copies] for copy in group]
    warp.copy_groups, warp.copies = [], []
    barrier = step.block.mbarrier(int(address[0]))
    step.block.under_way.append(ThreadCopies(copies, barrier, warp.number, len(address)))


@executes("cp.async.bulk.prefetch", "L2 global")
def _prefetch(step: Step) -> None:
    addresses, sizes = step.address(step.operands[0]), step.value(step.operands[1], np.int32)
    for lane in np.flatnonzero(step.lanes):
        address, size = int(addresses[lane]), int(sizes[lane])
        if address % 16 or size % 16:
            raise Fault("address and size of a bulk prefetch are multiples of 16")
        step.block.memory.hold(address, size)


@executes("prefetch", "global L2")
def _prefetch_line(step: Step) -> None:
    addresses = step.address(step.operands[0])
    for lane in np.flatnonzero(step.lanes):
        step.block.memory.hold(int(addresses[lane]), 1)


@executes("cp.async.bulk.tensor", "1d 2d 3d 4d 5d tile shared::cluster shared::cta global mbarrier::complete_tx::bytes")
def _copy_box(step: Step) -> None:
    lane, block = step.one_lane(), step.block
    if step.parts[4] == "global":
        raise Fault("copies to global memory are not emulated")
    descriptor, coordinates = inside(step.operands[1])
    box = block.boxes[int(step.value(descriptor, np.uint64)[lane])]
    starts = [int(step.value(name, np.int32)[lane]) for name in inside(coordinates)]
    target = int(step.address(step.operands[0])[lane])
    barrier = block.mbarrier(int(step.address(step.operands[2])[lane]))
    if target % 128:
        raise Fault("a box's target is no multiple of 128 bytes")
    if starts[0] * box.element % 16:
        raise Fault("a box begins at no multiple of 16 bytes of a row, which a GPU calls an illegal instruction")
    at = np.indices(box.box).reshape(len(box.box), -1).T + np.array(starts[::-1])
    within = ((at >= 0) & (at < np.array(box.shape))).all(1)
    values = np.zeros((len(at), box.element), np.uint8)
    if within.any():
        source = (box.begin + (at[within] * np.array(box.strides)).sum(1) * box.element).astype(np.uint64)
        values[within] = block.memory.load(source, box.element, waited=step.warp.waited, cached=False)
    values = values.reshape(-1, 16)
    address = swizzled(target + 16 * np.arange(len(values)), box.swizzle)
    block.shared.poison(address, 16)
    block.under_way.append(BoxCopy(address, values, barrier))


@executes("mbarrier.init mbarrier.inval mbarrier.arrive mbarrier.expect_tx", "expect_tx shared shared::cta")
def _mbarrier(step: Step) -> None:
    address = step.address(step.operands[1] if step.operands[0] == "_" else step.operands[0])
    given = step.operands[-1]
    number = np.ones(LANES, np.uint32) if given[0] == "[" else step.value(given, np.uint32)
    for lane in np.flatnonzero(step.lanes):
        place, count = int(address[lane]), int(number[lane])
        if step.parts[1] == "init":
            step.block.mbarriers[place] = MBarrier(count, count)
        elif step.parts[1] == "inval":
            step.block.mbarrier(place)
            del step.block.mbarriers[place]
        elif "expect_tx" not in step.parts:
            step.block.mbarrier(place).move(count, 0)
        else:
            step.block.mbarrier(place).move(step.parts[1] == "arrive", count)


@executes("mbarrier.try_wait.parity", "shared shared::cta")
def _try_wait(step: Step) -> None:
    """Suspends the warp until the phase ends, as the instruction may; or says at times that it did not."""
    address, parity = step.address(step.operands[1])[step.lanes], step.read(2, np.uint32)[step.lanes] & 1
    if len(set(address)) > 1 or len(set(parity)) > 1:
        raise Fault("lanes wait for different things")
    barrier = step.block.mbarrier(int(address[0]))
    ended = barrier.phase & 1 != int(parity[0])
    if not ended and step.block.random.random() < 0.75:
        step.warp.awaits = barrier, int(parity[0])
        step.warp.go(step.lanes, step.at)
    else:
        step.write(np.full(LANES, ended))


@executes("fence.proxy.async", "shared::cta")
def _proxy_fence(step: Step) -> None:
    step.block.shared.fence(step.warp.number)
