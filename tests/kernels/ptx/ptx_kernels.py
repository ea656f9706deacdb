"""Kernels for the emulator's tests, with the faults that a kernel can have."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@triton.jit
def of_two(a, b, out):
    """Stands for PTX of a test's own."""
    tl.store(out, tl.load(a) + tl.load(b))


@triton.jit
def products(
    a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_STRIDE: tl.constexpr, TURNED: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * A_STRIDE + k[None, :])
    right = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if TURNED else tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def row_figures(x, out, columns, SIZE: tl.constexpr):
    """Compute figures of each row: sum, largest, where it is, last cumulated sum but one, number above 0; and all sums
    together."""
    row, i = tl.program_id(0), tl.arange(0, SIZE)
    value = tl.load(x + row * columns + i, mask=i < columns, other=0.0)
    tl.store(out + 6 * row, tl.sum(value))
    tl.store(out + 6 * row + 1, tl.max(value))
    tl.store(out + 6 * row + 2, tl.argmax(value, 0).to(tl.float32))
    before = tl.cumsum(value) - value
    tl.store(out + 6 * row + 3, tl.sum(tl.where(i == columns - 1, before, 0.0)))
    tl.store(out + 6 * row + 4, tl.sum((value > 0).to(tl.int32)).to(tl.float32))
    tl.atomic_add(out + 5, tl.sum(value))


@triton.jit
def collatz(x, out, SIZE: tl.constexpr):
    """Count the steps that each program's number takes."""
    n, steps = tl.load(x + tl.program_id(0)), 0
    while n != 1:
        n = tl.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps)


@triton.jit
def boxes(box, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, row, column):
    m, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(out + m[:, None] * COLUMNS + n[None, :], box.load([row, column]))


@triton.jit
def double(x, out, SIZE: tl.constexpr, FAULT: tl.constexpr):
    """A link of a chain of dependent launches."""
    i = tl.arange(0, SIZE)
    if FAULT == "reads before the wait":
        early = tl.load(x + i, cache_modifier=".cg")
    if FAULT == "triggers first":
        tl.extra.cuda.gdc_launch_dependents()
    if FAULT == "stores before the wait":
        tl.store(out + i, 0.0)
    if FAULT != "does not wait":
        tl.extra.cuda.gdc_wait()
    if FAULT != "triggers first":
        tl.extra.cuda.gdc_launch_dependents()
    if FAULT == "reads before the wait":
        value = early
    elif FAULT == "reads through L1":
        value = tl.load(x + i)
    else:
        value = tl.load(x + i, cache_modifier=".cg")
    tl.store(out + i, 2 * value)


@triton.jit
def relay(waiting, out, WORKS: tl.constexpr):
    """A link that lets the next begin at once. One of its programs waits, or none, and stores if it works."""
    tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) == waiting:
        tl.extra.cuda.gdc_wait()
        if WORKS:
            tl.store(out, 1.0)


@gluon.jit
def _fetch(box, tiles, ring, full, empty):
    for i in range(tiles):
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        mbarrier.expect(full.index(i & 1), box.block_type.nbytes)
        tma.async_copy_global_to_shared(box, [i * 16, 0], full.index(i & 1), ring.index(i & 1))


@gluon.jit
def _gather(x, rows, tiles, ring, full, empty, FAULT: gl.constexpr):
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 16, gl.SliceLayout(1, lanes))
    n = gl.arange(0, 64, gl.SliceLayout(0, lanes))
    for i in range(tiles):
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        at = x + (i * 16 + m)[:, None] * 64 + n[None, :]
        async_copy.async_copy_global_to_shared(ring.index(i & 1), at, mask=(i * 16 + m < rows)[:, None])
        async_copy.commit_group()
        if FAULT != "does not wait for its copies":
            async_copy.wait_group(0)
        if FAULT != "does not fence its copies":
            fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(i & 1), count=1)


@gluon.jit
def _add_up(left, out, tiles, ring, full, empty, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    m = gl.arange(0, 64, gl.SliceLayout(1, lanes))
    k = gl.arange(0, 16, gl.SliceLayout(0, lanes))
    factor = gl.convert_layout(gl.load(left + m[:, None] * 16 + k[None, :]), gl.DotOperandLayout(0, layout, 2))
    sums = gl.zeros([64, 64], gl.float32, layout)
    for i in range(tiles):
        if FAULT != "reads before the copy":
            mbarrier.wait(full.index(i & 1), (i >> 1) & 1)
        sums = warpgroup_mma(factor, ring.index(i & 1), sums, is_async=True)
        if FAULT == "hands back before the product":
            gl.thread_barrier()
            mbarrier.arrive(empty.index(i & 1), count=1)
        if FAULT == "does not wait for its products":
            sums = warpgroup_mma_wait(1, deps=(sums,))
        else:
            sums = warpgroup_mma_wait(0, deps=(sums,))
        gl.thread_barrier()
        if FAULT == "hands back twice":
            mbarrier.arrive(empty.index(i & 1), count=2)
        if FAULT == "reads before the copy":
            mbarrier.wait(full.index(i & 1), (i >> 1) & 1)
        if (FAULT != "never hands back") & (FAULT != "hands back twice") & (FAULT != "hands back before the product"):
            mbarrier.arrive(empty.index(i & 1), count=1)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * 64 + column[None, :], sums)


@gluon.jit
def ring_sum(box, x, rows, left, out, tiles, GATHERED: gl.constexpr, FAULT: gl.constexpr):
    """left [64, 16] times each 16 rows of x [rows, 64], added up: through a ring of two stages."""
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 16, 64], TILED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if GATHERED:
        gl.warp_specialize(
            [
                (_add_up, (left, out, tiles, ring, full, empty, FAULT)),
                (_gather, (x, rows, tiles, ring, full, empty, FAULT)),
            ],
            [4],
            [64],
        )
    else:
        gl.warp_specialize(
            [(_add_up, (left, out, tiles, ring, full, empty, FAULT)), (_fetch, (box, tiles, ring, full, empty))],
            [1],
            [64],
        )
