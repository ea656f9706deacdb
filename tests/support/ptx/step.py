"""One instruction on one warp: its operands, and who executes which instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx.memory import Fault
from tests.support.ptx.parse import Instruction, inside
from tests.support.ptx.values import BITS, LANES, TYPES, Lanes, Type, all_of, constant, reinterpret, size

if TYPE_CHECKING:
    from tests.support.ptx.machine import Block

_REGISTERS: dict[str, Type] = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64}
_ADDRESS = re.compile(r"(.+?)(?:\s*\+\s*(-?\d+))?")
_LANE = np.arange(LANES, dtype=np.uint32)
ALL = np.ones(LANES, bool)
"""All lanes."""
ALL.flags.writeable = False


@cache
def register_type(name: str) -> Type | None:
    """What a register of the compiler's holds; those of inline assembly hold what they are given."""
    return _REGISTERS.get(name.rstrip("0123456789")) if name[-1].isdigit() else None


@lru_cache(maxsize=1 << 14)
def address_parts(text: str) -> tuple[str, int, Type]:
    """Of [register + offset] the register, the offset and the address's type."""
    found = _ADDRESS.fullmatch(text.strip("[] "))
    assert found
    return found[1], int(found[2] or 0), np.uint64 if found[1].startswith("%rd") else np.uint32


class Registers(dict[str, Lanes]):
    """Of a warp. They are replaced, never written into."""

    def __missing__(self, name: str) -> Lanes:
        """What one holds that nobody has written."""
        own = register_type(name)
        if own is None:
            raise Fault(f"{name} is unknown")
        return np.ones(LANES, bool) if own is np.bool_ else np.full(LANES, ~own(0), own)


