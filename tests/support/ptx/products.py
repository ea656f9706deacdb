"""Products of matrices: mma.sync of a warp, and wgmma, whose warps multiply 16 rows each (PTX ISA: warp-level and
asynchronous warpgroup-level matrix instructions).

Sums are fp32, and products are added one by one, which is not the hardware's order; those of e4m3, too, of which the
hardware keeps fewer bits. Sums of s8 are s32, and exact. A wgmma reads shared memory, and writes its registers, any
time from when it is issued to when it is waited for: here at one or the other, as is drawn. Registers it reads are
taken when it is issued.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np

from tests.support.ptx import core
from tests.support.ptx.copies import swizzled
from tests.support.ptx.memory import Fault
from tests.support.ptx.parse import inside
from tests.support.ptx.step import Step, executes
from tests.support.ptx.values import LANES, Lanes, Type, any_of, halves, wide_bytes, widen

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
def _places(registers: int) -> Lanes:
    """Return where in [16, 2 * registers] the elements of a sum's registers, [registers, lanes], stand."""
    i = np.arange(registers)[:, None]
    row, column = _GROUP + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * _IN_GROUP + (i & 1)
    return row * 2 * registers + column


def _sums(step: Step, names: tuple[str, ...], kind: Type = np.float32) -> Lanes:
    found = np.empty((16, 2 * len(names)), kind)
    words = np.concatenate([step.warp.registers[name] for name in names])
    found.reshape(-1)[_places(len(names))] = words.view(kind).reshape(-1, LANES)
    return found


def _write_sums(step: Step, names: tuple[str, ...], sums: Lanes) -> None:
    words = sums.reshape(-1).take(_places(len(names))).view(np.uint32)
    step.warp.registers.update(zip(names, words, strict=True))


@executes("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
def _mma(step: Step) -> None:
    step.whole_warp()
    bfloat = step.parts[-2] == "bf16"
    names = _vectors(step.operands)
    left = _left([step.value(name, np.uint32) for name in names[1]], bfloat)
    right = _right([step.value(name, np.uint32) for name in names[2]], bfloat)
    _write_sums(step, names[0], _product_of(left, right) + _sums(step, names[3]))


def _product_of(left: Lanes, right: Lanes) -> Lanes:
    """[m, k] times [k, n]. The products of an element are added from the first to the last."""
    sums = left[:, :1] * right[:1]
    for k in range(1, len(right)):
        sums += left[:, k : k + 1] * right[k : k + 1]
    return sums


@lru_cache(maxsize=1 << 14)
def _vectors(operands: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(inside, operands))


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


@dataclass(frozen=True)
class _Product:
    """Fields of the text of a wgmma."""

    names: tuple[str, ...]
    """Registers of the sums."""
    columns: int
    kind: Type
    """Type of the sums."""
    bytes: bool
    """Whether numbers of one byte are multiplied, s8 where the sums are integers, else e4m3."""
    bfloat: bool
    """Whether numbers of two bytes are bf16."""
    transposed: tuple[bool, bool]

    @property
    def number(self) -> int:
        """Of what is multiplied, as `core.c` counts."""
        name = ("s8" if self.kind is np.int32 else "e4m3") if self.bytes else "bf16" if self.bfloat else "f16"
        return core.PRODUCT_KINDS.index(name)


@cache
def _product(parts: tuple[str, ...], operands: tuple[str, ...]) -> _Product:
    shape = re.fullmatch(r"m64n(\d+)k(16|32)", parts[4])
    assert shape
    numbers, kinds = [int(text) for text in operands[4:]], tuple(parts[5:])
    whole, eighths = kinds == ("s32", "s8", "s8"), kinds == ("f32", "e4m3", "e4m3")
    if numbers[:2] != ([] if whole else [1, 1]) or kinds[0] not in ("f32", "s32"):
        raise Fault("this kind of product is not emulated")
    if (whole or eighths) != (shape[2] == "32"):
        raise Fault("this kind of product is not emulated")
    if (whole or eighths) and operands[1][0] == "{":
        raise Fault("products of bytes in registers are not emulated")
    transposed = (False, False) if whole or eighths else (numbers[2] == 1, numbers[-1] == 1)
    kind, bfloat = np.int32 if whole else np.float32, kinds[-1] == "bf16"
    return _Product(inside(operands[0]), int(shape[1]), kind, whole or eighths, bfloat, transposed)


def _multiply(step: Step, left: Lanes | list[Lanes], right: Lanes, adds: bool) -> None:
    product = _product(step.parts, step.operands)
    if _multiplied(step, product, left, right, adds):
        return
    if isinstance(left, list):
        a = _left(left, product.bfloat)
    else:
        a = _tile(step, product, left, 16, 16 * (step.warp.number % 4), product.transposed[0])
    b = _tile(step, product, right, product.columns, 0, product.transposed[1])
    sums = _product_of(a, b.T)
    _write_sums(step, product.names, sums + _sums(step, product.names, product.kind) if adds else sums)


def _multiplied(step: Step, product: _Product, left: Lanes | list[Lanes], right: Lanes, adds: bool) -> bool:
    """Whether `core.c` has computed it. It does not where something is wrong."""
    if (library := core.in_use()) is None:
        return False
    found = step.block.translation.product(product.names, product.columns, product.number, product.transposed)
    if found is None or any_of(right != right[0]):
        return False
    given = np.concatenate(left) if isinstance(left, list) else None
    return bool(
        library.multiply(
            ctypes.addressof(step.warp.state),
            ctypes.addressof(found),
            None if given is None else core.pointer(given),
            int(left[0]) if given is None else 0,
            int(right[0]),
            adds,
        )
    )


def _tile(step: Step, product: _Product, descriptor: Lanes, rows: int, first: int, transposed: bool) -> Lanes:
    """[rows, 16] from row `first` on of the matrix that a descriptor describes (PTX ISA: wgmma, shared memory); of
    numbers of one byte [rows, 32], which lie where 16 of two bytes would."""
    if any_of(descriptor != descriptor[0]):
        raise Fault("a descriptor differs between lanes")
    pairs, granules = _pairs(int(descriptor[0]), rows, first, transposed)
    found = step.block.shared.load_behind_fence(pairs, granules, step.warp.number)
    if not product.bytes:
        return widen(found) if product.bfloat else found.view(np.float16).astype(np.float32)
    return found.view(np.int8).astype(product.kind) if product.kind is np.int32 else wide_bytes(found.view(np.uint8))


@lru_cache(maxsize=1 << 12)
def _pairs(word: int, rows: int, first: int, transposed: bool) -> tuple[Lanes, Lanes]:
    """[rows, 16], which pairs of bytes of shared memory the elements are, and the granules in which they lie."""
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
    address = swizzled(address, mode)
    return address >> 1, np.unique(address >> 4)


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
