"""Products of matrices: mma.sync of a warp, and wgmma, whose warps multiply 16 rows each (PTX ISA: warp-level and
asynchronous warpgroup-level matrix instructions).

Sums are fp32, in an order that is not the hardware's; those of e4m3, too, of which the hardware keeps fewer bits. Sums
of s8 are s32, and exact. A wgmma reads shared memory, and writes its registers, any time from when it is issued to when
it is waited for: here at one or the other, as is drawn. Registers it reads are taken when it is issued.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache, partial

import numpy as np

from tests.support.ptx.copies import swizzled
from tests.support.ptx.memory import Fault
from tests.support.ptx.step import Step, executes
from tests.support.ptx.values import LANES, Lanes, Type, halves, wide_bytes

_GROUP, _IN_GROUP = np.arange(LANES) // 4, np.arange(LANES) % 4


def _left(registers: list[Lanes], bfloat: bool) -> Lanes:
    """[16, 16] from four registers of two 16-bit floats."""
    found = np.empty((16, 16), np.float32)
    found[_left_places()] = halves(np.concatenate(registers), bfloat).reshape(4, LANES, 2)
    return found


@cache
def _left_places() -> tuple[Lanes, Lanes]:
    """Row and column [register, lane, half]."""
    i, j = np.arange(4)[:, None, None], np.arange(2)
    return _GROUP[:, None] + 8 * (i & 1) + 0 * j, 2 * _IN_GROUP[:, None] + j + 8 * (i >> 1)


def _right(registers: list[Lanes], bfloat: bool) -> Lanes:
    """[16, 8] from two registers of two 16-bit floats."""
    found = np.empty((16, 8), np.float32)
    found[_right_places()] = halves(np.concatenate(registers), bfloat).reshape(2, LANES, 2)
    return found


@cache
def _right_places() -> tuple[Lanes, Lanes]:
    """Row and column [register, lane, half]."""
    i, j = np.arange(2)[:, None, None], np.arange(2)
    return 2 * _IN_GROUP[:, None] + j + 8 * i, _GROUP[:, None] + 0 * i + 0 * j


@cache
def _places(registers: int) -> tuple[Lanes, Lanes]:
    """Row and column [registers, lanes] of a sum's registers."""
    i = np.arange(registers)[:, None]
    return _GROUP + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * _IN_GROUP + (i & 1)


def _sums(step: Step, names: tuple[str, ...], kind: Type = np.float32) -> Lanes:
    found = np.empty((16, 2 * len(names)), kind)
    registers = step.warp.registers
    found[_places(len(names))] = np.concatenate([registers[name] for name in names]).view(kind).reshape(-1, LANES)
    return found


def _write_sums(step: Step, names: tuple[str, ...], sums: Lanes) -> None:
    bits = np.ascontiguousarray(sums[_places(len(names))]).view(np.uint32)
    step.warp.registers.update(zip(names, bits, strict=True))