class Warp:
    """The state of 32 threads that run in step. Those that have branched apart run in the order of their places in the
    code, so they meet again behind the branch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.registers = Registers()
        self.ended = np.zeros(LANES, bool)
        self.runs = True
        """Whether a lane has not ended."""
        self._together: int | None = 0  # the place in the code where all lanes are, unless each has one of its own
        self._at = np.zeros(LANES, np.int64)
        self.waited = False
        """Whether it has executed griddepcontrol.wait, or met one that has at a barrier of threads."""
        self.awaits: Any = None
        """What it cannot go on without: a barrier of threads, or (mbarrier, parity)."""
        self.copies: list[tuple[Lanes, Lanes]] = []
        """(addresses, bytes) of cp.async that no group holds yet."""
        self.copy_groups: list[list[tuple[Lanes, Lanes]]] = []
        self.products: list[Callable[[], None] | None] = []
        """wgmma products that no group holds yet: what computes them, nothing for one that is computed."""
        self.sums: dict[tuple[str, ...], tuple[tuple[Lanes, ...], Lanes]] = {}
        """Sums that products have written, by the registers' names: the registers' values, and the matrix of them."""
        self.product_groups: list[list[Callable[[], None] | None]] = []

    def front(self) -> tuple[int | None, Lanes]:
        """The place in the code from which the next instruction comes, if a lane still runs, and the lanes there."""
        if self._together is not None:
            return self._together, ALL
        running = ~self.ended
        if not running.any():
            return None, running
        at = int(self._at[running].min())
        lanes = running & (self._at == at)
        if not all_of(lanes):
            return at, lanes
        self._together = at
        return at, ALL

    def go(self, lanes: Lanes, place: int | Lanes) -> None:
        """Let lanes go on from a place, or from one for each of them."""
        if lanes is ALL and isinstance(place, int):
            self._together = place
            return
        self._apart()
        self._at[lanes] = place

    def end(self, lanes: Lanes) -> None:
        """Let lanes end."""
        self._apart()
        self.ended |= lanes
        self.runs = not all_of(self.ended)

    def _apart(self) -> None:
        if self._together is not None:
            self._at[:], self._together = self._together, None


class Step:
    """One instruction on those lanes of a warp that execute it."""

    __slots__ = ("at", "block", "instruction", "lanes", "operands", "parts", "warp")

    def __init__(self, block: Block, warp: Warp, instruction: Instruction, at: int, lanes: Lanes) -> None:
        self.block, self.warp, self.instruction, self.at, self.lanes = block, warp, instruction, at, lanes
        self.parts, self.operands = instruction.parts, instruction.operands

    @property
    def type(self) -> Type:
        """The type that the opcode ends with."""
        return TYPES[self.parts[-1]]

    def read(self, i: int, kind: Type | None = None) -> Lanes:
        """Operand i."""
        return self.value(self.operands[i], kind or self.type)

    def value(self, name: str, kind: Type) -> Lanes:
        """A register, a special register, a parameter, an address or a literal."""
        known = self.warp.registers.get(name)
        if known is not None:
            return reinterpret(known, kind)
        if name[0] == "!":
            return np.logical_not(self.value(name[1:], kind))
        if register_type(name):
            return reinterpret(self.warp.registers[name], kind)
        if name in self.block.constants:
            return np.full(LANES, self.block.constants[name], BITS[size(kind)]).view(kind)
        if name == "%tid.x":
            return reinterpret(_LANE + np.uint32(self.warp.number * LANES), kind)
        if name == "%laneid":
            return reinterpret(_LANE, kind)
        try:
            return constant(name, kind)
        except ValueError:
            raise Fault(f"{name} is unknown") from None

    def write(self, value: Lanes, i: int = 0) -> None:
        """The result, to operand i."""
        self.set(self.operands[i], value)

    def set(self, name: str, value: Lanes, lanes: Lanes | None = None) -> None:
        """Write a register in the lanes that execute, or in others. Small values are extended by their sign."""
        if name == "_":
            return
        lanes = self.lanes if lanes is None else lanes
        kind = value.dtype.type
        if kind is not np.bool_:
            own = register_type(name) or BITS[value.itemsize]
            if own is not kind:
                value = value.view(own) if value.itemsize == size(own) else value.astype(own)
        registers = self.warp.registers
        if lanes is not ALL and name in registers and not all_of(lanes):
            value = np.where(lanes, value, registers[name])
        registers[name] = value

    def vector(self, i: int) -> tuple[str, ...]:
        """The registers of operand i."""
        return inside(self.operands[i])

    def address(self, text: str) -> Lanes:
        """[register + offset], uint64, of all lanes."""
        name, offset, kind = address_parts(text)
        address = self.value(name, kind).astype(np.int64) + offset
        if kind is np.uint32:
            # The sum is as wide as the register: compilers leave a negative one there that the offset makes up for.
            address &= 0xFFFFFFFF
        return address.view(np.uint64)

    def one_lane(self) -> int:
        """The lane that executes, which must be alone."""
        if self.lanes.sum() != 1:
            raise Fault("several lanes execute what one should")
        return int(self.lanes.argmax())

    def whole_warp(self) -> None:
        """Fault unless all lanes execute."""
        if not self.lanes.all():
            raise Fault("some lanes do not execute what all must")


Execute = Callable[[Step], None]
_known: dict[str, tuple[Execute, frozenset[str]]] = {}


def executes(names: str, modifiers: str = "") -> Callable[[Execute], Execute]:
    """Register how the instructions `names` are executed, with these modifiers beside types.

    A name is the beginning of an opcode; the longest one that fits counts.
    """

    def register(execute: Execute) -> Execute:
        for name in names.split():
            _known[name] = execute, frozenset(modifiers.split())
        return execute

    return register


def execution(instruction: Instruction) -> Execute:
    """How to execute an instruction.

    Raises:
        NotImplementedError: it, or a modifier, is unknown here.
    """
    parts = instruction.parts
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in _known:
            execute, modifiers = _known[name]
            if all(part in TYPES or part in modifiers for part in parts[length:]):
                return execute
            break
    raise NotImplementedError(f"the emulator does not know {instruction.text!r}")
