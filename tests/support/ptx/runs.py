"""Runs of instructions between two places where a warp may stop, branch or wait, as functions of Python.

The emulator decodes an instruction every time that it executes it: it looks up how, splits names, views bits as types.
In a run all of that is done once, and what remains is a line per instruction: an operation of numpy on its registers,
or, of whatever is not between registers alone, the call that `machine` makes as well. A run computes the same bits as
its instructions one by one, in the same order, and counts as many; it is for warps all of whose lanes execute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx import arithmetic, moves
from tests.support.ptx.parse import Instruction, Program, inside
from tests.support.ptx.step import ALL, Execute, Step, Warp, address_parts, register_type
from tests.support.ptx.values import BITS, LANES, TYPES, Lanes, Type, all_of, any_of, constant, narrow, packed, size

if TYPE_CHECKING:
    from tests.support.ptx.machine import Block

MOST = 24
"""Instructions of a run. A turn that ends within a run takes its beginning one by one, so runs are short."""
WORTH = 2
"""A run is compiled when it is executed for this time."""
WORTH_SINGLE = 30
"""And one of its instructions by itself, as turns that end within the run execute it, for this time."""

_ENDS = ("bra", "brx", "ret", "exit", "bar", "barrier", "mbarrier.try_wait")
"""What decides where, whether or when the warp goes on."""

Function = Callable[["Block", Warp], None]


class Runs:
    """The runs of a program."""

    def __init__(self, program: Program, execute: tuple[Execute, ...]) -> None:
        self.code, self.execute = program.code, execute
        self.length = _lengths(program)
        """How many instructions the run has that begins at a place; 0 where none does."""
        self._executed = [0] * len(program.code)
        self._functions: list[Function | None] = [None] * len(program.code)
        self._single_executed = [0] * len(program.code)
        self._singles: list[Function | None] = [None] * len(program.code)

    def function(self, at: int) -> Function | None:
        """What executes the run that begins at a place, unless it is not worth it yet."""
        found = self._functions[at]
        if found is None:
            self._executed[at] += 1
            if self._executed[at] >= WORTH:
                found = self._functions[at] = _Writer(self, at, self.length[at]).function()
        return found

    def single(self, at: int) -> Function | None:
        """What executes the one instruction at a place, of those that a run may have, if a line is known for it."""
        found = self._singles[at]
        if found is None and self._single_executed[at] >= 0:
            self._single_executed[at] += 1
            if self._single_executed[at] >= WORTH_SINGLE:
                found = None if _is_end(self.code[at]) else _Writer(self, at, 1).function(calls=False)
                self._singles[at], self._single_executed[at] = found, -1
        return found


def _lengths(program: Program) -> list[int]:
    code = program.code
    begins = {0} | {target for instruction in code for target in instruction.targets}
    lengths, at = [0] * len(code), 0
    while at < len(code):
        end = at
        while end < len(code) and end - at < MOST and not _is_end(code[end]) and (end == at or end not in begins):
            end += 1
        lengths[at] = end - at if end - at > 1 else 0
        at = max(end, at + 1)
    return lengths


def _is_end(instruction: Instruction) -> bool:
    return instruction.parts[0] in _ENDS or ".".join(instruction.parts[:2]) in _ENDS


class _Unknown(Exception):
    """No line is known for an instruction; the emulator's own call executes it."""


