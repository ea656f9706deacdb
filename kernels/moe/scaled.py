"""The experts' products in Triton with weights of 8 or 4 bits: `kernel`'s tiles of sorted pairs, turned over.

Weights stay as they are stored until they are in registers, and become the left operand there: Hopper's tensor cores
take that one from registers, the right one, which are the pairs' inputs, from shared memory. So a tile of results is
[output features, pairs].

FP8 weights become bf16, which is exact, and the fp32 sums of at most a block's features are multiplied by its scale
before they are added: nothing is rounded but what the checkpoint has rounded. INT4 weights are multiplied by their
group's scale and rounded to the dtype of the inputs, as consumers of such checkpoints do in bf16. MXFP4 and MXFP8
weights are, too; a power of 2 rounds nothing in bf16.

A step's features begin at a multiple of their number, so that they lie in one block, or in whole groups or a part of
one. A group of features to be summed apart may begin and end within a step: inputs outside it are 0 there.

Memory rules as in `kernel`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe.activation import gated
from kernels.moe.kernel import _put, _targets, _tile
from kernels.narrow_floats import power, wide


@triton.jit
def factor(scale):
    """A scale as a number: exponents in bytes (E8M0) become powers of 2 in fp32."""
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def centred(nibble):
    """Numbers from 0 to 15 less 8, in bf16: behind the exponent of 128 they are its lowest bits."""
    return (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0


@triton.jit
def e2m1(nibble):
    """Numbers of E2M1 in bf16, exactly: exponent and mantissa move to where bf16 has them, which leaves a number 2^126
    times too small, zero and subnormal numbers included."""
    bits = ((nibble & 7).to(tl.int16) << 6) | ((nibble & 8).to(tl.int16) << 12)
    return bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37


@triton.jit
def _bytes(data, box, row, k, K: tl.constexpr, STORED: tl.constexpr, TILE: tl.constexpr):
    """The bytes of weights [block, block_k] from (row, k) on: through the copy engine, or plain loads."""
    PACKED: tl.constexpr = 1 if STORED.format == "fp8" or STORED.format == "mxfp8" else 2
    BLOCK: tl.constexpr = TILE.block
    WIDTH: tl.constexpr = TILE.block_k // PACKED
    if TILE.tma:
        return box.load([row.to(tl.int32), k // PACKED])
    at = k // PACKED + tl.arange(0, WIDTH)
    tile = data + (row + tl.arange(0, BLOCK))[:, None] * (K // PACKED) + at[None, :]
    if K % TILE.block_k == 0:
        return tl.load(tile)
    return tl.load(tile, mask=(at < K // PACKED)[None, :], other=0)


@triton.jit
def _scales(scales, expert, row, k, STORED: tl.constexpr, TILE: tl.constexpr):
    """Scales of the rows from `row` of an expert on, for a step's features: fp32 [block], or bf16 [block, groups]."""
    BLOCK: tl.constexpr = TILE.block
    GROUPS: tl.constexpr = (TILE.block_k + STORED.features - 1) // STORED.features
    rows = (row + tl.arange(0, BLOCK)) // STORED.rows
    line = scales + expert * (STORED.scale_rows * STORED.scales) + rows * STORED.scales
    at = k // STORED.features + tl.arange(0, GROUPS)
    if STORED.format == "fp8":
        scale = factor(tl.load(line + k // STORED.features))
    elif STORED.scales % GROUPS == 0:
        scale = tl.load(line[:, None] + at[None, :])
    else:
        scale = tl.load(line[:, None] + at[None, :], mask=(at < STORED.scales)[None, :], other=0)
    if STORED.format == "mxfp4" or STORED.format == "mxfp8":
        scale = power(scale)
    return scale


@triton.jit
def _added(sum, byte, scale, x, STORED: tl.constexpr, TILE: tl.constexpr):
    """`sum` + weights · x, for bytes and scales of weights and inputs [block_k, pairs]."""
    BLOCK: tl.constexpr = TILE.block
    BLOCK_K: tl.constexpr = TILE.block_k
    GROUPS: tl.constexpr = (BLOCK_K + STORED.features - 1) // STORED.features
    if STORED.format == "fp8":
        sum += tl.dot(wide(byte).to(x.dtype), x, input_precision=TILE.precision) * scale[:, None]
    else:
        if STORED.format == "mxfp8":
            numbers = wide(byte)
        elif STORED.format == "int4":
            numbers = tl.join(centred(byte & 15), centred(byte >> 4))
        else:
            numbers = tl.join(e2m1(byte & 15), e2m1(byte >> 4))
        number = tl.reshape(numbers, [BLOCK, GROUPS, BLOCK_K // GROUPS])
        if x.dtype == tl.bfloat16:
            weight = number * scale[:, :, None]
        else:
            weight = (number.to(tl.float32) * scale.to(tl.float32)[:, :, None]).to(x.dtype)
        sum = tl.dot(tl.reshape(weight, [BLOCK, BLOCK_K]), x, sum, input_precision=TILE.precision)
    return sum


@triton.jit
def gate_up(
    x,
    data,
    box,
    scales,
    sorted_pair,
    table,
    act,
    X_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    STORED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """act[i] = silu(gate[expert] · x) * (up[expert] · x) for every sorted pair i, rounded once; FEATURES of each.
    LIMIT: see `activation`."""
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    BLOCK_K: tl.constexpr = TILE.block_k
    STAGES: tl.constexpr = TILE.stages
    if DEPENDENT:
        gdc_wait()
    expert, first, pairs, block = _tile(table, tl.program_id(0), (FEATURES + BLOCK - 1) // BLOCK, TILE.group)
    if pairs > 0:
        m = tl.arange(0, ROWS)
        rows = (m < pairs)[:, None]
        pair = tl.load(sorted_pair + first + m, mask=m < pairs, other=0, cache_modifier=".cg")
        # The last block is moved back into the matrix: it computes some features that its neighbour computes as well.
        feature = tl.minimum(block * BLOCK, FEATURES - BLOCK)
        matrix = expert.to(tl.int64)
        row = matrix * (2 * FEATURES) + feature
        k = tl.arange(0, BLOCK_K)
        source = x + (pair // COLUMNS).to(tl.int64)[:, None] * X_STRIDE + k[None, :]
        gate = tl.zeros([BLOCK, ROWS], tl.float32)
        up = tl.zeros([BLOCK, ROWS], tl.float32)
        g_scale = _scales(scales, matrix, feature, 0, STORED, TILE)
        u_scale = _scales(scales, matrix, feature + FEATURES, 0, STORED, TILE)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            # Weights first: inputs wait for the tile's pairs. Scales, which nobody copies ahead, a step before.
            g = _bytes(data, box, row, k0, K, STORED, TILE)
            u = _bytes(data, box, row + FEATURES, k0, K, STORED, TILE)
            after = tl.minimum(k0 + BLOCK_K, (K - 1) // BLOCK_K * BLOCK_K)
            g_after = _scales(scales, matrix, feature, after, STORED, TILE)
            u_after = _scales(scales, matrix, feature + FEATURES, after, STORED, TILE)
            if K % BLOCK_K == 0:
                a = tl.load(source + k0, mask=rows, other=0.0, cache_modifier=".cg")
            else:
                inside = rows & (k0 + k < K)[None, :]
                a = tl.load(source + k0, mask=inside, other=0.0, cache_modifier=".cg")
            gate = _added(gate, g, g_scale, tl.trans(a), STORED, TILE)
            up = _added(up, u, u_scale, tl.trans(a), STORED, TILE)
            g_scale = g_after
            u_scale = u_after
        if DEPENDENT:
            gdc_launch_dependents()
        value = tl.trans(gated(gate, up, LIMIT).to(act.dtype.element_ty))
        target = act + (first + m).to(tl.int64)[:, None] * FEATURES + (feature + tl.arange(0, BLOCK))[None, :]
        tl.store(target, value, mask=rows, eviction_policy="evict_last" if DEPENDENT else "")


@triton.jit
def down(
    act,
    data,
    box,
    scales,
    sorted_pair,
    table,
    partial,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    WALK: tl.constexpr,
    STORED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """partial[pair, g] = down[expert] · act[i] over the g-th of GROUPS equal groups of features, for every sorted pair
    i. A program goes through WALK groups, of whole steps if that is more than one. Grid: GROUPS / WALK times tiles, as
    in `kernel.down`.

    The tile is looked up before the wait, as in `kernel.down`."""
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    BLOCK_K: tl.constexpr = TILE.block_k
    STAGES: tl.constexpr = TILE.stages
    COUNT: tl.constexpr = K // GROUPS
    SHARES: tl.constexpr = GROUPS // WALK
    expert, first, pairs, block = _tile(table, tl.program_id(0) // SHARES, (FEATURES + BLOCK - 1) // BLOCK, TILE.group)
    if DEPENDENT:
        gdc_wait()
    if pairs > 0:
        group = 0
        if SHARES > 1:
            group = tl.program_id(0) % SHARES * WALK
        begin = group * COUNT
        m = tl.arange(0, ROWS)
        rows = (m < pairs)[:, None]
        feature = tl.minimum(block * BLOCK, FEATURES - BLOCK)
        matrix = expert.to(tl.int64)
        row = matrix * FEATURES + feature
        k = tl.arange(0, BLOCK_K)
        source = act + (first + m).to(tl.int64)[:, None] * K + k[None, :]
        columns = feature + tl.arange(0, BLOCK)
        if WALK > 1:
            targets = _targets(partial, sorted_pair, first, m, pairs, columns, FEATURES, GROUPS)
        sum = tl.zeros([BLOCK, ROWS], tl.float32)
        end = begin + WALK * COUNT
        scale = _scales(scales, matrix, feature, begin // BLOCK_K * BLOCK_K, STORED, TILE)
        for k0 in tl.range(begin // BLOCK_K * BLOCK_K, end, BLOCK_K, num_stages=STAGES):
            if COUNT % BLOCK_K == 0:
                a = tl.load(source + k0, mask=rows, other=0.0, cache_modifier=".cg")
            else:
                inside = rows & ((k0 + k >= begin) & (k0 + k < end))[None, :]
                a = tl.load(source + k0, mask=inside, other=0.0, cache_modifier=".cg")
            w = _bytes(data, box, row, k0, K, STORED, TILE)
            after = tl.minimum(k0 + BLOCK_K, (end - 1) // BLOCK_K * BLOCK_K)
            scale_after = _scales(scales, matrix, feature, after, STORED, TILE)
            sum = _added(sum, w, scale, tl.trans(a), STORED, TILE)
            scale = scale_after
            if WALK > 1:  # noqa: SIM102 - the first is known to the compiler
                if (k0 + BLOCK_K) % COUNT == 0:
                    _put(targets + k0 // COUNT * FEATURES, tl.trans(sum), rows, DEPENDENT)
                    sum = tl.zeros([BLOCK, ROWS], tl.float32)
        if DEPENDENT:
            gdc_launch_dependents()
        if WALK == 1:
            targets = _targets(partial, sorted_pair, first, m, pairs, columns, FEATURES, GROUPS)
            _put(targets + group * FEATURES, tl.trans(sum), rows, DEPENDENT)
