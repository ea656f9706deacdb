"""What the emulator's core in C computes is what the definitions in Python compute, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support.ptx import core
from tests.support.ptx.machine import Block, Launch, executions
from tests.support.ptx.memory import GlobalMemory, Region
from tests.support.ptx.order import Order
from tests.support.ptx.parse import Instruction, Program, parse
from tests.support.ptx.step import register_type
from tests.support.ptx.translate import Translation
from tests.support.ptx.values import LANES, Lanes

pytestmark = pytest.mark.long

WARPS = 6
"""Of a program, each with registers of its own."""
WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")
REGISTER = {"8": "%rs", "16": "%rs", "32": "%r", "64": "%rd"}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SHARED = 8192
"""Bytes of shared memory."""


def operands(kind: str, count: int) -> str:
    """A result and so many operands of a type."""
    register = REGISTER[kind.lstrip("busf")]
    return ", ".join(f"{register}{i}" for i in range(count + 1))


def of_integers() -> Iterator[str]:
    for kind in WHOLE:
        register, bits = REGISTER[kind[1:]], int(kind[1:])
        for name in ("add", "sub", "mul.lo", "min", "max"):
            yield f"{name}.{kind} {operands(kind, 2)};"
        yield f"max.relu.{kind} {operands(kind, 2)};"
        yield f"neg.{kind} {operands(kind, 1)};"
        yield f"mad.lo.{kind} {operands(kind, 3)};"
        for name in ("shl.b", "shr.b", "shr.s"):
            yield f"{name}{bits} {register}0, {register}1, %r2;"
            yield f"and.b32 %r2, %r2, 31; {name}{bits} {register}0, {register}1, %r2;"
        for comparison in COMPARISONS:
            yield f"setp.{comparison}.{kind} %p0, {register}1, {register}2;"
        for how in ("and", "or", "xor"):
            yield f"setp.lt.{how}.{kind} %p0, {register}1, {register}2, !%p3;"
        if bits < 64:
            wide = REGISTER[str(2 * bits)]
            yield f"mul.wide.{kind} {wide}0, {register}1, {register}2;"
            yield f"mad.wide.{kind} {wide}0, {register}1, {register}2, {wide}3;"
        if bits == 32:
            yield f"mul.hi.{kind} {operands(kind, 2)};"
            yield f"mad.hi.{kind} {operands(kind, 3)};"
        if bits > 16:
            for name in ("div", "rem"):
                yield f"{name}.{kind} {operands(kind, 2)};"
                yield f"{name}.{kind} {register}0, {register}1, -1;"
            yield f"bfe.{kind} {register}0, {register}1, %r2, %r3;"
            yield f"and.b32 %r2, %r2, 63; and.b32 %r3, %r3, 63; bfe.{kind} {register}0, {register}1, %r2, %r3;"
            yield f"cvt.rn.f32.{kind} %r0, {register}1;"
    yield from (f"abs.s{bits} {operands(str(bits), 1)};" for bits in (32, 64))
    for bits in ("16", "32", "64"):
        yield from (f"{name}.b{bits} {operands(bits, 2)};" for name in ("and", "or", "xor"))
        yield f"not.b{bits} {operands(bits, 1)};"
        yield f"mov.b{bits} {operands(bits, 1)};"
        yield f"selp.b{bits} {operands(bits, 2)}, %p3;"
    yield from (f"{name}.pred %p0, %p1, !%p2;" for name in ("and", "or", "xor"))
    yield "not.pred %p0, %p1; mov.pred %p4, %p0;"
    yield from (f"{name}.b{bits} %r0, {REGISTER[bits]}1;" for name in ("popc", "clz") for bits in ("32", "64"))
    for to, of in product(("8", "16", "32", "64"), repeat=2):
        yield from (f"cvt.{a}{to}.{b}{of} {REGISTER[to]}0, {REGISTER[of]}1;" for a in "us" for b in "us")
    yield from (f"cvt.rn.f32.{kind} %r0, %rs1;" for kind in ("u8", "s8"))
    yield from (f"shf.{side}.wrap.b32 %r0, %r1, %r2, %r3;" for side in "lr")
    yield "prmt.b32 %r0, %r1, %r2, %r3;"
    yield from (f"lop3.b32 %r0, %r1, %r2, %r3, {table};" for table in range(256))
    yield "mov.b32 {%rs0, %rs4}, %r1;"
    yield "mov.b32 %r0, {%rs1, %rs2};"
    yield "mov.b64 {%r0, %r4}, %rd1;"
    yield "mov.b16 {%rs0, %rs4}, %rs1; mov.b16 %rs5, {%rs2, %rs3};"
    yield "mov.b64 %rd0, {%r1, %r2};"
    yield "mov.b64 {%rs0, %rs4, _, %rs5}, %rd1;"
    yield "mov.b64 %rd0, {%rs1, %rs2, %rs3, %rs4};"
    yield "mov.u32 %r0, %rd1; cvta.global.u64 %rd0, %rd1; mov.u64 %rd4, %r1;"
    yield "createpolicy.fractional.L2::evict_last.b64 %rd5;"
    yield "mov.u32 %r0, %tid.x; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %laneid; ld.param.b32 %r6, [x_param_0];"


def of_floats() -> Iterator[str]:
    for name in ("add", "sub", "mul", "div.full", "min", "max", "min.NaN", "max.NaN", "max.relu", "max.relu.NaN"):
        yield f"{name}.f32 %r0, %r1, %r2;"
    yield "fma.rn.f32 %r0, %r1, %r2, %r3;"
    yield "mad.f32 %r0, %r1, %r2, %r3;"
    for name in ("neg", "abs", "sqrt.approx", "rcp.approx.ftz", "rsqrt.approx", "ex2.approx.ftz", "lg2.approx"):
        yield f"{name}.f32 %r0, %r1;"
    for comparison in (*COMPARISONS, *(f"{name}u" for name in COMPARISONS), "nan", "num"):
        yield f"setp.{comparison}.f32 %p0, %r1, %r2;"
    yield "selp.f32 %r0, %r1, 0f40400000, %p3;"
    for narrow in ("bf16x2", "f16x2"):
        yield from (f"{name}.{narrow} %r0, %r1, %r2;" for name in ("add", "sub", "mul"))
        yield f"fma.rn.{narrow} %r0, %r1, %r2, %r3;"
        yield f"cvt.rn.{narrow}.f32 %r0, %r1, %r2;"
        yield f"cvt.rn.{narrow[:-2]}.f32 %rs0, %r1; cvt.f32.{narrow[:-2]} %r4, %rs1;"
    yield "abs.bf16 %rs0, %rs1;"
    yield "cvt.rn.satfinite.e4m3x2.f32 %rs0, %r1, %r2;"
    yield "cvt.rn.f16x2.e4m3x2 %r0, %rs1;"
    yield "cvt.rzi.s32.f32 %r0, %r1; cvt.f32.f32 %r4, %r1;"


def of_warps() -> Iterator[str]:
    yield from (f"shfl.sync.{how}.b32 %r0, %r1, %r2, 31, -1;" for how in ("bfly", "idx", "up", "down"))
    yield from (f"shfl.sync.{how}.b32 %r0|%p4, %r1, 3, 31, -1;" for how in ("bfly", "idx", "up", "down"))
    yield from (f"vote.sync.{how}.pred %p0, %p1, -1;" for how in ("any", "all"))
    yield "setp.ge.u32 %p1, %r1, 0; vote.sync.all.pred %p0, %p1, -1;"
    yield "vote.sync.ballot.b32 %r0, %p1, -1;"
    yield from (f"redux.sync.{how}.{kind} %r0, %r1, -1;" for how in ("add", "min", "max") for kind in ("u32", "s32"))
    yield from (f"redux.sync.{how}.b32 %r0, %r1, -1;" for how in ("and", "or", "xor"))
    yield "elect.sync %r4|%p0, -1;"
    yield "{ .reg .b16 low; .reg .pred q; cvt.u16.u32 low, %r1; setp.lt.u32 q, %r1, %r2; @q mov.b32 %r0, {low, %rs1}; }"
    yield "{ .reg .b32 word; mov.b32 %r0, word; mov.b32 word, %r1; }"
    yield "fence.proxy.async.shared::cta; bar.warp.sync -1; fence.acq_rel.gpu;"
    for kind in ("bf16", "f16"):
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        yield f"{mma} {{%r0, %r4, %r5, %r6}}, {{%r1, %r2, %r3, %r7}}, {{%r8, %r9}}, {{%r10, %r11, %r12, %r13}};"
    yield "setp.lt.u32 %p1, %tid.x, 7; @%p1 bra $on; add.u32 %r0, %r1, 1; bra.uni $end; $on: mov.b32 %r0, 3; $end:"
    yield "@%p1 ret; mov.b32 %r0, 3;"


def of_memory() -> Iterator[str]:
    """%rd1 lies in global memory, %r1 in shared memory, both at multiples of 16, or not."""
    for where, place in (("global", "[%rd1+32]"), ("shared", "[%r1+32]"), ("global.cg", "[%rd1]")):
        for kind in ("b8", "s8", "b16", "s16", "b32", "s32", "f32", "b64"):
            register = REGISTER[kind[1:]]
            yield f"ld.{where}.{kind} {register}0, {place};"
            yield f"st.{where}.{kind} {place}, {register}2;"
            if kind[0] == "b":
                yield f"ld.{where}.v2.{kind} {{{register}0, {register}4}}, {place};"
                yield f"st.{where}.v2.{kind} {place}, {{{register}2, {register}3}};"
        yield f"ld.{where}.v4.b32 {{%r0, _, %r4, %r5}}, {place};"
        yield f"st.{where}.v4.b32 {place}, {{%r2, %r3, 7, %r2}};"
        yield f"ld.{where}.b32 %rd0, {place}; ld.{where}.b8 %r0, {place}; ld.{where}.s8 %r4, {place};"
    for where, place in (("global", "[%rd1]"), ("shared", "[%r1]")):
        for kind, how in product(("u32", "s32", "u64", "s64"), ("add", "min", "max")):
            register = REGISTER[kind[1:]]
            yield f"atom.{where}.{how}.{kind} {register}0, {place}, {register}2;"
            yield f"red.{where}.{how}.{kind} {place}, {register}2;"
        yield f"atom.{where}.add.f32 %r0, {place}, %r2;"
        for how, bits in product(("and", "or", "exch"), ("32", "64")):
            yield f"atom.{where}.{how}.b{bits} {REGISTER[bits]}0, {place}, {REGISTER[bits]}2;"
    for turned in ("", ".trans"):
        for count in (1, 2, 4):
            four = ", ".join(("%r0", "%r4", "%r5", "%r6")[:count])
            yield f"ldmatrix.sync.aligned.m8n8.x{count}{turned}.shared.b16 {{{four}}}, [%r1+16];"
            yield f"stmatrix.sync.aligned.m8n8.x{count}{turned}.shared.b16 [%r1+16], {{{four}}};"
    yield "prefetch.global.L2 [%rd1+8];"
    yield "cp.async.bulk.prefetch.L2.global [%rd1], 64;"


def of_products() -> Iterator[str]:
    """wgmma of what lies in shared memory, whose descriptors are in %rd1 and %rd2."""
    for (kind, n), adds in product((("f16", 16), ("bf16", 64), ("bf16", 8)), ("1", "0")):
        sums = ", ".join(f"%r{20 + i}" for i in range(n // 2))
        opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        done = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        for left, right in product("01", "01"):
            yield f"mov.pred %p4, {adds}; {opcode} {{{sums}}}, %rd1, %rd2, %p4, 1, 1, {left}, {right}; {done}"
        four = "{%r1, %r2, %r3, %r4}"
        yield f"mov.pred %p4, {adds}; {opcode} {{{sums}}}, {four}, %rd2, %p4, 1, 1, 1; {done}"
    for (kinds, rest), n in product((("f32.e4m3.e4m3", ", 1, 1"), ("s32.s8.s8", "")), (16, 64)):
        sums = ", ".join(f"%r{20 + i}" for i in range(n // 2))
        opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k32.{kinds}"
        yield f"{opcode} {{{sums}}}, %rd1, %rd2, %p1{rest}; {done}"


def parsed(body: str, warps: int = 1) -> Program:
    return parse(f".visible .entry x(.param .u32 x_param_0)\n.reqntid {warps * LANES}\n{{ {body} ret; }}")


class Case:
    """A program with drawn registers and memory."""

    def __init__(self, body: str, seed: int, ordered: bool = False, warps: int = WARPS) -> None:
        self.program, self.random, self.ordered = parsed(body, warps), np.random.default_rng(seed), ordered
        self.seed = seed
        self.places: Lanes | None = None
        """Where in both memories instructions load and store, [warps, lanes]."""
        self.unfenced: list[int] = []
        """The granules of shared memory that threads have stored to, without a fence."""
        self.execute = executions(self.program)
        self.translation = Translation(self.program, self.execute)
        self.bytes = self.random.integers(0, 256, 1024, dtype=np.uint8)
        self.shared = self.random.integers(0, 256, SHARED, dtype=np.uint8)
        self.registers: list[dict[str, Lanes]] = [{} for _ in range(warps)]
        self.names = sorted({name for instruction in self.program.code for name in named(instruction)} - {"%rd1"})
        for name in (*self.names, "%rd1"):
            if (kind := register_type(name)) is None:
                continue
            chosen = self.random.random((warps, LANES)) < self.random.choice([0.0, 0.5, 1.0], (warps, 1))
            values = chosen if kind is np.bool_ else drawn(self.random, warps, np.dtype(kind))
            for warp, value in enumerate(values):
                if not (name.endswith("0") and warp % 3 == 0):  # else it is one that nobody has written
                    self.registers[warp][name] = value

    def outcome(self, used: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
        """The registers and the memory behind the program, or what it says is wrong."""
        monkeypatch.setattr(core, "USED", used)
        room = np.zeros(self.bytes.size + 128, np.uint8)
        data = room[-core.pointer(room) % 128 :][: self.bytes.size]
        data[:] = self.bytes
        begin = core.pointer(data)
        order = Order() if self.ordered else None
        region = Region("x", begin, data)
        memory = GlobalMemory([region], order)
        if order is not None:
            order.begin("before", True)
            order.begin("x", True)
            region.written[:9] = 1
            if self.seed % 2:
                region.line_written[:4], region.line_cached[1:3] = 2, 1
        state, _alive = memory.state(False)
        self.translation.describe(state)
        given = {"x_param_0": 77, "global_smem": 0, **{f"%nctaid.{axis}": 1 for axis in "xyz"}}
        launch = Launch(self.program, self.execute, self.translation, SHARED, given, {}, memory, False, True, state)
        block = Block(launch, (5, 0, 0), random.Random(0))
        block.shared.bytes[:] = self.shared
        block.shared._stored_at[self.unfenced] = 1
        for warp, registers in zip(block.warps, self.registers, strict=True):
            warp.registers.update(registers.items())
            if self.places is not None:
                warp.registers["%rd1"] = self.places[warp.number].astype(np.uint64) + np.uint64(begin)
                warp.registers["%r1"] = self.places[warp.number].astype(np.uint32)
        try:
            with np.errstate(all="ignore"):
                block.run()
        except AssertionError as error:
            return type(error), str(error)
        numbers = numbers_of(self.program)
        found = [warp.registers.get(name) for warp in block.warps for name in self.names]
        bits = [None if value is None else with_one_nan(value, numbers) for value in found]
        notes = region.written, region.line_written, region.line_cached
        kept = block.shared._stored_at, block.shared._storer, block.shared._fenced_at
        memory_after = (with_one_nan(x, numbers) for x in (data, block.shared.bytes))
        return bits, *memory_after, *(x.tobytes() for x in (*notes, *kept))

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both ways are the same."""
        assert self.outcome(True, monkeypatch) == self.outcome(False, monkeypatch)


