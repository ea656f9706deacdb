"""The experts' products in Triton, tile by tile of sorted (token, expert) pairs, and the sum over a token's experts.

Every program works on one tile (pairs of one expert) and a block of output features, so that an expert's weights are
streamed once for all the tokens of a tile. A pair's result is the sum over the input features in their order,
accumulated in fp32: it does not depend on the tile the pair lies in.

Memory rules: rows and experts become int64 before they are multiplied; rows past a tile's pairs are loaded as zero and
never stored; a program past the tiles of this call ends at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe.activation import gated
from kernels.pending_norm import PIECE
from kernels.quantize import GROUP, store_rounded

_PIECE = tl.constexpr(PIECE)
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _tile(table, program, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first pair, pairs, block) of a program. Programs go through the blocks of GROUP tiles at a time, tile
    by tile within a block, so that what runs together shares weights and inputs in L2."""
    tiles = tl.load(table, cache_modifier=".cg")
    if GROUP == 1:
        # Where the record is does not depend on the number of tiles, so that both are on their way at once. Records
        # behind the last tile's hold anything.
        tile = program // BLOCKS
        block = program % BLOCKS
        exists = tile < tiles
        there = True
    else:
        begin = program // (GROUP * BLOCKS) * GROUP
        size = tl.minimum(tiles - begin, GROUP)
        place = program % (GROUP * BLOCKS)
        exists = (size > 0) & (place < size * BLOCKS)
        size = tl.maximum(size, 1)
        tile = begin + place % size
        block = place // size
        there = exists
    record = table + 4 * (tile + 1)
    expert = tl.load(record, mask=there, other=0, cache_modifier=".cg")
    first = tl.load(record + 1, mask=there, other=0, cache_modifier=".cg")
    pairs = tl.load(record + 2, mask=there, other=0, cache_modifier=".cg")
    return expert, first, tl.where(exists, pairs, 0), block


