"""The experts of a few tokens: every chosen expert's weights stream through the chip once, for all its tokens.

Built on the same products as `kernels.linear.stream`. Shared experts come first: their weights are known, so they are
under way before the choice of the routed ones is.

`place` [T, X] says where expert e stands among the choices of token t (-1: not chosen); `slot` lists the chosen experts
of all tokens by ascending id, then -1. Sums over experts run in that order, and what is not a token's own adds exact
zeros, so a token's result does not depend on the others.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.linear.stream import (
    ROWS,
    add_to_residual,
    copy_squares,
    copy_token_tile,
    gate_up_program,
    gate_up_rows,
    gate_up_values,
    inverse_rms,
    let_kernel_after_start,
    products,
    products_layout,
    share,
    shared_tiles,
    sums_layout,
    times,
    tokens_layout,
    wait_for_kernel_before,
    weight_rows_layout,
    weight_tile,
    weight_tiles,
)

_ROWS = gl.constexpr(ROWS)


@gluon.jit(do_not_specialize=["tokens", "eps"])
def gate_up(
    x, square, shared_weight, weight, slot, place, choice_weight, shared_out, out, tokens, eps,
    SHARED: gl.constexpr, I: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr,
    X_STRIDE: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCK: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Gated activations of SHARED shared columns for every token, and of I columns for every choice, already weighted.

    The SHARED columns are units of I, each with its gate rows before its up rows. Grid: (SHARED / I + slots) *
    ceil(I / 8). Each of x's rows is still to be divided by its root mean square.
    """
    half: gl.constexpr = _ROWS // 2
    CHUNKS: gl.constexpr = (I + half - 1) // half
    SHARED_PROGRAMS: gl.constexpr = SHARED // I * CHUNKS
    sums: gl.constexpr = sums_layout(half, WARPS)
    program = gl.program_id(0)
    if program < SHARED_PROGRAMS:
        unit = program // CHUNKS
        chunk = program % CHUNKS
        at = gate_up_rows(chunk, I, K, WARPS) + unit.to(gl.int64) * (2 * I * K)
        tiles = weight_tiles(shared_weight, at, 0, K, WIDTH, WARPS, DEPTH)
        if DEPENDENT:
            wait_for_kernel_before()
            let_kernel_after_start()  # after the wait: `down` reads the choice before its own
        gate_up_program(
            x, square, shared_weight, at, tiles, shared_out + unit * I, chunk, tokens, eps, I, K, X_STRIDE, SHARED,
            True, PIECES, PIECE_BLOCK, TOKENS, WIDTH, DEPTH, WARPS,
        )  # fmt: skip
    else:
        if DEPENDENT:
            wait_for_kernel_before()
            let_kernel_after_start()
        program -= SHARED_PROGRAMS
        expert = gl.load(slot + program // CHUNKS, cache_modifier=".cg")
        if expert >= 0:
            chunk = program % CHUNKS
            at = gate_up_rows(chunk, I, K, WARPS) + expert.to(gl.int64) * (2 * I * K)
            tiles = weight_tiles(weight, at, 0, K, WIDTH, WARPS, DEPTH)
            token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
            mine = gl.load(place + token * EXPERTS + expert, mask=token < tokens, other=-1, cache_modifier=".cg") >= 0
            square_s = copy_squares(square, tokens, PIECES, PIECE_BLOCK, TOKENS, WARPS)
            x_at = token.to(gl.int64) * X_STRIDE
            parts_s = products(weight, at, x, x_at, mine, tiles, K, WIDTH, WARPS, TOKENS, DEPTH)
            f = chunk * half + gl.arange(0, half, gl.SliceLayout(1, sums))
            t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
            rank = gl.load(place + t * EXPERTS + expert, mask=t < tokens, other=-1, cache_modifier=".cg")
            row = t * CHOSEN + rank
            factor = gl.load(choice_weight + row, mask=rank >= 0, other=0.0, cache_modifier=".cg")
            gate, up = gate_up_values(parts_s, WARPS)
            scale = inverse_rms(square_s, eps, K, half, WARPS)
            gate = gate * scale[None, :]
            up = up * (scale * factor)[None, :]
            value = gate / (1 + gl.exp(-gate)) * up
            to = out + row.to(gl.int64)[None, :] * I + f[:, None]
            gl.store(to, value.to(out.dtype.element_ty), mask=(f < I)[:, None] & (rank >= 0)[None, :])


@gluon.jit
def expert_of(slot, unit, slots, SHARED_UNITS: gl.constexpr):
    """The routed expert that is a unit, or -1."""
    at = unit - SHARED_UNITS
    return gl.load(slot + at, mask=(at >= 0) & (at < slots), other=-1, cache_modifier=".cg")


@gluon.jit
def unit_rows(weight, shared_weight, row, unit, expert, E: gl.constexpr, SHARED: gl.constexpr, I: gl.constexpr):
    """Where a unit's weight rows are, and whether there is such a unit."""
    SHARED_UNITS: gl.constexpr = SHARED // I
    base = weight
    at = row * I + gl.maximum(expert, 0).to(gl.int64) * (E * I)
    if SHARED_UNITS > 0:  # noqa: SIM102
        if unit < SHARED_UNITS:
            base = shared_weight
            at = (unit * E + row) * I
    return base, at, (unit < SHARED_UNITS) | (expert >= 0)


@gluon.jit
def turn_of(unit, expert, SHARED_UNITS: gl.constexpr):
    """How a unit's chunks are dealt to the warps: by what it is, not by where it stands in the list."""
    return 2 * gl.where(unit < SHARED_UNITS, unit, gl.maximum(expert, 0))


@gluon.jit
def unit_weights(
    weight, shared_weight, row, unit, expert,
    E: gl.constexpr, SHARED: gl.constexpr, I: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Weight tiles of a unit; zeros if there is none."""
    CHUNKS: gl.constexpr = (I + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    base, at, exists = unit_rows(weight, shared_weight, row, unit, expert, E, SHARED, I)
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        tile = weight_tile(base, at, chunk, turn_of(unit, expert, SHARED // I), I, WIDTH, WARPS, exists)
        tiles = tiles + (tile,)
    return tiles


@gluon.jit
def choice_ranks(
    place, unit, expert, tokens,
    SHARED_UNITS: gl.constexpr, EXPERTS: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where a unit's expert stands among every token's choices; -1 if nowhere or if the unit is shared."""
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    routed = (token < tokens) & (unit >= SHARED_UNITS) & (expert >= 0)
    return gl.load(place + token * EXPERTS + expert, mask=routed, other=-1, cache_modifier=".cg")


@gluon.jit
def copy_unit(
    x_s, shared_act, act, unit, expert, rank, tokens,
    SHARED: gl.constexpr, I: gl.constexpr, CHOSEN: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a unit's activations of every token, zero where it has none, as one group of copies."""
    CHUNKS: gl.constexpr = (I + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    SHARED_UNITS: gl.constexpr = SHARED // I
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    base = act
    at = (token * CHOSEN + rank).to(gl.int64) * I
    live = rank >= 0
    if SHARED_UNITS > 0:  # noqa: SIM102
        if unit < SHARED_UNITS:
            base = shared_act
            at = token.to(gl.int64) * SHARED + unit * I
            live = token < tokens
    for chunk in gl.static_range(CHUNKS):
        copy_token_tile(x_s[chunk], base, at, live, chunk, turn_of(unit, expert, SHARED_UNITS), I, WIDTH, WARPS)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tokens", "slots"])
def down(
    shared_act, act, shared_weight, weight, slot, place, residual, norm, out, out_square, tokens, slots,
    E: gl.constexpr, SHARED: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr,
    RESIDUAL: gl.constexpr, RESIDUAL_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr, PIECES: gl.constexpr,
    TOKENS: gl.constexpr, WIDTH: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sum over the shared activations and every chosen expert; added to the residual, or stored. Grid: E / 16.

    The SHARED columns are cut into units of I; then every chosen expert is one unit. Everything of a unit is asked for
    AHEAD units before it is multiplied, of the first AHEAD units the weights before the wait: `gate_up` lets this
    kernel start only when the choice is there.
    """
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    CHUNKS: gl.constexpr = (I + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    SHARED_UNITS: gl.constexpr = SHARED // I
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, weight_rows_layout(WARPS)), E - 1).to(gl.int64)
    tiles = ()
    firsts = ()
    ranks = ()
    for i in gl.static_range(AHEAD):
        expert = expert_of(slot, i, slots, SHARED_UNITS)
        tiles = tiles + unit_weights(weight, shared_weight, row, i, expert, E, SHARED, I, WIDTH, WARPS)
        firsts = firsts + (expert,)
        ranks = ranks + (choice_ranks(place, i, expert, tokens, SHARED_UNITS, EXPERTS, TOKENS, WIDTH, WARPS),)
    units = SHARED_UNITS + gl.load(slot + slots, cache_modifier=".cg")
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    inside = (f < E)[:, None] & (t < tokens)[None, :]
    if RESIDUAL:
        factor = gl.load(norm + f, mask=f < E, other=0.0).to(gl.float32)
    x_s = shared_tiles(act, WIDTH, WARPS, TOKENS, AHEAD * CHUNKS)
    total = gl.zeros([WARPS, _ROWS, TOKENS], gl.float32, products_layout(WARPS))
    if DEPENDENT:
        wait_for_kernel_before()
    experts = ()
    for i in gl.static_range(AHEAD):
        own_s = x_s[i * CHUNKS : (i + 1) * CHUNKS]
        copy_unit(own_s, shared_act, act, i, firsts[i], ranks[i], tokens, SHARED, I, CHOSEN, TOKENS, WIDTH, WARPS)
        experts = experts + (expert_of(slot, i + AHEAD, slots, SHARED_UNITS),)
    for first in range(0, units, AHEAD):
        later_tiles = ()
        later_experts = ()
        for i in gl.static_range(AHEAD):
            unit = first + i + AHEAD
            rank = choice_ranks(place, unit, experts[i], tokens, SHARED_UNITS, EXPERTS, TOKENS, WIDTH, WARPS)
            base, at, exists = unit_rows(weight, shared_weight, row, unit, experts[i], E, SHARED, I)
            turn = turn_of(unit, experts[i], SHARED_UNITS)
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()
            for chunk in gl.static_range(CHUNKS):
                total = times(tiles[i * CHUNKS + chunk], x_s[i * CHUNKS + chunk], total, WARPS)
                tile = weight_tile(base, at, chunk, turn, I, WIDTH, WARPS, exists)
                later_tiles = later_tiles + (tile,)
            gl.thread_barrier()
            own_s = x_s[i * CHUNKS : (i + 1) * CHUNKS]
            copy_unit(own_s, shared_act, act, unit, experts[i], rank, tokens, SHARED, I, CHOSEN, TOKENS, WIDTH, WARPS)
            later_experts = later_experts + (expert_of(slot, unit + AHEAD, slots, SHARED_UNITS),)
        tiles = later_tiles
        experts = later_experts
    async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, TOKENS).load(sums.parent), 0)
    if RESIDUAL:
        add_to_residual(
            y, f, t, inside, tokens, program, residual, factor, out, out_square, RESIDUAL_STRIDE, OUT_STRIDE, PIECES
        )  # fmt: skip
    else:
        to = out + t.to(gl.int64)[None, :] * OUT_STRIDE + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside)