OF_SEVERAL = frozenset(["add", "sub", "mul", "div", "min", "max", "fma", "mad", "mma", "wgmma", "atom", "red"])
"""Instructions that compute a number of several."""


def numbers_of(program: Program) -> Any:
    """The type of the floats that a program computes of several others, if it is one of which any bits may be NaN."""
    for instruction in program.code:
        if instruction.parts[0] in OF_SEVERAL and {"f16x2", "f32"} & set(instruction.parts):
            return np.float16 if "f16x2" in instruction.parts else np.float32
    return None


def with_one_nan(bits: Lanes, numbers: Any) -> bytes:
    """Bits in which all NaN of a type of floats are the same. Of several NaN, what an instruction gives is any: neither
    PTX nor numpy says which, and compilers exchange operands."""
    if numbers is None or bits.dtype == bool or bits.itemsize not in (1, 4):
        return bits.tobytes()
    found = bits.view(numbers).copy()
    found[np.isnan(found)] = np.nan
    return found.tobytes()


def named(instruction: Instruction) -> list[str]:
    """The registers of an instruction, and its other operands."""
    text = " ".join((instruction.guard, *instruction.operands))
    for sign in "{}[],+|!":
        text = text.replace(sign, " ")
    return text.split()


SPECIAL = np.array(
    [
        *(n for i in (*range(3), 5, 6, 7, 8, 15, 16, 31, 32, 63) for n in ((1 << i) - 1, 1 << i, (1 << i) + 1)),
        (1 << 64) - 1,
    ],
    np.uint64,
)
"""Integers at the ends of their types, and numbers of bits."""
FLOATS = np.array(
    [
        *(0x7F800000, 0xFF800000),  # infinities
        *(0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFA00000),  # NaN, the latter two of which signal
        *(0x00000001, 0x807FFFFF, 0x00800000),  # subnormal numbers, and the smallest that is none
        *(0x80000000, 0x3F800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF),  # -0; 1; halfway between bf16; the largest
        *(0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FE000, 0x38800000),  # ends of fp16
        *(0x43E00000, 0x43E80000, 0xC3F00000, 0x3B000000, 0x3A800000, 0x3C7FFFFF),  # ends of e4m3
        *(0x4F000000, 0xCF000000),  # ends of s32
        *(0xC3150000, 0xC3160000, 0x43000000),  # numbers whose power of 2 is near the ends of fp32
    ],
    np.uint64,
)
HALVES = np.array(
    [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFDFF, 1, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0x7F80, 0x7F81, 0xFFC1, 0x80]
)
"""Numbers at the ends of fp16 and bf16, and what is none."""