@executes("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
def _mma(step: Step) -> None:
    step.whole_warp()
    bfloat = step.parts[-2] == "bf16"
    left = _left([step.value(name, np.uint32) for name in step.vector(1)], bfloat)
    right = _right([step.value(name, np.uint32) for name in step.vector(2)], bfloat)
    _write_sums(step, step.vector(0), left @ right + _sums(step, step.vector(3)))


_SHAPES = [f"m64n{columns}k{features}" for columns in range(8, 257, 8) for features in (16, 32)]


@executes("wgmma.mma_async.sync.aligned", " ".join([*_SHAPES, "e4m3"]))
def _wgmma(step: Step) -> None:
    step.whole_warp()
    warp = step.warp
    left: Lanes | list[Lanes] = step.read(1, np.uint64)[:1] if step.operands[1][0] != "{" else []
    if isinstance(left, list):
        left = [step.value(name, np.uint32).copy() for name in step.vector(1)]
    adds = bool(step.read(3, np.bool_).all())
    product = partial(_multiply, step, left, step.read(2, np.uint64), adds)
    behind = any(any(group) for group in (*warp.product_groups, warp.products))
    late = behind or step.block.random.random() < step.block.laziness
    warp.products.append(product if late else product())


def _multiply(step: Step, left: Lanes | list[Lanes], right: Lanes, adds: bool) -> None:
    shape = re.fullmatch(r"m64n(\d+)k(16|32)", step.parts[4])
    assert shape
    numbers, columns, names = [int(text) for text in step.operands[4:]], int(shape[1]), step.vector(0)
    kinds = tuple(step.parts[5:])
    whole, eighths = kinds == ("s32", "s8", "s8"), kinds == ("f32", "e4m3", "e4m3")
    if numbers[:2] != ([] if whole else [1, 1]) or kinds[0] not in ("f32", "s32"):
        raise Fault("this kind of product is not emulated")
    if (whole or eighths) != (shape[2] == "32"):
        raise Fault("this kind of product is not emulated")
    if whole or eighths:
        if isinstance(left, list):
            raise Fault("products of bytes in registers are not emulated")
        kind = np.int32 if whole else np.float32
        a = _bytes(step, left, 16, 16 * (step.warp.number % 4), kind)
        b = _bytes(step, right, columns, 0, kind)
        _write_sums(step, names, a @ b.T + _sums(step, names, kind) if adds else a @ b.T)
        return
    bfloat = step.parts[-1] == "bf16"
    if isinstance(left, list):
        a = _left(left, bfloat)
    else:
        a = _tile(step, left, 16, 16 * (step.warp.number % 4), numbers[2] == 1, bfloat)
    b = _tile(step, right, columns, 0, numbers[-1] == 1, bfloat)
    _write_sums(step, names, a @ b.T + _sums(step, names) if adds else a @ b.T)


def _tile(step: Step, descriptor: Lanes, rows: int, first: int, transposed: bool, bfloat: bool) -> Lanes:
    """[rows, 16] from row `first` on of the matrix that a descriptor describes (PTX ISA: wgmma, shared memory)."""
    return halves(_described(step, descriptor, rows, first, transposed), bfloat).reshape(rows, 16)


def _bytes(step: Step, descriptor: Lanes, rows: int, first: int, kind: Type) -> Lanes:
    """The same of [rows, 32] numbers, s8 as int32 or e4m3 as float32, which lie where 16 of two bytes would."""
    found = np.ascontiguousarray(_described(step, descriptor, rows, first, False))
    wide = wide_bytes(found.view(np.uint8)) if kind == np.float32 else found.view(np.int8).astype(kind)
    return wide.reshape(rows, 32)


def _described(step: Step, descriptor: Lanes, rows: int, first: int, transposed: bool) -> Lanes:
    if len(set(descriptor)) > 1:
        raise Fault("a descriptor differs between lanes")
    address = _addresses(int(descriptor[0]), rows, first, transposed)
    return step.block.shared.load_behind_fence(address, 2, step.warp.number)


@lru_cache(maxsize=1 << 12)
def _addresses(word: int, rows: int, first: int, transposed: bool) -> Lanes:
    """[rows, 16], where in shared memory the elements lie."""
    start, leading, stride = ((word >> i & 0x3FFF) << 4 for i in (0, 16, 32))
    mode = {0: 0, 1: 3, 2: 2, 3: 1}[word >> 62]
    if not mode or word >> 49 & 7:
        raise Fault("matrices without a swizzle, or off its pattern, are not emulated")
    width = 16 << mode
    row, k = (first + np.arange(rows))[:, None], np.arange(16)[None, :]
    if transposed:
        per = width // 2
        address = start + row % per * 2 + row // per * leading + k % 8 * width + k // 8 * stride
    else:
        address = start + row // 8 * stride + row % 8 * width + k * 2
    return swizzled(address, mode)


@executes("wgmma.commit_group.sync.aligned")
def _commit(step: Step) -> None:
    step.warp.product_groups.append(step.warp.products)
    step.warp.products = []


@executes("wgmma.wait_group.sync.aligned")
def _wait(step: Step) -> None:
    while len(step.warp.product_groups) > int(step.operands[0]):
        for product in step.warp.product_groups.pop(0):
            if product is not None:
                product()