class _Writer:
    """Writes the function of a run.

    Registers are read once, and their views as other types made once, until an instruction is executed by a call,
    which may write any.
    """

    def __init__(self, runs: Runs, at: int, length: int) -> None:
        self.runs, self.at, self.length = runs, at, length
        self.lines: list[str] = []
        self.given: dict[str, Any] = {
            "ALL": ALL,
            "Step": Step,
            "all_of": all_of,
            "any_of": any_of,
            "Fault": AssertionError,
        }
        self._known: dict[tuple[str, Type], str] = {}
        self._types: dict[str, Type] = {}  # what registers of inline assembly hold
        self._names = 0

    def function(self, calls: bool = True) -> Function | None:
        """Compile it; nothing if it would be no more than a call that may not be."""
        for at in range(self.at, self.at + self.length):
            instruction, written = self.runs.code[at], len(self.lines)
            known = dict(self._known)
            try:
                if instruction.guard:
                    self._write_guarded(at, instruction)
                else:
                    if instruction.parts[0] in ("ld", "st"):  # which may fail
                        self.lines.append(f"at = {at}")
                    self._write(instruction)
            except _Unknown:
                self._known = known
                del self.lines[written:]
                if not calls:
                    return None
                self._call(at, instruction)
        body = "\n  ".join(self.lines)
        source = f"def run(block, warp):\n at = {self.at}\n R = warp.registers\n try:\n  {body}\n"
        source += " except Fault as error:\n  raise block.located(error, warp, at) from None\n"
        exec(compile(source, f"<run at {self.at}>", "exec"), self.given)
        function: Function = self.given["run"]
        return function

    def _call(self, at: int, instruction: Instruction) -> None:
        self._known.clear()
        self._types.clear()
        execute, known = self._give(self.runs.execute[at]), self._give(instruction)
        self.lines.append(f"at = {at}")
        step = f"step = Step(block, warp, {known}, {at}, ALL)"
        if not instruction.guard:
            self.lines += [step, f"{execute}(step)"]
            return
        negated = "~" if instruction.negated else ""
        self.lines += [
            step,
            f"guard = {negated}step.value({instruction.guard!r}, {self._give(np.bool_)})",
            f"if all_of(guard): {execute}(step)",
            "elif any_of(guard):",
            " step.lanes = ALL & guard",
            f" {execute}(step)",
        ]

    def _write_guarded(self, at: int, instruction: Instruction) -> None:
        """A load or a store: a line where all lanes execute it, else the emulator's own call."""
        if instruction.parts[0] not in ("ld", "st") or instruction.parts[1] == "param":
            raise _Unknown
        guard = self._let(("~" if instruction.negated else "") + self.read(instruction.guard, np.bool_))
        known, types, begin = dict(self._known), dict(self._types), len(self.lines) + 2
        self.lines += [f"at = {at}", f"if all_of({guard}):"]
        self._write(instruction)
        self.lines[begin:] = [f" {line}" for line in self.lines[begin:]]
        self.lines += [
            f"elif any_of({guard}):",
            f" step = Step(block, warp, {self._give(instruction)}, {at}, ALL)",
            f" step.lanes = {guard}",
            f" {self._give(self.runs.execute[at])}(step)",
        ]
        written = inside(instruction.operands[0]) if instruction.parts[0] == "ld" else ()
        self._known = {key: variable for key, variable in known.items() if key[0].lstrip("!") not in written}
        self._types = {name: kind for name, kind in types.items() if name not in written}

    def address(self, text: str) -> str:
        """An expression for [register + offset], as wide as the register."""
        name, offset, kind = address_parts(text)
        if register_type(name) is not kind:
            raise _Unknown
        value = self.read(name, kind)
        return f"{value} + {self._give(kind(offset % (1 << 8 * size(kind))))}" if offset else value

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _give(self, value: Any) -> str:
        name = f"g{len(self.given)}"
        self.given[name] = value
        return name

    def _let(self, expression: str) -> str:
        name = self._name()
        self.lines.append(f"{name} = {expression}")
        return name

    def _view(self, kind: Type) -> str:
        return f".view({self._give(np.dtype(kind))})"

    def read(self, name: str, kind: Type) -> str:
        """A variable with an operand's value, as `Step.value` gives it."""
        if (name, kind) not in self._known:
            self._known[name, kind] = self._let(self._read(name, kind))
        return self._known[name, kind]

    def _read(self, name: str, kind: Type) -> str:
        if name[0] == "!":
            return f"~{self.read(name[1:], kind)}"
        own = register_type(name) or self._types.get(name)
        if own is None:
            try:
                return self._give(constant(name, kind))
            except ValueError:
                step = f"Step(block, warp, {self._give(self.runs.code[self.at])}, {self.at}, ALL)"
                return f"{step}.value({name!r}, {self._give(kind)})"
        if own is kind:
            return f"R[{name!r}]"
        if own is np.bool_ or kind is np.bool_:
            raise _Unknown
        value = self.read(name, own)
        if size(own) == size(kind):
            return value + self._view(kind)
        value = self.read(name, BITS[size(kind)]) if kind is not BITS[size(kind)] else value
        return value + (self._view(kind) if kind is not BITS[size(kind)] else f".astype({self._give(np.dtype(kind))})")

    def write(self, name: str, expression: str, kind: Type) -> None:
        """Let a register have a value of this type, as `Step.set` does."""
        if name == "_":
            return
        own = register_type(name)
        if own is None:
            own = self._types[name] = kind if kind is np.bool_ else BITS[size(kind)]
        if (own is np.bool_) != (kind is np.bool_):
            raise _Unknown
        if own is not kind:
            same = size(own) == size(kind)
            cast = self._view(own) if same else f".astype({self._give(np.dtype(own))})"
            expression = f"({expression}){cast}"
        for known in [known for known in self._known if known[0] in (name, f"!{name}")]:
            del self._known[known]
        variable = self._known[name, own] = self._name()
        self.lines.append(f"R[{name!r}] = {variable} = {expression}")

    def _write(self, instruction: Instruction) -> None:
        parts, operands = instruction.parts, instruction.operands
        line = _LINES.get(parts[0])
        kind = TYPES.get(parts[-1]) or {"e4m3x2": np.uint16}.get(parts[-1])
        if line is None or kind is None:
            raise _Unknown
        line(self, parts, operands, kind)


