"""Products of a few tokens with a weight matrix, bound by the time in which the weights stream through the chip.

A program owns 16 rows of the weights and cuts their features among its warps, so every warp multiplies (mma.sync, 16
weight rows x 8 tokens) what it alone loaded: weights go from memory to the registers of the tensor core's left operand
in 16-byte pieces, with no shared memory on the way. All of a program's first tiles are under way before it waits for
the kernel before (programmatic dependent launch): weights never change. Only the sums meet, at the end, in a fixed
order: a token's result depends on neither the number of tokens nor its place among them.

Gluon, for compute capability 8.0 and above (dependent launch: 9.0 and above).
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

ROWS = 16
"""Weight rows of a program."""
_ROWS = gl.constexpr(ROWS)

STORE = 0
"""out = y."""
RESIDUAL = 1
"""residual += y; out = residual * norm; the sum of squares of each program's columns of the residual."""
NORMED = 2
"""As STORE; the first `NORM_FEATURES` columns are multiplied by a norm's weight, with their sums of squares."""

_RESIDUAL = gl.constexpr(RESIDUAL)
_NORMED = gl.constexpr(NORMED)


@gluon.jit
def wait_for_kernel_before():
    """With programmatic dependent launch: wait until the kernel before has finished and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_kernel_after_start():
    """With programmatic dependent launch: let the kernel after start; it still waits for this one where it must."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def products_layout(warps):
    """Layout of the products [warps, 16, tokens] before the warps' shares are summed."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def weight_rows_layout(warps):
    """Layout of the weight rows [16] a program loads."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.DotOperandLayout(0, products_layout(warps), 8)))


