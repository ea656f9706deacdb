"""Instructions between registers (PTX ISA: arithmetic, comparison, logic, shift, conversion, shuffles, votes).

fp32 is rounded correctly, but fma, ex2 and lg2 first to fp64 and then to fp32. Approximations (ex2.approx, div.full
and so on) are exact here, and .ftz flushes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import torch

from tests.support.ptx.memory import Fault
from tests.support.ptx.step import Step, executes
from tests.support.ptx.values import (
    BITS,
    LANES,
    TYPES,
    Lanes,
    Type,
    bytes_of,
    constant,
    narrow,
    packed,
    reinterpret,
    size,
    widen,
)

_TWO: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
ONE: dict[str, Callable[[Lanes], Lanes]] = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(x.dtype),
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
}
COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_ROUNDING = "rn ftz approx full"


@executes("add sub and or xor neg abs not ex2 lg2 sqrt rcp", _ROUNDING + " f16x2 s16x2")
def _simple(step: Step) -> None:
    name, narrow_floats = step.parts[0], step.parts[-1] in ("bf16", "bf16x2", "f16", "f16x2")
    if name in ("add", "sub") and step.parts[-1] == "bf16x2":
        step.write(bf16_pairs(_TWO[name], *_operands(step)))
    elif name in ("add", "sub") and step.parts[-1] == "s16x2":
        a, b = (step.read(i, np.uint32).view(np.uint16) for i in (1, 2))
        step.write(_TWO[name](a, b).view(np.uint32))
    elif name in ("add", "sub") and step.parts[-1] == "f16x2":
        step.write(half_pairs(_TWO[name], *_operands(step)))
    elif name == "abs" and step.parts[-1] == "bf16":
        step.write(step.read(1) & np.uint16(0x7FFF))
    elif narrow_floats:
        raise NotImplementedError(f"{name} of {step.parts[-1]}")
    elif name in _TWO:
        step.write(_TWO[name](step.read(1), step.read(2)))
    else:
        step.write(ONE[name](step.read(1)))


@executes("mul mad", _ROUNDING + " lo wide hi f16x2")
def _multiply(step: Step) -> None:
    kind, parts = step.type, step.parts
    if parts[-1] == "bf16x2":
        step.write(bf16_pairs(np.multiply, *_operands(step)))
        return
    if parts[-1] == "f16x2":
        step.write(half_pairs(np.multiply, *_operands(step)))
        return
    if "wide" in parts or "hi" in parts:
        if size(kind) == 8:
            raise Fault("a product of 128 bits is not emulated")
        wide = np.dtype(f"{np.dtype(kind).kind}{2 * size(kind)}").type
        product = step.read(1).astype(wide) * step.read(2).astype(wide)
        if "hi" in parts:
            product, wide = (product >> wide(8 * size(kind))).astype(kind), kind
    else:
        product, wide = step.read(1) * step.read(2), kind
    step.write(product + step.read(3, wide) if parts[0] == "mad" else product)


@executes("fma", _ROUNDING + " f16x2")
def _fma(step: Step) -> None:
    if step.parts[-1] == "bf16x2":
        step.write(bf16_pairs(fused, *_operands(step)))
    elif step.parts[-1] == "f16x2":
        step.write(half_pairs(fused, *_operands(step)))
    else:
        a, b, c = (step.read(i).astype(np.float64) for i in (1, 2, 3))
        step.write((a * b + c).astype(step.type))


def _operands(step: Step) -> list[Lanes]:
    return [step.read(i, np.uint32) for i in range(1, len(step.operands))]


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c in float64."""
    return a.astype(np.float64) * b + c


def bf16_pairs(function: Callable[..., Lanes], *pairs: Lanes) -> Lanes:
    """A function of float32 on pairs of bfloat16, which words hold."""
    found = function(*[widen(np.ascontiguousarray(x).view(np.uint16)) for x in pairs])
    return narrow(found.astype(np.float32, copy=False)).view(np.uint32)


def half_pairs(function: Callable[..., Lanes], *pairs: Lanes) -> Lanes:
    """A function on pairs of float16, which words hold."""
    found = function(*[np.ascontiguousarray(x).view(np.float16) for x in pairs])
    return found.astype(np.float16, copy=False).view(np.uint32)


@executes("min max", "ftz NaN relu")
def _extreme(step: Step) -> None:
    found = extreme(step.parts, step.type)(step.read(1), step.read(2))
    step.write(np.maximum(found, step.type(0)) if "relu" in step.parts else found)


def extreme(parts: tuple[str, ...], kind: Type) -> Callable[[Lanes, Lanes], Lanes]:
    """Return what `min` or `max` of this type computes; of a number and NaN it is the number, unless NaN is asked
    for."""
    if np.dtype(kind).kind == "f" and "NaN" not in parts:
        return np.fmin if parts[0] == "min" else np.fmax
    return np.minimum if parts[0] == "min" else np.maximum