Line = Callable[[_Writer, tuple[str, ...], tuple[str, ...], Type], None]
_LINES: dict[str, Line] = {}


def _line(names: str) -> Callable[[Line], Line]:
    def register(line: Line) -> Line:
        _LINES.update(dict.fromkeys(names.split(), line))
        return line

    return register


def _is_float(kind: Type) -> bool:
    return kind in (np.float32, np.float16)


def _plain(parts: tuple[str, ...], to: str, kind: Type) -> Type:
    """The type in which an instruction may compute: integers without a sign, where the result is no wider than they
    are, since additions, products and logic give the same bits."""
    if parts[-1] in ("bf16", "bf16x2", "f16", "f16x2"):
        raise _Unknown
    if kind is np.float32 or kind is np.bool_:
        return kind
    if register_type(to) not in (BITS[size(kind)], None):
        raise _Unknown
    return BITS[size(kind)]


_OF_PAIRS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": arithmetic.fused}


def _pairs(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...]) -> bool:
    """Write the line of two narrow floats in a word, if it is one."""
    of = {"bf16x2": arithmetic.bf16_pairs, "f16x2": arithmetic.half_pairs}.get(parts[-1])
    if of is None or parts[0] not in _OF_PAIRS:
        return False
    given = ", ".join(run.read(name, np.uint32) for name in operands[1:])
    run.write(operands[0], f"{run._give(of)}({run._give(_OF_PAIRS[parts[0]])}, {given})", np.uint32)
    return True


@_line("add sub and or xor")
def _two(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if _pairs(run, parts, operands):
        return
    kind = _plain(parts, operands[0], kind)
    symbol = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}[parts[0]]
    run.write(operands[0], f"{run.read(operands[1], kind)} {symbol} {run.read(operands[2], kind)}", kind)


