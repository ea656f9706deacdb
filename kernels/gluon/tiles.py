"""Tiles of weights and of a few tokens: how programs of 16 weight rows load them, multiply them and add up the sums.

A program cuts the features of its rows among its warps, so every warp multiplies (mma.sync, 16 weight rows x 8 tokens)
what it alone loaded. Only the sums meet, at the end, in a fixed order.

For compute capability 8.0 and above.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.gluon.stored import widened

ROWS = 16
"""Weight rows of a program."""
_ROWS = gl.constexpr(ROWS)

STORE = 0
"""out = y."""
RESIDUAL = 1
"""residual += y; out = residual * norm; the sum of squares of each program's columns of the residual."""
NORMED = 2
"""Variant of STORE: the first `NORM_FEATURES` columns are multiplied by a norm's weight, with their sums of squares."""


@gluon.constexpr_function
def products_layout(warps):
    """Layout of the products [warps, 16, tokens] before the warps' shares are summed."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def weight_rows_layout(warps, piece):
    """Layout of the weight rows [16] a program loads, in pieces of so many features."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.DotOperandLayout(0, products_layout(warps), piece)))


@gluon.constexpr_function
def scales_layout(warps):
    """Layout in which a program loads the scales [chunks * warps, 16] of its weights."""
    return gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def scale_rows_layout(warps):
    """Layout of the weight rows [16] of which a program loads the scales."""
    return gl.SliceLayout(0, scales_layout(warps))


@gluon.constexpr_function
def filled_up(count):
    """The next power of two."""
    return 1 << (count - 1).bit_length()


@gluon.constexpr_function
def token_pieces(width, warps, piece=8):
    """Layout in which a tile of the tokens, [warps, tokens, width], is copied: 16 bytes, a piece, per thread."""
    return gl.BlockedLayout([1, 1, piece], [1, 32 // (width // piece), width // piece], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def tokens_layout(width, warps, piece=8):
    """Layout of the tokens [tokens] whose tiles are copied."""
    return gl.SliceLayout(0, gl.SliceLayout(2, token_pieces(width, warps, piece)))


@gluon.constexpr_function
def sums_layout(rows, warps):
    """Layout of the sums [rows, tokens]: neighbouring threads hold the rows of a token."""
    return gl.SliceLayout(0, gl.BlockedLayout([warps, 1, 1], [1, rows, 32 // rows], [1, 1, warps], [1, 2, 0]))


@gluon.jit
def weight_tile(
    weight, at, chunk, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr,
    exists=True,
):  # fmt: skip
    """Rows at the offsets `at` ([16]) of chunk `chunk` of the features: [WARPS, 16, WIDTH], the left operand.

    `turn` deals the parts of a chunk to the warps in another order, for chunks that do not fill all warps. Zeros where
    it does not exist.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), STORED.piece)
    warp = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left))) + turn) % WARPS
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    feature = chunk * (WARPS * WIDTH) + warp[:, None, None] * WIDTH + k[None, None, :]
    where = weight + at[None, :, None] + feature
    if (chunk + 1) * WARPS * WIDTH <= FEATURES:
        return gl.load(where, mask=exists, other=0, eviction_policy="evict_first")
    return gl.load(where, mask=(feature < FEATURES) & exists, other=0, eviction_policy="evict_first")


@gluon.jit
def weight_tiles(
    weight, at, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """The first `CHUNKS` weight tiles."""
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        tiles = tiles + (weight_tile(weight, at, chunk, turn, FEATURES, WIDTH, WARPS, STORED),)
    return tiles


@gluon.jit
def weight_scales(
    scale, at, CHUNKS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr, exists=True
):
    """The scales of the rows whose first ones are at the offsets `at` ([16]), for every chunk of the features and every
    warp: [chunks * WARPS, 16], the chunks filled up to a power of two."""
    share = gl.arange(0, filled_up(CHUNKS) * WARPS, gl.SliceLayout(1, scales_layout(WARPS)))
    column = gl.minimum(share * WIDTH // STORED.features, STORED.scales - 1)
    return gl.load(scale + at[None, :] + column[:, None], mask=exists, other=0.0)


@gluon.jit
def scales_memory(weight, CHUNKS: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr):
    """Shared memory for `weight_scales`; nobody's where there are none."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shares: gl.constexpr = filled_up(CHUNKS) * WARPS if STORED.fp8 else 1
    return gl.allocate_shared_memory(gl.float32, [shares, _ROWS], plain)


@gluon.jit
def copy_token_tile(
    tile_s, x, at, live, chunk, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
    PIECE: gl.constexpr = 8,
):  # fmt: skip
    """Start copying the same features of the tokens at the offsets `at`, zero where not `live`."""
    pieces: gl.constexpr = token_pieces(WIDTH, WARPS, PIECE)
    warp = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, pieces))) + turn) % WARPS
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, pieces)))
    feature = chunk * (WARPS * WIDTH) + warp[:, None, None] * WIDTH + k[None, None, :]
    inside = live[None, :, None]
    if (chunk + 1) * WARPS * WIDTH > FEATURES:
        inside = inside & (feature < FEATURES)
    # Copies of 16 bytes go past L1, where a dependent launch may find lines older than the kernel before.
    async_copy.async_copy_global_to_shared(tile_s, x + at[None, :, None] + feature, mask=inside, cache_modifier=".cg")