@executes("div rem", _ROUNDING)
def _divide(step: Step) -> None:
    a, b = step.read(1), step.read(2)
    if np.dtype(step.type).kind == "f":
        step.write(a / b)
        return
    by = np.where(b == 0, step.type(1), b)  # in lanes that do not execute, or whose result nobody uses
    quotient = a // by
    quotient += (quotient * by != a) & ((a < 0) != (by < 0))  # towards zero
    step.write(quotient if step.parts[0] == "div" else a - quotient * by)


@executes("rsqrt", _ROUNDING)
def _rsqrt(step: Step) -> None:
    step.write((1 / np.sqrt(step.read(1).astype(np.float64))).astype(np.float32))


@executes("copysign")
def _copysign(step: Step) -> None:
    step.write(np.copysign(step.read(2), step.read(1)))


@executes("shl shr")
def _shift(step: Step) -> None:
    a, by = step.read(1), step.read(2, np.uint32)
    bits = 8 * a.itemsize
    within = np.minimum(by, bits - 1).astype(a.dtype)
    shifted = a << within if step.parts[0] == "shl" else a >> within
    signed = a.dtype.kind == "i" and step.parts[0] == "shr"
    step.write(shifted if signed else np.where(by >= bits, a.dtype.type(0), shifted))


@executes("shf", "l r wrap")
def _funnel_shift(step: Step) -> None:
    low, high, by = (step.read(i, np.uint32).astype(np.uint64) for i in (1, 2, 3))
    both, by = (high << np.uint64(32)) | low, by & np.uint64(31)
    step.write(((both << by) >> np.uint64(32) if "l" in step.parts else both >> by).astype(np.uint32))


@executes("bfe")
def _extract(step: Step) -> None:
    bits = 8 * size(step.type)
    word, signed = step.read(1, np.uint32 if bits == 32 else np.uint64), np.dtype(step.type).kind == "i"
    step.write(extracted(word, step.read(2, np.uint32), step.read(3, np.uint32), bits, signed))


def extracted(word: Lanes, position: Lanes, length: Lanes, bits: int, signed: bool) -> Lanes:
    """Extract some bits of words, as int32 or int64."""
    word, position, length = word.astype(np.uint64), position.astype(np.int64), length.astype(np.int64)
    above = np.minimum(64 - np.minimum(position + length, bits), 63)
    kept, down = word << above.astype(np.uint64), np.minimum(above + position, 63)
    found = kept.view(np.int64) >> down if signed else (kept >> down.astype(np.uint64)).view(np.int64)
    return np.where(length == 0, 0, found).astype(np.int32 if bits == 32 else np.int64)