@_line("not")
def _not(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    kind = _plain(parts, operands[0], kind)
    run.write(operands[0], f"~{run.read(operands[1], kind)}", kind)


@_line("neg abs ex2 lg2 sqrt rcp")
def _one(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if parts[0] == "abs" and parts[-1] == "bf16":
        run.write(operands[0], f"{run.read(operands[1], kind)} & {run._give(np.uint16(0x7FFF))}", kind)
        return
    if kind is not np.float32:
        raise _Unknown
    run.write(operands[0], f"{run._give(arithmetic.ONE[parts[0]])}({run.read(operands[1], kind)})", kind)


@_line("mul mad")
def _multiply(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if _pairs(run, parts, operands):
        return
    if "hi" in parts or "wide" in parts:
        if size(kind) == 8:
            raise _Unknown
        wide = np.dtype(f"{np.dtype(kind).kind}{2 * size(kind)}").type
        a, b = (f"{run.read(name, kind)}.astype({run._give(np.dtype(wide))})" for name in operands[1:3])
        if "hi" in parts:
            a = f"({a} * {b} >> {run._give(wide(8 * size(kind)))}).astype({run._give(np.dtype(kind))})"
            run.write(operands[0], f"{a} + {run.read(operands[3], kind)}" if parts[0] == "mad" else a, kind)
            return
        kind = wide
    else:
        kind = _plain(parts, operands[0], kind)
        a, b = (run.read(name, kind) for name in operands[1:3])
    product = f"{a} * {b}"
    run.write(operands[0], f"{product} + {run.read(operands[3], kind)}" if parts[0] == "mad" else product, kind)


@_line("fma")
def _fma(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if _pairs(run, parts, operands):
        return
    if kind is not np.float32:
        raise _Unknown
    wide = run._give(np.dtype(np.float64))
    a, b, c = (f"{run.read(name, kind)}.astype({wide})" for name in operands[1:])
    run.write(operands[0], f"({a} * {b} + {c}).astype({run._give(np.dtype(kind))})", kind)


@_line("min max")
def _extreme(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if "relu" in parts or parts[-1] in ("bf16x2", "f16x2"):
        raise _Unknown
    a, b = (run.read(name, kind) for name in operands[1:3])
    run.write(operands[0], f"{run._give(arithmetic.extreme(parts, kind))}({a}, {b})", kind)


@_line("div")
def _divide(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if kind is not np.float32:
        raise _Unknown
    run.write(operands[0], f"{run.read(operands[1], kind)} / {run.read(operands[2], kind)}", kind)


@_line("shl shr")
def _shift(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    """By a number; others are rare."""
    try:
        by = int(constant(operands[2], np.uint32)[0])
    except ValueError:
        raise _Unknown from None
    if register_type(operands[2]) is not None or by >= 8 * size(kind):
        raise _Unknown
    kind = kind if parts[0] == "shr" else _plain(parts, operands[0], kind)
    amount, symbol = run._give(np.full(LANES, by, kind)), "<<" if parts[0] == "shl" else ">>"
    run.write(operands[0], f"{run.read(operands[1], kind)} {symbol} {amount}", kind)


@_line("setp")
def _compare(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    """Without what tells of NaN: in the others it makes the result false, as in numpy, but for "not equal"."""
    if parts[1] == "nan" and kind is np.float32 and len(parts) == 3:
        a, b = (run.read(name, kind) for name in operands[1:3])
        found = f"{a} != {a}" if operands[1] == operands[2] else f"({a} != {a}) | ({b} != {b})"
        run.write(operands[0], found, np.bool_)
        return
    if parts[1] not in arithmetic.COMPARE or (parts[1] == "ne" and _is_float(kind)) or kind is np.bool_:
        raise _Unknown
    if parts[-1] in ("bf16", "bf16x2", "f16x2"):
        raise _Unknown
    symbol = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[parts[1]]
    found = f"{run.read(operands[1], kind)} {symbol} {run.read(operands[2], kind)}"
    if parts[2] in ("and", "or", "xor"):
        other = {"and": "&", "or": "|", "xor": "^"}[parts[2]]
        found = f"({found}) {other} {run.read(operands[3], np.bool_)}"
    run.write(operands[0], found, np.bool_)


@_line("selp")
def _select(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    a, b, chosen = run.read(operands[1], kind), run.read(operands[2], kind), run.read(operands[3], np.bool_)
    run.write(operands[0], f"{run._give(np.where)}({chosen}, {a}, {b})", kind)


@_line("cvt")
def _convert(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    to, of = parts[-2], parts[-1]
    if to == "e4m3x2":  # the first operand is the upper half here, too
        high, low = run.read(operands[1], kind), run.read(operands[2], kind)
        run.write(operands[0], f"{run._give(arithmetic.pair_of_bytes)}({low}, {high})", np.uint16)
        return
    if of == "e4m3x2":
        table, index = run._give(arithmetic.halves_of_bytes()), run.read(operands[1], np.uint16)
        run.write(operands[0], f"{table}[{index}]", np.uint32)
        return
    if to in ("bf16x2", "f16x2"):  # the first operand is the upper half
        high, low = run.read(operands[1], kind), run.read(operands[2], kind)
        halves = run._give(_bf16_pair if to == "bf16x2" else _f16_pair)
        run.write(operands[0], f"{halves}({low}, {high})", np.uint32)
        return
    if to not in TYPES or "x2" in of:
        raise _Unknown
    value, result = run.read(operands[1], kind), TYPES[to]
    if of == "bf16":  # as `widen`
        wide, bits = run._give(np.dtype(np.uint32)), run._give(np.uint32(16))
        value = f"({value}.astype({wide}) << {bits}){run._view(np.float32)}"
    if to == "bf16":
        run.write(operands[0], f"{run._give(narrow)}({value})", result)
    else:
        run.write(operands[0], f"{value}.astype({run._give(np.dtype(result))})", result)


def _bf16_pair(low: Lanes, high: Lanes) -> Lanes:
    both = narrow(np.concatenate([low, high])).astype(np.uint32)
    return np.asarray(both[:LANES] | both[LANES:] << 16)


def _f16_pair(low: Lanes, high: Lanes) -> Lanes:
    return packed(np.stack([low, high], 1).astype(np.float16), np.uint32)


@_line("mov")
def _move(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    kind = BITS[size(kind)] if kind is not np.bool_ else np.bool_
    if operands[0][0] == "{":
        names = inside(operands[0])
        small = BITS[size(kind) // len(names)]
        whole = run._let(run.read(operands[1], kind) + run._view(small))
        for i, name in enumerate(names):
            run.write(name, f"{whole}[{i}::{len(names)}].copy()", small)
    elif operands[1][0] == "{":
        names = inside(operands[1])
        small = BITS[size(kind) // len(names)]
        pieces = ", ".join(run.read(name, small) for name in names)
        run.write(operands[0], f"{run._give(_joined)}([{pieces}], {run._give(np.dtype(kind))})", kind)
    else:
        run.write(operands[0], run.read(operands[1], kind), kind)


def _joined(pieces: list[Lanes], kind: Type) -> Lanes:
    both = np.empty((LANES, len(pieces)), pieces[0].dtype)
    for i, piece in enumerate(pieces):
        both[:, i] = piece
    return both.view(kind).reshape(LANES)


@_line("ld")
def _load(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    if parts[1] == "param":
        if operands[0][0] == "{":
            raise _Unknown
        kind = BITS[size(kind)]
        run.write(operands[0], run.read(inside(operands[1])[0], kind), kind)
        return
    names = inside(operands[0])
    given = f"{run._give(parts)}, {run.address(operands[1])}, {run._give(kind)}, {len(names)}"
    found = run._let(f"{run._give(moves.loaded)}(block, warp, {given})")
    for i, name in enumerate(names):
        run.write(name, f"{found}[{i}]", kind)


@_line("st")
def _store(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    kind = BITS[size(kind)]
    pieces = ", ".join(run.read(name, kind) for name in inside(operands[1]))
    values = f"{run._give(_bytes)}([{pieces}], {run._give(np.dtype(kind))})"
    given = f"{run._give(parts)}, {run.address(operands[0])}, {values}"
    run.lines.append(f"{run._give(moves.stored)}(block, warp, {given})")


def _bytes(pieces: list[Lanes], kind: Type) -> Lanes:
    both = np.empty((LANES, len(pieces)), kind)
    for i, piece in enumerate(pieces):
        both[:, i] = piece
    return both.view(np.uint8)


@_line("lop3")
def _logic_of_three(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    names = dict(zip("abc", (run.read(name, np.uint32) for name in operands[1:4]), strict=True))
    expression = "".join(names.get(letter, letter) for letter in arithmetic.logic_of_three(int(operands[4], 0)))
    run.write(operands[0], expression, np.uint32)


@_line("bfe")
def _extract(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    bits = 8 * size(kind)
    word = run.read(operands[1], BITS[size(kind)])
    position, length = (run.read(name, np.uint32) for name in operands[2:])
    given = f"{word}, {position}, {length}, {bits}, {np.dtype(kind).kind == 'i'}"
    run.write(operands[0], f"{run._give(arithmetic.extracted)}({given})", np.int32 if bits == 32 else np.int64)


@_line("prmt")
def _permute(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    """Chosen by a number, whose digits take bytes and not signs of bytes."""
    if len(parts) > 2 or register_type(operands[3]) is not None:
        raise _Unknown
    try:
        choice = int(constant(operands[3], np.uint32)[0])
    except ValueError:
        raise _Unknown from None
    if choice & 0x8888:
        raise _Unknown
    bytes = [choice >> 4 * i & 7 for i in range(4)]
    a, b = (run.read(name, np.uint32) for name in operands[1:3])
    pieces = []
    for source, first in ((a, 0), (b, 4)):
        # Bytes that move by the same distance move together.
        for by in range(-3, 4):
            here = [i for i, byte in enumerate(bytes) if first <= byte < first + 4 and byte - first - i == by]
            mask = sum(0xFF << 8 * i for i in here)
            if mask:
                moved = f"{source} {'>>' if by > 0 else '<<'} {run._give(np.uint32(8 * abs(by)))}" if by else source
                pieces.append(f"({moved} & {run._give(np.uint32(mask))})")
    run.write(operands[0], " | ".join(pieces), np.uint32)


@_line("shfl")
def _shuffle(run: _Writer, parts: tuple[str, ...], operands: tuple[str, ...], kind: Type) -> None:
    """Across a number of lanes."""
    if parts[2] != "bfly" or int(operands[3], 0) >> 8:
        raise _Unknown
    try:
        by = constant(operands[2], np.uint32)
    except ValueError:
        raise _Unknown from None
    other = np.arange(LANES) ^ by.astype(np.int64)
    if register_type(operands[2]) is not None or (other >= LANES).any():
        raise _Unknown
    run.write(operands[0].split("|")[0], f"{run.read(operands[1], np.uint32)}[{run._give(other)}]", np.uint32)