@gluon.jit
def shared_tiles(x, WIDTH: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of the tokens."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    x_s = ()
    for _ in gl.static_range(COUNT):
        x_s = x_s + (gl.allocate_shared_memory(x.dtype.element_ty, [WARPS, TOKENS, WIDTH], swizzled),)
    return x_s


@gluon.jit
def token_tile(tile_s, WARPS: gl.constexpr, STORED: gl.constexpr):
    """A tile of the tokens as the right operand, its features in the order of the weights'."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), STORED.piece)
    return tile_s.permute((0, 2, 1)).load(right)


@gluon.jit
def times(tile, tokens, scales_s, chunk, total, WARPS: gl.constexpr, STORED: gl.constexpr):
    """total += weights x tokens of one chunk."""
    if STORED.fp8:
        scale = scales_s.slice(chunk * WARPS, WARPS).load(gl.SliceLayout(2, products_layout(WARPS)))
        part = mma_v2(widened(tile), tokens, gl.zeros_like(total))
        total += part * scale[:, :, None]
    else:
        total = mma_v2(tile, tokens, total)
    return total


@gluon.jit
def products(
    weight, at, x, x_at, live, tiles, scales_s,
    FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """Products of 16 weight rows with TOKENS tokens, each warp's share of them in shared memory: [WARPS, 16, TOKENS].

    `tiles`: the first DEPTH weight tiles; `scales_s`: of all, written without a barrier behind. Copies started before
    are waited for as well.
    """
    CHUNKS: gl.constexpr = (FEATURES + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    x_s = shared_tiles(x, WIDTH, WARPS, TOKENS, DEPTH)
    for chunk in gl.static_range(DEPTH):
        copy_token_tile(x_s[chunk], x, x_at, live, chunk, 0, FEATURES, WIDTH, WARPS)
        async_copy.commit_group()
    total = gl.zeros([WARPS, _ROWS, TOKENS], gl.float32, products_layout(WARPS))
    if CHUNKS <= DEPTH:
        async_copy.wait_group(0)
        gl.thread_barrier()
    for chunk in gl.static_range(CHUNKS):
        if CHUNKS > DEPTH:
            async_copy.wait_group(DEPTH - 1)
            gl.thread_barrier()
        tokens = token_tile(x_s[chunk % DEPTH], WARPS, STORED)
        total = times(tiles[chunk], tokens, scales_s, chunk, total, WARPS, STORED)
        if CHUNKS > DEPTH:
            if chunk + DEPTH < CHUNKS:
                tiles = tiles + (weight_tile(weight, at, chunk + DEPTH, 0, FEATURES, WIDTH, WARPS, STORED),)
                gl.thread_barrier()
                copy_token_tile(x_s[chunk % DEPTH], x, x_at, live, chunk + DEPTH, 0, FEATURES, WIDTH, WARPS)
            async_copy.commit_group()
    return share(total, WARPS, TOKENS)


@gluon.jit
def share(total, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Every warp's products in shared memory, a token's rows side by side: so the lanes that sum them read them."""
    by_token: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])
    parts_s = gl.allocate_shared_memory(gl.float32, [WARPS, _ROWS, TOKENS], by_token)
    parts_s.store(total)
    gl.thread_barrier()
    return parts_s