@executes("prmt")
def _permute(step: Step) -> None:
    low, high, choice = (step.read(i, np.uint32).astype(np.uint64) for i in (1, 2, 3))
    both, result = low | (high << np.uint64(32)), np.zeros(LANES, np.uint64)
    for i in range(4):
        wanted = (choice >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((wanted & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(wanted & np.uint64(8), sign, byte) << np.uint64(8 * i)
    step.write(result.astype(np.uint32))


@executes("lop3")
def _logic_of_three(step: Step) -> None:
    a, b, c = (step.read(i, np.uint32) for i in (1, 2, 3))
    step.write(eval(logic_of_three(int(step.operands[4], 0)), {"a": a, "b": b, "c": c}))


@cache
def logic_of_three(table: int) -> str:
    """The shortest expression of a, b and c that gives bit 4 a + 2 b + c of a table, at every place of words."""
    known = [{0xF0: "a", 0xCC: "b", 0xAA: "c", 0x0F: "~a", 0x33: "~b", 0x55: "~c"}]  # by the number of operators
    all_known = dict(known[0])
    while table not in all_known:
        longer: dict[int, str] = {}
        for length, shorter in enumerate(known):
            for (x, left), (y, right) in product(shorter.items(), known[len(known) - 1 - length].items()):
                for symbol, value in (("&", x & y), ("|", x | y), ("^", x ^ y)):
                    if value not in all_known:
                        longer[value] = all_known[value] = f"({left} {symbol} {right})"
        known.append(longer)
    return all_known[table]


@executes("popc clz")
def _count_bits(step: Step) -> None:
    values = [int(x) for x in step.read(1, BITS[size(step.type)])]
    width = 8 * size(step.type)
    counts = [x.bit_count() if step.parts[0] == "popc" else width - x.bit_length() for x in values]
    step.write(np.array(counts, np.uint32))


@executes("setp", "and or xor ftz " + " ".join(f"{c} {c}u" for c in COMPARE) + " nan num")
def _compare(step: Step) -> None:
    a, b, how = step.read(1), step.read(2), step.parts[1]
    nan = a.dtype.kind == "f" and (np.isnan(a) | np.isnan(b))
    if how in ("nan", "num"):
        found = np.broadcast_to(nan if how == "nan" else np.logical_not(nan), LANES)
    else:
        found = COMPARE[how.removesuffix("u")](a, b)
        found = found | nan if how.endswith("u") else found & ~np.broadcast_to(nan, LANES)
    if step.parts[2] in ("and", "or", "xor"):
        found = _TWO[step.parts[2]](found, step.read(3, np.bool_))
    step.write(found)


@executes("selp")
def _select(step: Step) -> None:
    step.write(np.where(step.read(3, np.bool_), step.read(1), step.read(2)))


@cache
def halves_of_bytes() -> Lanes:
    """Table from every two e4m3 in 16 bits to the two fp16 of the same values in 32."""
    codes = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2))
    return packed(codes.view(torch.float8_e4m3fn).to(torch.float16).numpy(), np.uint32)


def pair_of_bytes(low: Lanes, high: Lanes) -> Lanes:
    """Two float32 as two e4m3 in 16 bits."""
    return packed(bytes_of(np.stack([low, high], 1)), np.uint16)


@executes("cvt", "rn rz rzi ftz bf16x2 f16x2 satfinite e4m3x2")
def _convert(step: Step) -> None:
    to, of = step.parts[-2], step.parts[-1]
    if of == "e4m3x2":
        step.write(halves_of_bytes()[step.read(1, np.uint16)])
        return
    if to == "e4m3x2":  # the first operand is the upper half here, too
        high, low = step.read(1), step.read(2)
        step.write(pair_of_bytes(low, high))
        return
    if to in ("bf16x2", "f16x2"):  # the first operand is the upper half
        high, low = step.read(1), step.read(2)
        both = np.stack([low, high], 1)
        halves = narrow(both) if to == "bf16x2" else both.astype(np.float16)
        step.write(packed(halves, np.uint32))
        return
    value = step.read(1)
    value = widen(value) if of == "bf16" else value
    step.write(narrow(value) if to == "bf16" else value.astype(TYPES[to]))


@executes("mov")
def _move(step: Step) -> None:
    kind = BITS[size(step.type)] if step.type is not np.bool_ else np.bool_
    if step.operands[0][0] == "{":
        names = step.vector(0)
        parts = np.ascontiguousarray(step.read(1, kind)).view(np.uint8).reshape(LANES, len(names), -1)
        for i, name in enumerate(names):
            step.set(name, packed(parts[:, i], BITS[parts.shape[2]]))
    elif step.operands[1][0] == "{":
        names = step.vector(1)
        small = BITS[size(kind) // len(names)]
        step.write(packed(np.stack([step.value(name, small) for name in names], 1), kind))
    else:
        step.write(step.read(1, kind))


@executes("cvta", "to param global shared")
def _generic_address(step: Step) -> None:
    step.write(step.read(1))


@executes("createpolicy", "fractional L2::evict_first L2::evict_last")
def _policy(step: Step) -> None:
    step.write(constant("0", np.uint64))


@executes("redux.sync", "add min max and or xor")
def _reduce(step: Step) -> None:
    values = step.read(1)[step.lanes]
    combine = {"min": np.minimum, "max": np.maximum}.get(step.parts[2]) or _TWO[step.parts[2]]
    step.write(np.full(LANES, combine.reduce(values, dtype=step.type), step.type))  # type: ignore[union-attr]


@executes("vote.sync", "ballot any all")
def _vote(step: Step) -> None:
    says = step.read(1, np.bool_) & step.lanes
    if step.parts[2] == "ballot":
        step.write(np.full(LANES, sum(1 << int(i) for i in np.flatnonzero(says)), np.uint32))
    else:
        step.write(np.full(LANES, says.any() if step.parts[2] == "any" else bool((says == step.lanes).all())))


@executes("elect.sync")
def _elect(step: Step) -> None:
    chosen = np.zeros(LANES, bool)
    chosen[step.lanes.argmax()] = True
    step.set(step.operands[0].split("|")[1], chosen)


@executes("shfl.sync", "bfly idx up down")
def _shuffle(step: Step) -> None:
    value, by, lane = step.read(1, np.uint32), step.read(2, np.uint32).astype(np.int64), np.arange(LANES)
    if int(step.operands[3], 0) >> 8:
        raise Fault("shuffles of less than a warp are not emulated")
    how = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by, "down": lane + by}[step.parts[2]]
    source = np.where((how < 0) | (how >= LANES), lane, how)
    if not step.lanes[source[step.lanes]].all():
        raise Fault("a lane takes the value of one that does not execute")
    step.set(step.operands[0].split("|")[0], reinterpret(value, np.uint32)[source])
