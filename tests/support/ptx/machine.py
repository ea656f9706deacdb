"""One block: its warps take turns."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.support.ptx import core
from tests.support.ptx.copies import Box, BoxCopy, MBarrier, ThreadCopies
from tests.support.ptx.memory import Fault, GlobalMemory, SharedMemory
from tests.support.ptx.parse import Program
from tests.support.ptx.step import Execute, Step, Warp, execution
from tests.support.ptx.translate import Translation
from tests.support.ptx.values import LANES, all_of

_PACES = (0.03, 1.0, 30.0)
"""Weights with which a warp is chosen: one is drawn for each warp, and for the copies, of each block."""
_TURNS = (10, 200, 10**9)
"""Most instructions in a turn."""


@dataclass(frozen=True)
class Launch:
    """State that the blocks of one launch share."""

    program: Program
    execute: tuple[Execute, ...]
    translation: Translation
    shared: int
    """Bytes of shared memory a block."""
    constants: dict[str, int]
    """Bits of parameters and of special registers that all blocks share."""
    boxes: dict[int, Box]
    """Tensor maps, by what stands for their addresses."""
    memory: GlobalMemory
    waits: bool
    """Whether programs must wait for the launch before: all of them, or one if none stores anything."""
    fences: bool
    """Whether products need a fence behind stores."""
    state: core.LaunchState
    """For `core.c`."""


def executions(program: Program) -> tuple[Execute, ...]:
    """Return the functions that execute each instruction.

    Raises:
        NotImplementedError: one is unknown.
    """
    return tuple(execution(instruction) for instruction in program.code)


class Block:
    """One block of a launch."""

    def __init__(self, launch: Launch, index: tuple[int, int, int], random: random.Random) -> None:
        self.launch, self.program, self.execute = launch, launch.program, launch.execute
        self.translation = launch.translation
        self.boxes, self.memory = launch.boxes, launch.memory
        self.constants = launch.constants | {f"%ctaid.{axis}": i for axis, i in zip("xyz", index, strict=True)}
        self.index, self.random = index, random
        self.waits = launch.waits
        self.shared = SharedMemory(launch.shared, launch.fences)
        count = launch.program.threads // LANES
        self._files = self.translation.files(count, self.constants)
        self._defined = np.zeros((count, len(self.translation.slots)), np.uint8)
        self.warps = [Warp(i, self, self._files[i], self._defined[i]) for i in range(count)]
        self.mbarriers: dict[int, MBarrier] = {}
        self.under_way: list[BoxCopy | ThreadCopies] = []
        self.laziness = random.choice((0.0, 0.1, 1.0))
        """Probability with which a wgmma is computed only when it is waited for."""

    @property
    def waited(self) -> bool:
        """Whether it has waited for the launch before."""
        return any(warp.waited for warp in self.warps)

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at an address of shared memory."""
        if address not in self.mbarriers:
            raise Fault(f"there is no mbarrier at byte {address}")
        return self.mbarriers[address]

    def run(self) -> None:
        """Run to the end. The next warp is drawn.

        Raises:
            Fault: the program did what it may not do, or cannot go on.
        """
        paces = [self.random.choice(_PACES) for _ in self.warps]
        copies_pace = self.random.choice(_PACES)
        while running := [warp for warp in self.warps if warp.runs]:
            ready = [warp for warp in running if _ready(warp)]
            able: list[Warp | BoxCopy | ThreadCopies] = [*ready, *self.under_way]
            if not able:
                places = ", ".join(f"{w.number}: {self.program.code[w.front()[0] or 0].text}" for w in running)
                raise Fault(f"{self._name()} hangs; warps wait at {places}; {self.mbarriers}")
            weights = [paces[warp.number] for warp in ready] + [copies_pace] * len(self.under_way)
            chosen = self.random.choices(able, weights)[0]
            if isinstance(chosen, Warp):
                self._turn(chosen, self.random.choice(_TURNS))
                continue
            self.under_way.remove(chosen)
            if isinstance(chosen, ThreadCopies):
                for target, values in chosen.copies:
                    self.shared.store(target, values, chosen.warp)
                chosen.barrier.move(chosen.arrivals, 0)
            else:
                self.shared.deliver(chosen.address, chosen.bytes)
                chosen.barrier.move(0, -chosen.bytes.size)
        self._check_end()

    def _turn(self, warp: Warp, most: int) -> None:
        warp.awaits = None
        while most > 0:
            most, at, lanes = warp.run(most)
            if at is None:
                return
            most -= 1
            warp.go(lanes, at + 1)
            instruction = self.program.code[at]
            step = Step(self, warp, instruction, at, lanes)
            try:
                if instruction.guard:
                    guard = step.value(instruction.guard, np.bool_)
                    guard = ~guard if instruction.negated else guard
                    if not all_of(guard):
                        step.lanes = lanes & guard
                        if all_of(~step.lanes):
                            continue
                self.execute[at](step)
            except AssertionError as error:
                raise self._located(error, warp, at) from None
            if warp.awaits is not None:
                return

    def _located(self, error: AssertionError, warp: Warp, at: int) -> AssertionError:
        """The error of an instruction, which says where it happened."""
        where = f"{self._name()}, warp {warp.number}, instruction {at}"
        return type(error)(f"{where}: {self.program.code[at].text}: {error}")

    def gather(self, warp: Warp, barrier: str, threads: int) -> None:
        """Let a warp wait at a barrier of threads, or let all that wait there go on. What one of them has waited for is
        there for all."""
        warp.awaits = barrier
        waiting = [other for other in self.warps if other.awaits == barrier]
        if len(waiting) == threads // LANES:
            waited = any(other.waited for other in waiting)
            for other in waiting:
                other.awaits, other.waited = None, waited

    def _check_end(self) -> None:
        if self.under_way or any(any(warp.copy_groups) or warp.copies for warp in self.warps):
            raise Fault(f"{self._name()} ends with copies that nobody waited for")
        if any(any(warp.product_groups) or warp.products for warp in self.warps):
            raise Fault(f"{self._name()} ends with products that nobody waited for")

    def _name(self) -> str:
        return f"{self.program.name}, block {self.index}"


def _ready(warp: Warp) -> bool:
    if isinstance(warp.awaits, tuple):
        barrier, parity = warp.awaits
        return bool(barrier.phase & 1 != parity)
    return warp.awaits is None