@gluon.constexpr_function
def token_pieces(width, warps):
    """Layout in which a tile of the tokens, [warps, tokens, width], is copied: 16 bytes per thread."""
    return gl.BlockedLayout([1, 1, 8], [1, 32 // (width // 8), width // 8], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def tokens_layout(width, warps):
    """Layout of the tokens [tokens] whose tiles are copied."""
    return gl.SliceLayout(0, gl.SliceLayout(2, token_pieces(width, warps)))


@gluon.constexpr_function
def sums_layout(rows, warps):
    """Layout of the sums [rows, tokens]: neighbouring threads hold the rows of a token."""
    return gl.SliceLayout(0, gl.BlockedLayout([warps, 1, 1], [1, rows, 32 // rows], [1, 1, warps], [1, 2, 0]))


@gluon.jit
def weight_tile(weight, at, chunk, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, exists=True):
    """Rows at the offsets `at` ([16]) of chunk `chunk` of the features: [WARPS, 16, WIDTH], the left operand.

    `turn` deals the parts of a chunk to the warps in another order, for chunks that do not fill all warps. Zeros where
    it does not exist.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 8)
    warp = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left))) + turn) % WARPS
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    feature = chunk * (WARPS * WIDTH) + warp[:, None, None] * WIDTH + k[None, None, :]
    where = weight + at[None, :, None] + feature
    if (chunk + 1) * WARPS * WIDTH <= FEATURES:
        return gl.load(where, mask=exists, other=0.0, eviction_policy="evict_first")
    return gl.load(where, mask=(feature < FEATURES) & exists, other=0.0, eviction_policy="evict_first")


@gluon.jit
def weight_tiles(
    weight, at, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr
):
    """The first `CHUNKS` weight tiles."""
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        tiles = tiles + (weight_tile(weight, at, chunk, turn, FEATURES, WIDTH, WARPS),)
    return tiles


@gluon.jit
def copy_token_tile(tile_s, x, at, live, chunk, turn, FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Start copying the same features of the tokens at the offsets `at`, zero where not `live`."""
    pieces: gl.constexpr = token_pieces(WIDTH, WARPS)
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
def times(tile, tile_s, total, WARPS: gl.constexpr):
    """total += weights x tokens of one chunk."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 8)
    return mma_v2(tile, tile_s.permute((0, 2, 1)).load(right), total)


@gluon.jit
def products(
    weight, at, x, x_at, live, tiles,
    FEATURES: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Products of 16 weight rows with TOKENS tokens, each warp's share of them in shared memory: [WARPS, 16, TOKENS].

    `tiles`: the first DEPTH weight tiles. Copies started before are waited for as well.
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
        total = times(tiles[chunk], x_s[chunk % DEPTH], total, WARPS)
        if CHUNKS > DEPTH:
            if chunk + DEPTH < CHUNKS:
                tiles = tiles + (weight_tile(weight, at, chunk + DEPTH, 0, FEATURES, WIDTH, WARPS),)
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


@gluon.jit(do_not_specialize=["tokens", "eps"])
def stream_linear(
    x, square, weight, out, residual, norm, out_square, tokens, eps,
    F: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, X_HEAD: gl.constexpr, W_STRIDE: gl.constexpr,
    W_HEAD: gl.constexpr, OUT_STRIDE: gl.constexpr, OUT_HEAD: gl.constexpr, RESIDUAL_STRIDE: gl.constexpr,
    SCALED: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCK: gl.constexpr, EPILOGUE: gl.constexpr,
    NORM_FEATURES: gl.constexpr, OUT_PIECES: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T for up to TOKENS tokens, SCALED: times each token's inverse root mean square. Grid: rows / 16,
    heads. EARLY: the kernel after may start at once, else only after this one has waited for the kernel before."""
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    program = gl.program_id(0)
    head = gl.program_id(1).to(gl.int64)
    if DEPENDENT and EARLY:
        let_kernel_after_start()
    row = program * _ROWS + gl.arange(0, _ROWS, weight_rows_layout(WARPS))
    at = head * W_HEAD + gl.minimum(row, F - 1).to(gl.int64) * W_STRIDE
    tiles = weight_tiles(weight, at, 0, K, WIDTH, WARPS, DEPTH)
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    inside = (f < F)[:, None] & (t < tokens)[None, :]
    if EPILOGUE == _RESIDUAL:
        factor = gl.load(norm + f, mask=f < F, other=0.0).to(gl.float32)
    if EPILOGUE == _NORMED:
        factor = gl.load(norm + f, mask=f < NORM_FEATURES, other=1.0).to(gl.float32)
    if DEPENDENT:
        wait_for_kernel_before()
        if not EARLY:
            let_kernel_after_start()

    if SCALED:
        square_s = copy_squares(square, tokens, PIECES, PIECE_BLOCK, TOKENS, WARPS)
    if EPILOGUE == _RESIDUAL:
        before = residual_before(residual, f, t, inside, RESIDUAL_STRIDE)
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_at = token.to(gl.int64) * X_STRIDE + head * X_HEAD
    parts_s = products(weight, at, x, x_at, token < tokens, tiles, K, WIDTH, WARPS, TOKENS, DEPTH)
    y = gl.sum(parts_s.load(sums.parent), 0)
    if SCALED:
        y = y * inverse_rms(square_s, eps, K, _ROWS, WARPS)[None, :]

    if EPILOGUE == _RESIDUAL:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, RESIDUAL_STRIDE, OUT_STRIDE,
            OUT_PIECES,
        )  # fmt: skip
    else:
        if EPILOGUE == _NORMED:
            if program * _ROWS < NORM_FEATURES:
                counted = inside & (f < NORM_FEATURES)[:, None]
                gl.store(
                    out_square + t * OUT_PIECES + program, gl.sum(gl.where(counted, y * y, 0.0), 0), mask=t < tokens
                )
            y = y * factor[:, None]
        to = out + head * OUT_HEAD + t.to(gl.int64)[None, :] * OUT_STRIDE + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")


@gluon.jit(do_not_specialize=["tokens", "eps"])
def stream_gate_up(
    x, square, weight, out, tokens, eps,
    I: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, W_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr,
    SCALED: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCK: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out = silu(gate · x) * (up · x), the I gate rows of the weight before the I up rows. Grid: I / 8."""
    if DEPENDENT:
        let_kernel_after_start()
    at = gate_up_rows(gl.program_id(0), I, W_STRIDE, WARPS)
    tiles = weight_tiles(weight, at, 0, K, WIDTH, WARPS, DEPTH)
    if DEPENDENT:
        wait_for_kernel_before()
    gate_up_program(
        x, square, weight, at, tiles, out, gl.program_id(0), tokens, eps, I, K, X_STRIDE, OUT_STRIDE, SCALED, PIECES,
        PIECE_BLOCK, TOKENS, WIDTH, DEPTH, WARPS,
    )  # fmt: skip


@gluon.jit
def gate_up_rows(program, I: gl.constexpr, W_STRIDE: gl.constexpr, WARPS: gl.constexpr):
    """Offsets of 8 gate rows and of their 8 up rows."""
    i = gl.arange(0, _ROWS, weight_rows_layout(WARPS))
    row = gl.minimum(program * (_ROWS // 2) + i % (_ROWS // 2), I - 1) + (i // (_ROWS // 2)) * I
    return row.to(gl.int64) * W_STRIDE


@gluon.jit
def gate_up_values(parts_s, WARPS: gl.constexpr):
    """gate and up, [8, TOKENS] each, from the products of `gate_up_rows`."""
    half: gl.constexpr = _ROWS // 2
    sums: gl.constexpr = sums_layout(half, WARPS)
    gate = gl.sum(parts_s.slice(0, half, dim=1).load(sums.parent), 0)
    up = gl.sum(parts_s.slice(half, half, dim=1).load(sums.parent), 0)
    return gate, up


@gluon.jit
def gate_up_program(
    x, square, weight, at, tiles, out, program, tokens, eps,
    I: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr, SCALED: gl.constexpr,
    PIECES: gl.constexpr, PIECE_BLOCK: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """8 columns of the gated activations of every token, after the wait."""
    half: gl.constexpr = _ROWS // 2
    sums: gl.constexpr = sums_layout(half, WARPS)
    if SCALED:
        square_s = copy_squares(square, tokens, PIECES, PIECE_BLOCK, TOKENS, WARPS)
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_at = token.to(gl.int64) * X_STRIDE
    parts_s = products(weight, at, x, x_at, token < tokens, tiles, K, WIDTH, WARPS, TOKENS, DEPTH)
    gate, up = gate_up_values(parts_s, WARPS)
    if SCALED:
        scale = inverse_rms(square_s, eps, K, half, WARPS)
        gate = gate * scale[None, :]
        up = up * scale[None, :]
    value = gate / (1 + gl.exp(-gate)) * up
    f = program * half + gl.arange(0, half, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    to = out + t.to(gl.int64)[None, :] * OUT_STRIDE + f[:, None]
    inside = (f < I)[:, None] & (t < tokens)[None, :]
    gl.store(to, value.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
