"""One instruction on one warp: its operands, and who executes which instruction."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx import core
from tests.support.ptx.memory import Fault
from tests.support.ptx.parse import Instruction, inside
from tests.support.ptx.values import BITS, LANES, TYPES, Lanes, Type, all_of, constant, reinterpret, size

if TYPE_CHECKING:
    from tests.support.ptx.machine import Block
    from tests.support.ptx.translate import Translation

_REGISTERS: dict[str, Type] = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64}
_ADDRESS = re.compile(r"(.+?)(?:\s*\+\s*(-?\d+))?")
_LANE = np.arange(LANES, dtype=np.uint32)
ALL = np.ones(LANES, bool)
"""All lanes."""
ALL.flags.writeable = False


@cache
def register_type(name: str) -> Type | None:
    """Return the type of a compiler's register; those of inline assembly hold what they are given."""
    return _REGISTERS.get(name.rstrip("0123456789")) if name[-1].isdigit() else None


@lru_cache(maxsize=1 << 14)
def address_parts(text: str) -> tuple[str, int, Type]:
    """Split [register + offset] into the register, the offset and the address's type."""
    found = _ADDRESS.fullmatch(text.strip("[] "))
    assert found
    return found[1], int(found[2] or 0), np.uint64 if found[1].startswith("%rd") else np.uint32


class Registers:
    """Of a warp: vectors in the file that `core.c` works on, and of those that are not in it, vectors of their own. Who
    reads one gets a copy."""

    def __init__(self, translation: Translation, file: Lanes, defined: Lanes) -> None:
        self._slots, self._file, self._defined = translation.slots, file, defined
        self._others: dict[str, Lanes] = {}

    def get(self, name: str) -> Lanes | None:
        """What one holds, if somebody has written it."""
        slot = self._slots.get(name)
        if slot is None:
            return self._others.get(name)
        if not self._defined[slot.number]:
            return None
        return self._file[slot.offset : slot.offset + LANES * slot.width].view(slot.kind).copy()

    def __contains__(self, name: str) -> bool:
        """Whether somebody has written one."""
        return self.get(name) is not None

    def __getitem__(self, name: str) -> Lanes:
        """What one holds. One that nobody has written holds ones."""
        found = self.get(name)
        if found is not None:
            return found
        own = register_type(name)
        if own is None:
            raise Fault(f"{name} is unknown")
        return np.ones(LANES, bool) if own is np.bool_ else np.full(LANES, ~own(0), own)

    def __setitem__(self, name: str, value: Lanes) -> None:
        """Let one hold something."""
        slot = self._slots.get(name)
        if slot is None:
            self._others[name] = value
            return
        if value.dtype != slot.kind:
            raise TypeError(f"{name} holds {np.dtype(slot.kind)}, as far as translate.py knows, and gets {value.dtype}")
        self._file[slot.offset : slot.offset + LANES * slot.width].view(slot.kind)[:] = value
        self._defined[slot.number] = 1

    def update(self, values: Iterable[tuple[str, Lanes]]) -> None:
        """Let some hold something."""
        for name, value in values:
            self[name] = value


class Warp:
    """The state of 32 threads that run in step. Those that have branched apart run in the order of their places in the
    code, so they meet again behind the branch."""

    def __init__(self, number: int, block: Block, file: Lanes, defined: Lanes) -> None:
        self.number = number
        self.registers = Registers(block.translation, file, defined)
        self.state = core.WarpState(
            file=core.pointer(file),
            defined=core.pointer(defined),
            launch=ctypes.addressof(block.launch.state),
            shared=ctypes.addressof(block.shared.state),
            number=number,
        )
        self.awaits: Any = None
        """Event without which it cannot go on: a barrier of threads, or (mbarrier, parity)."""
        self.copies: list[tuple[Lanes, Lanes]] = []
        """(addresses, bytes) of cp.async that no group holds yet."""
        self.copy_groups: list[list[tuple[Lanes, Lanes]]] = []
        self.products: list[Callable[[], None] | None] = []
        """wgmma products that no group holds yet: what computes them, nothing for one that is computed."""
        self.product_groups: list[list[Callable[[], None] | None]] = []

    @property
    def runs(self) -> bool:
        """Whether a lane has not ended."""
        return bool(self.state.ended != core.FULL)

    @property
    def ended(self) -> Lanes:
        """The lanes that have ended."""
        return lanes_of(self.state.ended)

    @property
    def waited(self) -> bool:
        """Whether it has executed griddepcontrol.wait, or met one that has at a barrier of threads."""
        return bool(self.state.waited)

    @waited.setter
    def waited(self, waited: bool) -> None:
        self.state.waited = waited

    def run(self, most: int) -> tuple[int, int | None, Lanes]:
        """Execute instructions, up to so many, as far as `core.c` can.

        Returns:
            How many are left of them; the place of the one that is left to Python, if there is one; the lanes there.
        """
        if (library := core.in_use()) is None:
            return most, *self.front()
        left = library.run(ctypes.addressof(self.state), most)
        place = self.state.place
        return (left, None, ALL) if place < 0 else (left, place, lanes_of(self.state.lanes))

    def front(self) -> tuple[int | None, Lanes]:
        """The place in the code from which the next instruction comes, if a lane still runs, and the lanes there."""
        if self.state.together >= 0:
            return self.state.together, ALL
        at, running = np.frombuffer(self.state.at, np.int32), ~self.ended
        if not running.any():
            return None, running
        place = int(at[running].min())
        lanes = running & (at == place)
        return place, ALL if lanes.all() else lanes

    def go(self, lanes: Lanes, place: int | Lanes) -> None:
        """Let lanes go on from a place, or from one for each of them."""
        if lanes is ALL and isinstance(place, int):
            self.state.together = place
            return
        self._apart()
        np.frombuffer(self.state.at, np.int32)[lanes] = place

    def end(self, lanes: Lanes) -> None:
        """Let lanes end."""
        self._apart()
        self.state.ended |= int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])

    def _apart(self) -> None:
        if self.state.together >= 0:
            np.frombuffer(self.state.at, np.int32)[:] = self.state.together
            self.state.together = -1


def lanes_of(mask: int) -> Lanes:
    """The lanes whose bits are set."""
    return ALL if mask == core.FULL else (np.uint32(mask) >> _LANE & np.uint32(1)).astype(bool)


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
    """Return the function that executes an instruction.

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
