"""Pieces of split attention, W_UV and their weighted sum in one launch, for a few tokens.

W_UV is linear, so a program multiplies every piece of a token's attention as it lies in memory (the pieces are the
columns of the product) and weighs the products: nothing is rounded in between. Built on `kernels.linear.stream`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    ROWS,
    copy_token_tile,
    products_layout,
    share,
    shared_tiles,
    sums_layout,
    times,
    token_tile,
    tokens_layout,
    weight_rows_layout,
    weight_tiles,
)
from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS

_ROWS = gl.constexpr(ROWS)
_CTA = gl.constexpr(CTA_FIELDS)
_ROW = gl.constexpr(ROW_FIELDS)


@gluon.jit(do_not_specialize=["ctas"])
def merge_up(
    partial, partial_lse, attended, plan, weight, out, ctas,
    STORED: gl.constexpr, SIZES: gl.constexpr, WEIGHT: gl.constexpr, OUT_TOKEN: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[token, head] = W_UV[head] · attention of (token, head), 16 rows per program. Grid: heads * value / 16,
    tokens.

    The attention is `attended` where the plan split nothing, 0 where there is none, else pieces as `mla_decode.merge`
    reads them. The plan is read before the wait. Lets its successor start only after its own wait.
    """
    HEADS: gl.constexpr = SIZES.heads
    LATENT: gl.constexpr = SIZES.latent
    VALUE: gl.constexpr = SIZES.value_features
    CHUNKS: gl.constexpr = (LATENT + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    BLOCKS: gl.constexpr = (VALUE + _ROWS - 1) // _ROWS
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    program = gl.program_id(0)
    head = program // BLOCKS
    token = gl.program_id(1)
    row = program % BLOCKS * _ROWS + gl.arange(0, _ROWS, weight_rows_layout(WARPS, 8))
    at = head.to(gl.int64) * WEIGHT.head + gl.minimum(row, VALUE - 1).to(gl.int64) * WEIGHT.row
    tiles = weight_tiles(weight, at, 0, LATENT, WIDTH, WARPS, CHUNKS, STORED)
    about = plan + ctas * _CTA + token // SIZES.width * _ROW
    slot = gl.load(about)
    later = gl.load(about + 1)
    pieces = gl.load(about + 2)
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()

    vector = token % SIZES.width * HEADS + head
    queries: gl.constexpr = SIZES.width * HEADS
    c = gl.arange(0, COLUMNS, columns)
    c_copy = gl.arange(0, COLUMNS, tokens_layout(WIDTH, WARPS))
    total = gl.zeros([COLUMNS], gl.float32, columns)
    y = gl.zeros([_ROWS, COLUMNS], gl.float32, sums)
    # Most rows have at most COLUMNS pieces; a running maximum serves those that have more.
    top = gl.full([COLUMNS], -1.0e30, gl.float32, columns)
    x_s = shared_tiles(partial, WIDTH, WARPS, COLUMNS, CHUNKS)
    for start in range(0, pieces, COLUMNS):
        piece = start + c_copy
        if pieces == 1:
            base = attended
            x_at = ((token // SIZES.width).to(gl.int64) * queries + vector + 0 * piece) * LATENT
        else:
            base = partial
            x_at = (gl.where(piece == 0, slot, later + piece - 1).to(gl.int64) * queries + vector) * LATENT
        for chunk in gl.static_range(CHUNKS):
            copy_token_tile(x_s[chunk], base, x_at, piece < pieces, chunk, 0, LATENT, WIDTH, WARPS)
        async_copy.commit_group()
        own = start + c
        split = (own < pieces) & (pieces > 1)
        lse_at = gl.where(own == 0, slot, later + own - 1).to(gl.int64) * queries + vector
        log = gl.load(partial_lse + lse_at, mask=split, other=float("-inf"), cache_modifier=".cg")
        log = gl.where((own == 0) & (pieces == 1), 0.0, log)
        new_top = gl.maximum(top, gl.max(log, 0))
        shrink = gl.exp2(top - new_top)
        factor = gl.exp2(log - new_top)
        top = new_top
        async_copy.wait_group(0)
        gl.thread_barrier()
        acc = gl.zeros([WARPS, _ROWS, COLUMNS], gl.float32, products_layout(WARPS))
        for chunk in gl.static_range(CHUNKS):
            acc = times(tiles[chunk], token_tile(x_s[chunk], WARPS, STORED), x_s, 0, acc, WARPS, STORED)
        part = gl.sum(share(acc, WARPS, COLUMNS).load(sums.parent), 0)
        gl.thread_barrier()
        y = y * shrink[None, :] + part * factor[None, :]
        total = total * shrink + factor
    weight_sum = gl.sum(total, 0)
    result = gl.sum(y, 1) / gl.where(weight_sum > 0, weight_sum, 1.0)
    f = program % BLOCKS * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    to = out + token.to(gl.int64) * OUT_TOKEN + head * VALUE + f
    gl.store(to, result.to(out.dtype.element_ty), mask=f < VALUE, eviction_policy="evict_last")
