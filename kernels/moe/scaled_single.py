"""The experts of one token with FP8 weights: every (token, expert) pair on its own, in fp32 on plain cores.

As `single`, which is the same of plain weights. A thread sums up the products of 16 bytes of weights, all of which
share a scale, and multiplies the sum by it: weights themselves are never rounded. NATIVE: one instruction makes fp16 of
two numbers, exactly, which Hopper has; otherwise some ten make bf16 of four. For `down` in bf16 Hopper has a kernel of
its own (`scaled_down`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe.activation import gated
from kernels.moe.scaled import factor
from kernels.moe.single import _expert
from kernels.narrow_floats import wide

_BYTES = tl.constexpr(16)


@triton.jit
def _load(data, scales, matrix, row, k, K: tl.constexpr, N: tl.constexpr, STORED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes [rows, pieces, 16] of some of a matrix's N rows, from feature `k` on, and their scales [rows, pieces]; 0
    past the end."""
    piece = k // _BYTES + tl.arange(0, BLOCK_K // _BYTES)
    inside = (piece < K // _BYTES)[None, :]
    at = (matrix * N + row)[:, None] * (K // _BYTES * _BYTES) + piece[None, :] * _BYTES
    byte = tl.load(
        data + at[:, :, None] + tl.arange(0, _BYTES)[None, None, :],
        mask=inside[:, :, None],
        other=0,
        eviction_policy="evict_first",
    )
    line = (matrix * STORED.scale_rows + row // STORED.rows) * STORED.scales
    scale = tl.load(scales + line[:, None] + (piece * _BYTES // STORED.features)[None, :], mask=inside, other=0)
    return byte, factor(scale).to(tl.float32)


@triton.jit
def _added(sum, byte, scale, source, k, K: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr):
    """`sum` [rows, pieces] + the products of weights with the inputs at `source` from feature `k` on."""
    PIECES: tl.constexpr = BLOCK_K // _BYTES
    feature = k + tl.arange(0, PIECES)[:, None] * _BYTES + tl.arange(0, _BYTES)[None, :]
    a = tl.load(source + feature, mask=feature < K, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NATIVE:  # noqa: SIM108 (compile-time: only one of them exists)
        number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        number = wide(byte)
    product = number.to(tl.float32) * a[None, :, :]
    return sum + tl.sum(product, 2) * scale


@triton.jit
def gate_up(
    x,
    data,
    scales,
    ids,
    act,
    X_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """act[pair] = silu(gate[expert] · x) * (up[expert] · x), rounded once. LIMIT: see `activation`."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    PIECES: tl.constexpr = BLOCK_K // _BYTES
    pair = tl.program_id(0) // blocks
    # The last block is moved back into the matrix: it computes some features that its neighbour computes as well.
    feature = tl.minimum(tl.program_id(0) % blocks * BLOCK, FEATURES - BLOCK) + tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: `down` may read the ids before its own
    expert = tl.load(ids + pair, cache_modifier=".cg")
    if (expert >= 0) & (expert < EXPERTS):
        source = x + (pair // COLUMNS).to(tl.int64) * X_STRIDE
        gate = tl.zeros([BLOCK, PIECES], tl.float32)
        up = tl.zeros([BLOCK, PIECES], tl.float32)
        for k0 in tl.static_range(0, K, BLOCK_K):
            g, g_scale = _load(data, scales, expert, feature, k0, K, 2 * FEATURES, STORED, BLOCK_K)
            u, u_scale = _load(data, scales, expert, feature + FEATURES, k0, K, 2 * FEATURES, STORED, BLOCK_K)
            gate = _added(gate, g, g_scale, source, k0, K, BLOCK_K, NATIVE)
            up = _added(up, u, u_scale, source, k0, K, BLOCK_K, NATIVE)
        value = gated(tl.sum(gate, 1), tl.sum(up, 1), LIMIT)
        tl.store(act + pair.to(tl.int64) * FEATURES + feature, value.to(act.dtype.element_ty))


@triton.jit
def down(
    act,
    data,
    scales,
    ids,
    factor,
    before,
    out,
    BEFORE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    ADD: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[token] = the sum over its pairs, in order, of factor[pair] * down[expert] · act[pair], with ADD and
    before[token], rounded once.

    Ids are read before the wait: `gate_up` lets this kernel start only when they are there."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    PIECES: tl.constexpr = BLOCK_K // _BYTES
    token = (tl.program_id(0) // blocks).to(tl.int64)
    first = token * COLUMNS
    feature = tl.minimum(tl.program_id(0) % blocks * BLOCK, FEATURES - BLOCK) + tl.arange(0, BLOCK)
    after = _expert(ids, first, first >= 0, EXPERTS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    sum = tl.zeros([BLOCK], tl.float32)
    for column in range(COLUMNS):
        expert, pair = after, first + column
        after = _expert(ids, pair + 1, column + 1 < COLUMNS, EXPERTS)
        if expert >= 0:
            one = tl.zeros([BLOCK, PIECES], tl.float32)
            for k0 in tl.static_range(0, K, BLOCK_K):
                w, scale = _load(data, scales, expert, feature, k0, K, FEATURES, STORED, BLOCK_K)
                one = _added(one, w, scale, act + pair * K, k0, K, BLOCK_K, False)
            sum += tl.sum(one, 1) * tl.load(factor + pair, cache_modifier=".cg")
    if ADD:
        sum += tl.load(before + token * BEFORE_STRIDE + feature, cache_modifier=".cg").to(tl.float32)
    tl.store(out + token * OUT_STRIDE + feature, sum.to(out.dtype.element_ty))