@triton.jit
def _weights(
    pointer,
    box,
    row,
    begin,
    k,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_K, ROWS] of weights in rows of K, feature `k` and on of the COUNT that begin at `begin`: a box at (row,
    begin + k) through the copy engine, or plain loads. A box may reach past the COUNT; what it meets is 0 there."""
    if TMA:
        return tl.trans(box.load([row, begin + k]))
    at = k + tl.arange(0, BLOCK_K)
    tile = pointer + begin + at[:, None] + tl.arange(0, ROWS)[None, :] * K
    if COUNT % BLOCK_K == 0:
        return tl.load(tile)
    return tl.load(tile, mask=(at < COUNT)[:, None], other=0.0)


@triton.jit
def gate_up(
    x,
    weight,
    weight_box,
    sorted_pair,
    table,
    act,
    X_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """act[i] = silu(gate[expert] · x) * (up[expert] · x) for every sorted pair i, rounded once; FEATURES of each.
    LIMIT: see `activation`."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    if DEPENDENT:
        gdc_wait()
    expert, first, pairs, block = _tile(table, tl.program_id(0), blocks, GROUP)
    if pairs > 0:
        m = tl.arange(0, ROWS)
        pair = tl.load(sorted_pair + first + m, mask=m < pairs, other=0, cache_modifier=".cg")
        # The last block is moved back into the matrix: it computes some features that its neighbour computes as well.
        feature = tl.minimum(block * BLOCK, FEATURES - BLOCK)
        row = expert.to(tl.int64) * (2 * FEATURES) + feature
        k = tl.arange(0, BLOCK_K)
        source = x + (pair // COLUMNS).to(tl.int64)[:, None] * X_STRIDE + k[None, :]
        rows = (m < pairs)[:, None]
        gate_row = weight + row * K
        up_row = gate_row + FEATURES * K
        gate = tl.zeros([ROWS, BLOCK], tl.float32)
        up = tl.zeros([ROWS, BLOCK], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            # Weights first: inputs wait for the tile's pairs.
            g = _weights(gate_row, weight_box, row.to(tl.int32), 0, k0, K, K, BLOCK, BLOCK_K, TMA)
            u = _weights(up_row, weight_box, row.to(tl.int32) + FEATURES, 0, k0, K, K, BLOCK, BLOCK_K, TMA)
            if K % BLOCK_K == 0:
                a = tl.load(source + k0, mask=rows, other=0.0, cache_modifier=".cg")
            else:
                inside = rows & (k0 + k < K)[None, :]
                a = tl.load(source + k0, mask=inside, other=0.0, cache_modifier=".cg")
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            up = tl.dot(a, u, up, input_precision=PRECISION)
        if DEPENDENT:
            gdc_launch_dependents()
        value = gated(gate, up, LIMIT)
        target = act + (first + m).to(tl.int64)[:, None] * FEATURES + (feature + tl.arange(0, BLOCK))[None, :]
        tl.store(target, value.to(act.dtype.element_ty), mask=rows, eviction_policy="evict_last" if DEPENDENT else "")


@triton.jit
def _targets(partial, sorted_pair, first, m, pairs, columns, FEATURES: tl.constexpr, GROUPS: tl.constexpr):
    """Where a tile's results of group 0 belong, [m, columns]."""
    pair = tl.load(sorted_pair + first + m, mask=m < pairs, other=0, cache_modifier=".cg")
    return partial + (pair.to(tl.int64) * GROUPS)[:, None] * FEATURES + columns[None, :]


@triton.jit
def _put(targets, sum, rows, DEPENDENT: tl.constexpr):
    """Write results, rounded once."""
    value = sum.to(targets.dtype.element_ty)
    tl.store(targets, value, mask=rows, eviction_policy="evict_last" if DEPENDENT else "")


@triton.jit
def down(
    act,
    weight,
    weight_box,
    sorted_pair,
    table,
    partial,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """partial[pair, g] = down[expert] · act[i] over the g-th of GROUPS equal groups of features, for every sorted pair
    i. Grid: GROUPS (fastest, so that they read whole rows of weights together) times tiles.

    The tile is looked up before the wait: the table was written before `gate_up`, which lets this kernel start only
    after its own wait."""
    COUNT: tl.constexpr = K // GROUPS
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    expert, first, pairs, block = _tile(table, tl.program_id(0) // GROUPS, blocks, GROUP)
    if DEPENDENT:
        gdc_wait()
    if pairs > 0:
        group = 0
        if GROUPS > 1:
            group = tl.program_id(0) % GROUPS
        begin = group * COUNT
        m = tl.arange(0, ROWS)
        feature = tl.minimum(block * BLOCK, FEATURES - BLOCK)
        row = expert.to(tl.int64) * FEATURES + feature
        k = tl.arange(0, BLOCK_K)
        source = act + (first + m).to(tl.int64)[:, None] * K + (begin + k)[None, :]
        rows = (m < pairs)[:, None]
        weight_row = weight + row * K
        sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for k0 in tl.range(0, COUNT, BLOCK_K, num_stages=STAGES):
            if COUNT % BLOCK_K == 0:
                a = tl.load(source + k0, mask=rows, other=0.0, cache_modifier=".cg")
            else:
                inside = rows & (k0 + k < COUNT)[None, :]
                a = tl.load(source + k0, mask=inside, other=0.0, cache_modifier=".cg")
            w = _weights(weight_row, weight_box, row.to(tl.int32), begin, k0, K, COUNT, BLOCK, BLOCK_K, TMA)
            sum = tl.dot(a, w, sum, input_precision=PRECISION)
        if DEPENDENT:
            gdc_launch_dependents()
        columns = feature + tl.arange(0, BLOCK)
        targets = _targets(partial, sorted_pair, first, m, pairs, columns, FEATURES, GROUPS)
        _put(targets + group * FEATURES, sum, rows, DEPENDENT)


@triton.jit
def _exist(ids, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr):
    """Tell which of a token's pairs are work."""
    exist = ()
    for c in tl.static_range(COLUMNS):
        id = tl.load(ids + c, cache_modifier=".cg")
        exist += ((id >= 0) & (id < EXPERTS),)
    return exist


@triton.jit
def _weighted(sum, result, weight, exist, inside, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BATCH: tl.constexpr):
    """`sum` + the results of a token's pairs, STRIDE apart, times their weights: in their order, in fp32.

    BATCH results are on their way at once, with 0 as many as ptxas likes. It would rather save registers: load one or
    two, add them up, load the next. So the weights to multiply by are read behind a barrier that the loads come
    before, and a second one follows them."""
    step: tl.constexpr = max(BATCH, 1)
    for begin in tl.static_range(0, COLUMNS, step):
        values = ()
        for c in tl.static_range(step):
            if begin + c < COLUMNS:
                at = result + (begin + c) * STRIDE
                values += (tl.load(at, mask=inside & exist[begin + c], other=0.0, cache_modifier=".cg"),)
        if BATCH > 0:
            tl.debug_barrier()
        factors = ()
        for c in tl.static_range(step):
            if begin + c < COLUMNS:
                factors += (tl.load(weight + begin + c, mask=exist[begin + c], other=0.0, cache_modifier=".cg"),)
        if BATCH > 0:
            tl.debug_barrier()
        for c in tl.static_range(step):
            if begin + c < COLUMNS:
                sum += factors[c] * values[c].to(tl.float32)
    return sum


@triton.jit
def combine(
    partial,
    ids,
    weight,
    before,
    out,
    BEFORE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[token, g] = the sum of its pairs' partial results times their weights, in their order, in fp32; with ADD
    added, in that order, to before[token, g], which may be the output itself. Grid: tokens, blocks of features, groups.

    Ids are read before the wait, as in `combine_norm`."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
    first = token * COLUMNS
    exist = _exist(ids + first, COLUMNS, EXPERTS)
    if DEPENDENT:
        gdc_wait()
    group = 0
    if GROUPS > 1:
        group = tl.program_id(2)
    at = group * FEATURES + e
    sum = tl.zeros([BLOCK], tl.float32)
    if ADD:
        begun = tl.load(before + token * BEFORE_STRIDE + at, mask=inside, other=0.0, cache_modifier=".cg")
        sum = begun.to(tl.float32)
    result = partial + (first * GROUPS + group) * FEATURES + e
    sum = _weighted(sum, result, weight + first, exist, inside, GROUPS * FEATURES, COLUMNS, BATCH)
    tl.store(out + token * OUT_STRIDE + at, sum.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_column"])
def combine_norm(
    partial,
    ids,
    weight,
    residual,
    norm_weight,
    out,
    number,
    scale,
    by_token,
    eps,
    scale_column,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    ROUND: tl.constexpr,
    TWICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """residual[token] += what `combine` makes of the token, rounded to the dtype of `out`; out = its RMS norm. With
    ROUND that is rounded to FP8 besides, as `kernels.quantize.quantize` does it: the scale of a token's group of 128
    features lies at token + group * `scale_column`, with TWICE also at token * groups + group of `by_token`. Grid:
    tokens.

    Residual and ids are read before the wait: they were written before `down`, which lets this kernel start only after
    its own wait."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
    first = token * COLUMNS
    exist = _exist(ids + first, COLUMNS, EXPERTS)
    at = residual + token * RESIDUAL_STRIDE + e
    before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    w = tl.load(norm_weight + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    sum = tl.zeros([BLOCK], tl.float32)
    sum = _weighted(sum, partial + first * FEATURES + e, weight + first, exist, inside, FEATURES, COLUMNS, BATCH)
    rounded = (sum.to(out.dtype.element_ty).to(tl.float32) + before).to(residual.dtype.element_ty)
    tl.store(at, rounded, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
    value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / FEATURES + eps)
    normed = (value * factor * w).to(out.dtype.element_ty)
    tl.store(out + token * OUT_STRIDE + e, normed, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
    if ROUND:
        GROUPS: tl.constexpr = BLOCK // _GROUP
        group = tl.arange(0, GROUPS)
        in_groups = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        there = group * _GROUP < FEATURES
        size = store_rounded(
            tl.reshape(normed.to(tl.float32), [GROUPS, _GROUP]),
            number + token * FEATURES + in_groups,
            scale + token + group.to(tl.int64) * scale_column,
            in_groups < FEATURES,
            there,
        )
        if TWICE:
            tl.store(by_token + token * (FEATURES // _GROUP) + group, size, mask=there)


@triton.jit
def combine_pending(
    partial,
    ids,
    weight,
    before,
    norm_weight,
    out,
    square,
    BEFORE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    ADD: tl.constexpr,
    PENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """sum[token] = before[token], if ADD, + its pairs' partial results times their weights, in their order, in fp32.
    PENDING, for which there is something before: before = sum, out = sum * norm_weight, and sums of its squares by
    pieces (`kernels.pending_norm`); otherwise out = sum. Grid: tokens, blocks of features.

    What stands before and ids are read before the wait, as in `combine_norm`."""
    PIECES: tl.constexpr = FEATURES // _PIECE
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
    first = token * COLUMNS
    exist = _exist(ids + first, COLUMNS, EXPERTS)
    at = before + token * BEFORE_STRIDE + e
    sum = tl.zeros([BLOCK], tl.float32)
    if ADD:
        sum = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    if PENDING:
        w = tl.load(norm_weight + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    sum = _weighted(sum, partial + first * FEATURES + e, weight + first, exist, inside, FEATURES, COLUMNS, BATCH)
    target = out + token * OUT_STRIDE + e
    if PENDING:
        tl.store(at, sum, mask=inside, eviction_policy="evict_last")
        piece = tl.program_id(1) * (BLOCK // _PIECE) + tl.arange(0, BLOCK // _PIECE)
        squares = tl.sum(tl.reshape(sum * sum, [BLOCK // _PIECE, _PIECE]), 1)
        tl.store(square + token * PIECES + piece, squares, mask=piece < PIECES)
        sum *= w
    tl.store(target, sum.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