@gluon.jit
def copy_squares(square, tokens, PIECES: gl.constexpr, BLOCK: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Start copying every token's sums of squares, as part of the next group of copies."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    square_s = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK], plain)
    t = gl.arange(0, TOKENS, gl.SliceLayout(1, rows))
    p = gl.arange(0, BLOCK, gl.SliceLayout(0, rows))
    inside = (t < tokens)[:, None] & (p < PIECES)[None, :]
    where = square + t[:, None] * PIECES + p[None, :]
    if PIECES % 4 == 0:
        async_copy.async_copy_global_to_shared(square_s, where, mask=inside)
    else:  # copies of fewer than 16 bytes would go through L1
        square_s.store(gl.load(where, mask=inside, other=0.0, cache_modifier=".cg"))
    return square_s


@gluon.jit
def inverse_rms(square_s, eps, FEATURES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """1 / sqrt(mean square + eps) of each token, beside sums of ROWS rows, once the copies have arrived."""
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    scale = gl.rsqrt(gl.sum(square_s.load(rows), 1) / FEATURES + eps)
    return gl.convert_layout(scale, gl.SliceLayout(0, sums_layout(ROWS, WARPS)))


@gluon.jit
def scaled_by_token(y, scale, f, t, tokens, FEATURES: gl.constexpr):
    """The first FEATURES rows `f` of sums [rows, tokens] times a factor of each token, fp32, that a kernel before may
    have written."""
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    factor = gl.load(scale + t, mask=t < tokens, other=1.0, cache_modifier=".cg")
    return gl.where((f < FEATURES)[:, None], y * factor[None, :], y)


@gluon.jit
def residual_before(residual, f, t, inside, RESIDUAL_STRIDE: gl.constexpr):
    """16 columns of the residual: asked for before the products, they are there when the sums are."""
    place = residual + t.to(gl.int64)[None, :] * RESIDUAL_STRIDE + f[:, None]
    return gl.load(place, mask=inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def add_to_residual(
    y, before, f, t, inside, tokens, program, residual, norm, out, out_square,
    RESIDUAL_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """residual = before + y for 16 columns; out = residual * norm, and the sums of the columns' squares, for the next
    norm."""
    y += before
    at = residual + t.to(gl.int64)[None, :] * RESIDUAL_STRIDE + f[:, None]
    gl.store(at, y, mask=inside, eviction_policy="evict_last")
    gl.store(out_square + t * PIECES + program, gl.sum(gl.where(inside, y * y, 0.0), 0), mask=t < tokens)
    y = y * norm[:, None]
    to = out + t.to(gl.int64)[None, :] * OUT_STRIDE + f[:, None]
    gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")


@gluon.jit
def store_squares(y, f, t, inside, tokens, program, out_square, NORM_FEATURES: gl.constexpr, PIECES: gl.constexpr):
    """The sums of squares of those of 16 columns that the next norm is of."""
    counted = inside & (f < NORM_FEATURES)[:, None]
    gl.store(out_square + t * PIECES + program, gl.sum(gl.where(counted, y * y, 0.0), 0), mask=t < tokens)


@gluon.jit
def gate_up_rows(block, I: gl.constexpr, LAYOUT: gl.constexpr):
    """8 gate rows of a matrix, and their 8 up rows."""
    i = gl.arange(0, _ROWS, LAYOUT)
    return gl.minimum(block * (_ROWS // 2) + i % (_ROWS // 2), I - 1) + (i // (_ROWS // 2)) * I


@gluon.jit
def gate_up_values(parts_s, WARPS: gl.constexpr):
    """gate and up, [8, TOKENS] each, from the products of `gate_up_rows`."""
    half: gl.constexpr = _ROWS // 2
    sums: gl.constexpr = sums_layout(half, WARPS)
    gate = gl.sum(parts_s.slice(0, half, dim=1).load(sums.parent), 0)
    up = gl.sum(parts_s.slice(half, half, dim=1).load(sums.parent), 0)
    return gate, up