def drawn(random: np.random.Generator, warps: int, kind: np.dtype[Any]) -> Lanes:
    """Any bits, those of usual numbers, and those of numbers near the edges of others, [warps, lanes]: of one sort in
    all lanes of a warp, or in each of another."""
    shape = warps, LANES
    any_bits = random.integers(0, 1 << 64, shape, dtype=np.uint64)
    special, floats = random.choice(SPECIAL, shape), random.choice(FLOATS, shape)
    usual = (random.normal(size=shape) * 10.0 ** random.integers(-6, 6, (warps, 1))).astype(np.float32).view(np.uint32)
    halves = random.choice(HALVES, (*shape, 4)).astype(np.uint16).view(np.uint64)[..., 0]
    sorts = np.stack([any_bits, special, floats, usual.astype(np.uint64), halves])
    sort = np.where(random.random((warps, 1)) < 0.7, random.integers(0, 5, shape), random.integers(0, 5, (warps, 1)))
    return np.take_along_axis(sorts, sort[None], 0)[0].astype(kind)


def taken(body: str) -> list[bool]:
    """Whether the core executes each instruction."""
    program = parsed(body)
    return [bool(count >= 0) for count in Translation(program, executions(program)).code["count"]]


PLAIN = [*of_integers(), *of_floats(), *of_warps()]


