"""Translates a program into the operations of `core.c`.

A register, a constant and an intermediate value is a vector of 32 elements in a warp's file, and an instruction becomes
a few operations between such vectors. What has no translation is left to the definitions in Python, as is an
instruction whose definition a test has replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.support.ptx import arithmetic, control, copies, core, moves, products, step  # noqa: F401  all are defined
from tests.support.ptx.parse import Instruction, Program, inside, split
from tests.support.ptx.step import Execute, address_parts, register_type
from tests.support.ptx.values import BITS, LANES, TYPES, Lanes, Type, constant, size, wide_bytes

_STRIDE = 8 * LANES
_TEMPORARIES = 40
"""Intermediate values of an instruction, at the beginning of the file; each has room for the widest elements."""


class _Unknown(Exception):
    """An instruction has no translation."""


@dataclass(frozen=True)
class Slot:
    """Where a register lies in the file."""

    number: int
    offset: int
    kind: Type
    own: bool
    """Whether its name says its type; otherwise it is unknown until it is written."""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return size(self.kind)


class Translation:
    """A program's operations, and how its registers and constants lie in a file."""

    def __init__(self, program: Program, execute: tuple[Execute, ...]) -> None:
        self.slots: dict[str, Slot] = {}
        self.given: dict[tuple[str, Type], int] = {}
        """Where values lie that a launch, a block or a warp gives: parameters and special registers."""
        self.size = _TEMPORARIES * _STRIDE
        self.operations: list[tuple[Any, ...]] = []
        self._numbers = core.operations()
        self._literals: dict[bytes, int] = {}
        self._names = _given_names(program)
        self._products: dict[Any, tuple[core.ProductState, Lanes]] = {}
        self._temporaries = 0
        self._untyped = _untyped(program)
        plain = {execute for execute, _ in _DEFINED.values()}
        code = []
        for instruction, how in zip(program.code, execute, strict=True):
            begin = len(self.operations)
            guard, known = None, how in plain
            try:
                self._temporaries = 0
                if known and instruction.guard:
                    guard = self._guard(instruction.guard)
                if known:
                    self._translate(instruction)
            except _Unknown:
                known = False
            if not known:
                del self.operations[begin:]
            where = guard.offset if guard else -1
            unknown = guard.number if guard and not guard.own else -1
            code.append((begin, len(self.operations) - begin if known else -1, where, instruction.negated, unknown))
            if instruction.parts[0] == "wgmma" and instruction.operands and instruction.operands[0][0] == "{":
                for name in inside(instruction.operands[0]):
                    self.slot(name)
        self.code = np.array(code, core.INSTRUCTION)
        self.table = np.array(self.operations, core.OPERATION)
        self.template = self._template()

    def product(
        self, names: tuple[str, ...], columns: int, kind: int, transposed: tuple[bool, bool]
    ) -> core.ProductState | None:
        """What a wgmma says, for core.c, if the registers of its sums have places."""
        if (key := (names, columns, kind, transposed)) not in self._products:
            slots = [self.slots.get(name) for name in names]
            if any(slot is None or slot.kind is not np.uint32 for slot in slots):
                return None
            places = np.array([(slot.offset, slot.number) for slot in slots if slot], np.int32).T.copy()
            state = core.ProductState(
                offsets=core.pointer(places[0]),
                numbers=core.pointer(places[1]),
                columns=columns,
                kind=kind,
                left_transposed=transposed[0],
                right_transposed=transposed[1],
            )
            self._products[key] = state, places
        return self._products[key][0]

    def _template(self) -> Lanes:
        """A file as it is before a warp begins: what nobody has written holds ones."""
        file = np.full(self.size, 0xFF, np.uint8)
        for slot in self.slots.values():
            if slot.kind is np.bool_:
                file[slot.offset : slot.offset + LANES] = 1
        for bits, offset in self._literals.items():
            file[offset : offset + len(bits)] = np.frombuffer(bits, np.uint8)
        return file

    def describe(self, state: core.LaunchState) -> None:
        """Tell a launch of the program."""
        state.code, state.operations = core.pointer(self.code), core.pointer(self.table)
        state.halves, state.wide = map(core.pointer, _bytes())

    def files(self, warps: int, constants: dict[str, int]) -> Lanes:
        """The files of a block's warps as they begin, [warps, bytes]."""
        files = np.repeat(self.template[None], warps, 0)
        for (name, kind), offset in self.given.items():
            to = files[:, offset : offset + LANES * size(kind)].view(kind)
            if name == "%laneid":
                to[:] = np.arange(LANES)
            elif name == "%tid.x":
                to[:] = np.arange(warps * LANES).reshape(warps, LANES)
            else:
                to[:] = np.full(LANES, constants[name], kind)
        return files

    def _room(self, width: int) -> int:
        at = self.size
        self.size += width * LANES
        return at

    def slot(self, name: str) -> Slot | None:
        """A register's place, if it has one."""
        if name not in self.slots:
            own = register_type(name)
            kind = own or self._untyped.get(name)
            if kind is None:
                return None
            self.slots[name] = Slot(len(self.slots), self._room(size(kind)), kind, own is not None)
        return self.slots[name]

    def _guard(self, name: str) -> Slot:
        slot = self.slot(name)
        if slot is None or slot.kind is not np.bool_:
            raise _Unknown
        return slot

    def temporary(self, count: int = 1) -> int:
        """Room for intermediate values, one behind the other."""
        at = self._temporaries
        self._temporaries += count
        if self._temporaries > _TEMPORARIES:
            raise _Unknown
        return at * _STRIDE

    def append(
        self, op: str, d: int = 0, a: int = 0, b: int = 0, c: int = 0, n: int = 0, slot: Slot | None = None
    ) -> None:
        """An operation, whose result goes to a register if there is a slot."""
        if op not in self._numbers:
            raise _Unknown
        width, number = (slot.width, slot.number) if slot else (0, 0)
        self.operations.append((self._numbers[op], width, d, a, b, c, number, n))

    def value(self, op: str, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> int:
        """Where the result of an operation lies that no register takes."""
        at = self.temporary()
        self.append(op, at, a, b, c, n)
        return at

    def read(self, name: str, kind: Type) -> int:
        """Where an operand lies, as elements of this type."""
        if name[0] == "!":
            if kind is not np.bool_:
                raise _Unknown
            return self.value("not_pred", self.read(name[1:], kind))
        if (slot := self.slot(name)) is not None:
            if not slot.own:
                self.append("defined", n=slot.number)
            if (slot.kind is np.bool_) != (kind is np.bool_):
                raise _Unknown
            if slot.width == size(kind):
                return slot.offset
            return self.value(f"cvt_{_word(slot.kind)}_{_word(kind)}", slot.offset)
        if name in self._names:
            if kind is np.bool_:
                raise _Unknown
            key = name, BITS[size(kind)]
            if key not in self.given:
                self.given[key] = self._room(size(kind))
            return self.given[key]
        try:
            bits = constant(name, kind).tobytes()
        except ValueError:
            raise _Unknown from None
        if bits not in self._literals:
            self._literals[bits] = self._room(size(kind))
        return self._literals[bits]

    def write(self, name: str, kind: Type, op: str, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> None:
        """Let a register have the result of an operation, which is of this type. Small values are extended by their
        sign."""
        slot = self.slot(name) if name != "_" else None
        if slot is None or (slot.kind is np.bool_) != (kind is np.bool_):
            raise _Unknown
        if slot.width == size(kind):
            self.append(op, slot.offset, a, b, c, n, slot)
            return
        if np.dtype(kind).kind not in "iu":
            raise _Unknown
        narrow = f"{'s' if np.dtype(kind).kind == 'i' and size(kind) < slot.width else 'u'}{8 * size(kind)}"
        self.append(f"cvt_{narrow}_{_word(slot.kind)}", slot.offset, self.value(op, a, b, c, n), slot=slot)

    def address(self, text: str) -> tuple[int, int, int]:
        """Of [register + offset] where the register lies, its bytes, and the offset."""
        name, offset, kind = address_parts(text)
        return self.read(name, kind), size(kind), offset

    def words(self, names: tuple[str, ...]) -> list[Slot]:
        """The places of registers of 32 bits."""
        slots = [self.slot(name) for name in names]
        if any(slot is None or slot.kind is not np.uint32 or not slot.own for slot in slots):
            raise _Unknown
        return slots  # type: ignore[return-value]

    def _translate(self, instruction: Instruction) -> None:
        parts, operands = instruction.parts, instruction.operands
        name = _name(parts)
        if name not in _TRANSLATORS:
            raise _Unknown
        if name in ("bra", "brx.idx"):
            operands = tuple(map(str, instruction.targets))
        _TRANSLATORS[name](self, parts, operands)


_DEFINED = dict(step._known)
"""The definitions, without what a test puts in their stead."""

Translator = Callable[[Translation, tuple[str, ...], tuple[str, ...]], None]
_TRANSLATORS: dict[str, Translator] = {}


def _translates(names: str) -> Callable[[Translator], Translator]:
    def register(translator: Translator) -> Translator:
        _TRANSLATORS.update(dict.fromkeys(names.split(), translator))
        return translator

    return register


@cache
def _name(parts: tuple[str, ...]) -> str:
    """Of an opcode the beginning that names a definition."""
    beginnings = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(name for name in beginnings if name in _DEFINED)


@cache
def _bytes() -> tuple[Lanes, Lanes]:
    """The fp16 and the fp32 of each e4m3."""
    codes = np.arange(256, dtype=np.uint8)
    return np.ascontiguousarray(arithmetic.halves_of_bytes()[codes].astype(np.uint16)), wide_bytes(codes)


def _given_names(program: Program) -> frozenset[str]:
    special = [f"%{what}.{axis}" for what in ("ctaid", "nctaid") for axis in "xyz"]
    return frozenset([*(name for _, name in program.parameters), *special, "global_smem", "%tid.x", "%laneid"])


def _word(kind: Type) -> str:
    return f"u{8 * size(kind)}"


def _number(kind: Type) -> str:
    """An integer's type as core.c writes it."""
    letter = {"i": "s", "u": "u", "f": "f"}.get(np.dtype(kind).kind)
    if letter is None or kind is np.float16:
        raise _Unknown
    return f"{letter}{8 * size(kind)}"


def _kind(parts: tuple[str, ...]) -> Type:
    """The type that an opcode ends with, which is no narrow float."""
    if parts[-1] not in TYPES or parts[-1] in ("f16", "bf16", "f16x2", "bf16x2", "s16x2"):
        raise _Unknown
    return TYPES[parts[-1]]


def _untyped(program: Program) -> dict[str, Type]:
    """What registers hold whose names do not say it, those of inline assembly: where all that write one write the
    same."""
    found: dict[str, set[Type | None]] = {}
    for instruction in program.code:
        if not instruction.operands or instruction.parts[0] in ("st", "red", "bra"):
            continue
        to = instruction.operands[0]
        names = split(to[1:-1]) if to[0] == "{" else tuple(to.split("|"))
        for name in names:
            if name[0] not in "[%_" and not name[0].isdigit():
                found.setdefault(name, set()).add(_written(instruction, len(names)))
    return {name: kind for name, kinds in found.items() for kind in kinds if len(kinds) == 1 and kind is not None}


def _written(instruction: Instruction, count: int) -> Type | None:
    """The type of what an instruction writes, if it is one that inline assembly has."""
    parts = instruction.parts
    if parts[0] in ("setp", "elect") or parts[:2] == ("mbarrier", "try_wait") or parts[-1] == "pred":
        return np.bool_
    if parts[0] == "vote":
        return np.uint32 if parts[2] == "ballot" else np.bool_
    if parts[0] in ("popc", "clz", "shfl", "ldmatrix", "prmt", "lop3", "redux"):
        return np.uint32
    text = parts[-2] if parts[0] == "cvt" else parts[-1]
    kind = {**TYPES, "e4m3x2": np.uint16}.get(text)
    if kind is None or kind is np.bool_:
        return None
    width = size(kind)
    if parts[0] == "mov" and instruction.operands[0][0] == "{":
        width //= count
    if parts[0] in ("mul", "mad") and "wide" in parts:
        width *= 2
    return BITS.get(width)


@_translates("add sub and or xor neg abs not ex2 lg2 sqrt rcp")
def _simple(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    name = parts[0]
    if parts[-1] in ("bf16x2", "f16x2") and name in ("add", "sub"):
        a, b = (t.read(operand, np.uint32) for operand in operands[1:])
        t.write(operands[0], np.uint32, f"{name}_{parts[-1]}", a, b)
        return
    if name == "abs" and parts[-1] == "bf16":
        t.write(operands[0], np.uint16, "abs_bf16", t.read(operands[1], np.uint16))
        return
    kind = _kind(parts)
    if kind is np.bool_:
        of = "pred"
    elif kind is np.float32:
        of = "f32"
    else:
        of = _number(kind) if name == "abs" else _word(kind)
    given = [t.read(operand, kind) for operand in operands[1:]]
    if len(given) != (2 if name in ("add", "sub", "and", "or", "xor") else 1):
        raise _Unknown
    t.write(operands[0], kind, f"{name}_{of}", *given)


@_translates("mul mad")
def _multiply(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    if parts[-1] in ("bf16x2", "f16x2"):
        if parts[0] == "mad":
            raise _Unknown
        a, b = (t.read(operand, np.uint32) for operand in operands[1:])
        t.write(operands[0], np.uint32, f"mul_{parts[-1]}", a, b)
        return
    kind = wide = _kind(parts)
    a, b = (t.read(operand, kind) for operand in operands[1:3])
    if "wide" in parts:
        wide = np.dtype(f"{np.dtype(kind).kind}{2 * size(kind)}").type
        op = f"wide_{_number(kind)}"
    elif "hi" in parts:
        op = f"high_{_number(kind)}"
    else:
        op = "mul_f32" if kind is np.float32 else f"mul_{_word(kind)}"
    if parts[0] == "mul":
        t.write(operands[0], wide, op, a, b)
        return
    product = t.value(op, a, b)
    t.write(
        operands[0], wide, "add_f32" if kind is np.float32 else f"add_{_word(wide)}", product, t.read(operands[3], wide)
    )


@_translates("fma")
def _fma(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = {"bf16x2": np.uint32, "f16x2": np.uint32, "f32": np.float32}.get(parts[-1])
    if kind is None:
        raise _Unknown
    t.write(operands[0], kind, f"fma_{parts[-1]}", *(t.read(operand, kind) for operand in operands[1:4]))


@_translates("min max")
def _extreme(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    of = _number(kind)
    op = f"{parts[0]}_nan_f32" if kind is np.float32 and "NaN" in parts else f"{parts[0]}_{of}"
    given = [t.read(operand, kind) for operand in operands[1:3]]
    if "relu" in parts:
        found = t.value(op, *given)
        op = "max_nan_f32" if kind is np.float32 else f"max_{of}"
        given = [found, t.read("0", kind)]
    t.write(operands[0], kind, op, *given)


@_translates("div rem")
def _divide(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    if kind is np.float32 and parts[0] == "rem":
        raise _Unknown
    t.write(operands[0], kind, f"{parts[0]}_{_number(kind)}", *(t.read(operand, kind) for operand in operands[1:3]))


@_translates("rsqrt")
def _rsqrt(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    if _kind(parts) is not np.float32:
        raise _Unknown
    t.write(operands[0], np.float32, "rsqrt_f32", t.read(operands[1], np.float32))


@_translates("shl shr")
def _shift(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    of = _number(kind) if parts[0] == "shr" else _word(kind)
    t.write(operands[0], kind, f"{parts[0]}_{of}", t.read(operands[1], kind), t.read(operands[2], np.uint32))


@_translates("shf")
def _funnel_shift(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    given = (t.read(operand, np.uint32) for operand in operands[1:4])
    t.write(operands[0], np.uint32, "shf_l" if "l" in parts else "shf_r", *given)


@_translates("bfe")
def _extract(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    word = t.read(operands[1], np.uint32 if size(kind) == 4 else np.uint64)
    given = (t.read(operand, np.uint32) for operand in operands[2:4])
    t.write(operands[0], np.int32 if size(kind) == 4 else np.int64, f"bfe_{_number(kind)}", word, *given)


@_translates("prmt")
def _permute(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.write(operands[0], np.uint32, "prmt_u32", *(t.read(operand, np.uint32) for operand in operands[1:4]))


@_translates("lop3")
def _logic_of_three(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    given = (t.read(operand, np.uint32) for operand in operands[1:4])
    t.write(operands[0], np.uint32, "lop3_u32", *given, n=int(operands[4], 0))


@_translates("popc clz")
def _count_bits(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = BITS[size(_kind(parts))]
    t.write(operands[0], np.uint32, f"{parts[0]}_{_word(kind)}", t.read(operands[1], kind))


@_translates("setp")
def _compare(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind, how = _kind(parts), parts[1]
    if kind is np.bool_ or (kind is not np.float32 and how not in arithmetic.COMPARE):
        raise _Unknown
    op, (a, b) = f"{how}_{_number(kind)}", (t.read(operand, kind) for operand in operands[1:3])
    if parts[2] in ("and", "or", "xor"):
        found = t.value(op, a, b)
        t.write(operands[0], np.bool_, f"{parts[2]}_pred", found, t.read(operands[3], np.bool_))
    else:
        t.write(operands[0], np.bool_, op, a, b)


@_translates("selp")
def _select(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = TYPES[parts[-1]]
    a, b, chosen = (*(t.read(operand, kind) for operand in operands[1:3]), t.read(operands[3], np.bool_))
    if kind is np.bool_:
        raise _Unknown
    t.write(operands[0], kind, f"selp_{_word(kind)}", a, b, chosen)


@_translates("cvt")
def _convert(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    to, of = parts[-2], parts[-1]
    if of == "e4m3x2":
        t.write(operands[0], np.uint32, "halves", t.read(operands[1], np.uint16))
        return
    if to in ("e4m3x2", "bf16x2", "f16x2"):
        if of != "f32":
            raise _Unknown
        kind: Type = np.uint16 if to == "e4m3x2" else np.uint32
        t.write(operands[0], kind, f"cvt_f32_{to}", *(t.read(operand, np.float32) for operand in operands[1:3]))
        return
    if to not in TYPES or of not in TYPES or "pred" in (to, of) or of in ("bf16x2", "f16x2"):
        raise _Unknown
    value, result = t.read(operands[1], TYPES[of]), TYPES[to]
    narrow_floats = ("f16", "bf16")
    if of in narrow_floats or to in narrow_floats:
        if "f32" not in (of, to):
            raise _Unknown
        t.write(operands[0], result, f"cvt_{of}_{to}", value)
    elif of == "f32" or to == "f32":
        small = size(TYPES[of]) < 4
        if small:
            value = t.value(f"cvt_{_number(TYPES[of])}_u32", value)
        of = f"{_number(TYPES[of])[0]}32" if small else _number(TYPES[of])
        t.write(operands[0], result, "mov_u32" if of == to == "f32" else f"cvt_{of}_{_number(result)}", value)
    else:
        before, after = size(TYPES[of]), size(result)
        extended = _number(TYPES[of]) if before < after else _word(TYPES[of])
        op = f"mov_{_word(result)}" if before == after else f"cvt_{extended}_{_word(result)}"
        t.write(operands[0], result, op, value)


@_translates("mov")
def _move(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind: Type = TYPES[parts[-1]]
    kind = BITS[size(kind)] if kind is not np.bool_ else np.bool_
    if operands[0][0] == "{":
        names = inside(operands[0])
        small = BITS[size(kind) // len(names)]
        whole = t.read(operands[1], kind)
        for i, name in enumerate(names):
            if name != "_":
                t.write(name, small, f"get_{_word(small)}", whole, size(kind), n=i * size(small))
    elif operands[1][0] == "{":
        names = inside(operands[1])
        small = BITS[size(kind) // len(names)]
        pieces, whole = [t.read(name, small) for name in names], t.temporary()
        for i, piece in enumerate(pieces):
            t.append(f"put_{_word(small)}", whole, piece, size(kind), n=i * size(small))
        t.write(operands[0], kind, f"mov_{_word(kind)}", whole)
    else:
        t.write(operands[0], kind, f"mov_{_word(kind)}", t.read(operands[1], kind))


@_translates("cvta")
def _generic_address(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    t.write(operands[0], kind, f"mov_{_word(kind)}", t.read(operands[1], kind))


@_translates("createpolicy")
def _policy(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.write(operands[0], np.uint64, "mov_u64", t.read("0", np.uint64))


@_translates("redux.sync")
def _reduce(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = _kind(parts)
    if kind not in (np.uint32, np.int32):
        raise _Unknown
    how = ("add", "min", "max", "and", "or", "xor").index(parts[2])
    t.write(operands[0], kind, "redux", t.read(operands[1], kind), n=how | (8 if kind is np.int32 else 0))


@_translates("vote.sync")
def _vote(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = np.uint32 if parts[2] == "ballot" else np.bool_
    t.write(operands[0], kind, parts[2], t.read(operands[1], np.bool_))


@_translates("elect.sync")
def _elect(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.write(operands[0].split("|")[1], np.bool_, "elect")


@_translates("shfl.sync")
def _shuffle(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    if int(operands[3], 0) >> 8:
        raise _Unknown
    value, by = (t.read(operand, np.uint32) for operand in operands[1:3])
    how = ("bfly", "idx", "up", "down").index(parts[2])
    t.write(operands[0].split("|")[0], np.uint32, "shfl", value, by, n=how)


@_translates("ld.param")
def _load_parameter(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind = BITS[size(_kind(parts))]
    if operands[0][0] == "{":
        raise _Unknown
    t.write(operands[0], kind, f"mov_{_word(kind)}", t.read(inside(operands[1])[0], kind))


@_translates("ld.global ld.shared ld.relaxed.sys.global")
def _load(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind, names = TYPES[parts[-1]], inside(operands[0])
    width, shared = size(kind) * len(names), parts[1] == "shared"
    if kind is np.bool_ or width > (16 if shared else 32) or width & (width - 1):
        raise _Unknown
    cached = not {"cg", "relaxed", "L1::no_allocate"} & set(parts)
    register, bytes, offset = t.address(operands[1])
    found = t.temporary(len(names))
    c = size(kind) | len(names) << 8 | cached << 16
    t.append("ld_shared" if shared else "ld_global", found, register, bytes, c, offset)
    for i, name in enumerate(names):
        if name != "_":
            t.write(name, kind, f"mov_{_word(kind)}", found + i * _STRIDE)


@_translates("st.global st.shared st.relaxed.sys.global")
def _store(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind, names = BITS[size(TYPES[parts[-1]])], inside(operands[1])
    width, shared = size(kind) * len(names), parts[1] == "shared"
    if TYPES[parts[-1]] is np.bool_ or width > (16 if shared else 32) or width & (width - 1):
        raise _Unknown
    register, bytes, offset = t.address(operands[0])
    values = [t.read(name, kind) for name in names]
    t.append("st_shared" if shared else "st_global", 0, register, bytes, size(kind) | len(names) << 8, offset)
    for value in values:
        t.append("nothing", a=value)


@_translates("atom red")
def _atomic(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    kind, how, shared, result = _kind(parts), parts[-2], "shared" in parts, parts[0] == "atom"
    known = ("add", "min", "max", "and", "or", "exch")
    number = {np.uint32: 0, np.int32: 1, np.uint64: 2, np.int64: 3, np.float32: 4}.get(kind)
    if how not in known or number is None or (kind is np.float32 and how not in ("add", "exch")):
        raise _Unknown
    register, bytes, offset = t.address(operands[result])
    value = t.read(operands[1 + result], kind)
    found = t.temporary() if result and operands[0] != "_" else -1
    c = known.index(how) | number << 8 | bytes << 16
    t.append("atom_shared" if shared else "atom_global", found, register, value, c, offset)
    if found >= 0:
        t.write(operands[0], kind, f"mov_{_word(kind)}", found)


@_translates("ldmatrix.sync.aligned.m8n8 stmatrix.sync.aligned.m8n8")
def _matrices(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    load = parts[0] == "ldmatrix"
    slots = t.words(inside(operands[0 if load else 1]))
    register, bytes, offset = t.address(operands[1 if load else 0])
    t.append(parts[0], 0, register, bytes, len(slots) | ("trans" in parts) << 8, offset)
    for slot in slots:
        t.append("nothing", slot.offset, slot.offset, slot=slot)


@_translates("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
def _mma(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    vectors = [t.words(inside(operand)) for operand in operands]
    if [len(vector) for vector in vectors] != [4, 4, 2, 4]:
        raise _Unknown
    t.append("mma", n=parts[-2] == "bf16")
    for vector in vectors:
        for slot in vector:
            t.append("nothing", slot.offset, slot.offset, slot=slot)


@_translates("bra")
def _branch(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.append("bra", n=int(operands[0]))


@_translates("ret exit")
def _end(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.append("ret")


@_translates("bar.warp.sync fence membar wgmma.fence setmaxnreg")
def _nothing(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.append("nothing")


@_translates("fence.proxy.async")
def _proxy_fence(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    t.append("fence")


@_translates("prefetch cp.async.bulk.prefetch")
def _prefetch(t: Translation, parts: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, bytes, offset = t.address(operands[0])
    if bytes != 8:
        raise _Unknown
    t.append("hold", 0, register, t.read(operands[1], np.int32) if parts[0] == "cp" else -1, n=offset)