@pytest.mark.parametrize("ways", [PLAIN[i::8] for i in range(8)], ids=range(8))
def test_registers(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All lanes, and those that a predicate chooses, with a result that somebody has written before, or nobody."""
    for body in ways:
        assert all(taken(body)), body
        Case(body, 0).check(monkeypatch)
        if body.count(";") == 1 and not body.startswith(("@", "{")):
            Case(f"@%p7 {body}", 1).check(monkeypatch)
            Case(f"@!%p7 {body}", 2).check(monkeypatch)


@pytest.mark.parametrize("ordered", [False, True])
def test_memory(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At places that are right, and at ones that are not: then both say the same."""
    said = set()
    for body in of_memory():
        assert all(taken(body)), body
        for seed, guard in product(range(3), ("", "@%p7 ")):
            case = Case(guard + body, seed, ordered, warps=3)
            wrong, shape = case.random.random(), (3, LANES)
            # Byte 1024, which is the first behind the memory, is that of place 62 or 64.
            case.places = case.random.integers(0, case.random.integers(62, 70) if wrong < 0.3 else 50, shape) * 16
            if wrong > 0.8:
                case.places += case.random.integers(0, 16, shape)
            found = case.outcome(True, monkeypatch)
            assert found == case.outcome(False, monkeypatch), (body, seed)
            said.add(found[0] if len(found) == 2 else None)
    assert len(said) == 2 + ordered, said


def test_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices under each swizzle that a descriptor may say, some of which leave the memory."""
    for body in of_products():
        for seed, mode in product(range(4), (1, 2, 3)):
            case = Case(body, seed, warps=1)
            start, leading, stride = (int(x) for x in case.random.integers(0, 12 if seed else 30, 3) * 8)
            word = start << 3 | leading << 16 | stride << 32 | mode << 62
            case.unfenced = [seed] if seed > 1 else []
            case.registers[0]["%rd2"] = np.full(LANES, word, np.uint64)
            case.registers[0]["%rd1"] = np.full(LANES, (mode << 62) + (8 << 32), np.uint64)
            case.check(monkeypatch)


def test_every_operation_is_compared() -> None:
    used: set[int] = set()
    for body in (*PLAIN, *of_memory()):
        program = parsed(body)
        used |= set(Translation(program, executions(program)).table["op"].tolist())
    missing = [name for name, number in core.operations().items() if number not in used]
    assert missing == []


def test_without_a_compiler_the_definitions_execute_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = PLAIN[::40]
    compiled = [Case(body, 0).outcome(True, monkeypatch) for body in bodies]
    core.library.cache_clear()
    core.operations.cache_clear()
    monkeypatch.setattr(core, "find_compiler", lambda: None)
    try:
        assert not any(any(taken(body)) for body in bodies)
        assert [Case(body, 0).outcome(True, monkeypatch) for body in bodies] == compiled
    finally:
        core.library.cache_clear()
        core.operations.cache_clear()
