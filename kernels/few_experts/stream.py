"""The experts of a few tokens: every chosen expert's weights stream through the chip once, for all its tokens.

A unit is an expert that some token has. The shared experts are units too, the first ones: their weights are known, so
they are under way before the choice of the routed ones is. Weights stream through a ring of stages in shared memory
that never runs dry: a program copies what it multiplies STAGES stages later, across its blocks and units, and the ids
it needs for that were asked for one block earlier still.

`place` [T, X] says where expert e stands among the choices of token t (-1: not chosen); `slot` lists the chosen experts
of all tokens by ascending id, then -1, last their number. Sums over experts run in that order, and what is not a
token's own adds exact zeros, so a token's result does not depend on the others.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.ring import tokens_ring, weights_ring
from kernels.gluon.tiles import (
    ROWS,
    add_to_residual,
    copy_squares,
    copy_token_tile,
    gate_up_rows,
    gate_up_values,
    inverse_rms,
    products_layout,
    residual_before,
    scale_rows_layout,
    scales_memory,
    share,
    shared_tiles,
    sums_layout,
    times,
    token_tile,
    tokens_layout,
    weight_scales,
)

_ROWS = gl.constexpr(ROWS)


@gluon.jit
def expert_of(slot, unit, slots, EXPERTS: gl.constexpr, SHARED: gl.constexpr):
    """The expert that is a unit, or -1: the SHARED last experts of the weights, then those of the list."""
    at = unit - SHARED
    listed = gl.load(slot + at, mask=(at >= 0) & (at < slots), other=-1, cache_modifier=".cg")
    return gl.where(at < 0, EXPERTS + unit, listed)


@gluon.jit
def choice_ranks(
    place, expert, tokens, layout: gl.constexpr, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Return, for every token, the index of its activation of this expert; -1 if there is none. The shared experts'
    come behind the chosen."""
    t = gl.arange(0, TOKENS, layout)
    routed = (t < tokens) & (expert >= 0) & (expert < EXPERTS)
    rank = gl.load(place + t * EXPERTS + expert, mask=routed, other=-1, cache_modifier=".cg")
    return gl.where((expert >= EXPERTS) & (t < tokens), CHOSEN + expert - EXPERTS, rank)


@gluon.jit
def choice_weights(weight, rank, layout: gl.constexpr, CHOSEN: gl.constexpr, TOKENS: gl.constexpr):
    """The weights of every token's activations `rank`."""
    t = gl.arange(0, TOKENS, layout)
    chosen = (rank >= 0) & (rank < CHOSEN)
    return gl.load(weight + t * CHOSEN + rank, mask=chosen, other=1.0, cache_modifier=".cg")


@gluon.jit
def copy_gate_up(
    ring_s, weight, block, expert, exists, chunk,
    STORED: gl.constexpr, I: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a chunk of 8 gate rows and of their 8 up rows."""
    half: gl.constexpr = _ROWS // 2
    BLOCKS: gl.constexpr = (I + half - 1) // half
    rows: gl.constexpr = tokens_layout(WIDTH, WARPS, STORED.piece)
    row = gate_up_rows(block % BLOCKS, I, rows)
    at = (gl.maximum(expert, 0).to(gl.int64) * (2 * I) + row) * K
    copy_token_tile(
        ring_s, weight, at, (gl.arange(0, _ROWS, rows) >= 0) & exists, chunk, 0, K, WIDTH, WARPS, STORED.piece
    )  # fmt: skip


@gluon.jit
def gate_up_scales(
    scale, block, expert, exists,
    STORED: gl.constexpr, I: gl.constexpr, CHUNKS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The scales of these rows, of all chunks."""
    half: gl.constexpr = _ROWS // 2
    BLOCKS: gl.constexpr = (I + half - 1) // half
    EXPERT_ROWS: gl.constexpr = (2 * I + STORED.rows - 1) // STORED.rows
    row = gate_up_rows(block % BLOCKS, I, scale_rows_layout(WARPS)) // STORED.rows
    at = (gl.maximum(expert, 0).to(gl.int64) * EXPERT_ROWS + row) * STORED.scales
    return weight_scales(scale, at, CHUNKS, WIDTH, WARPS, STORED, exists)


@gluon.jit(do_not_specialize=["tokens", "slots", "eps"])
def gate_up(
    x, square, weight, weight_scale, slot, place, choice_weight, out, tokens, slots, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, X_STRIDE: gl.constexpr, NORM: gl.constexpr,
    STREAMS: gl.constexpr, RESIDENT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Gated activations of every token and each of its experts, already weighted: row t * (CHOSEN + SHARED) + rank.

    A block is 8 of a unit's I columns; a program takes every grid-th. Each of x's rows is still to be divided by its
    root mean square. RESIDENT: x stays in shared memory, else it streams beside the weights, once for every block.
    """
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    TOKENS: gl.constexpr = STREAMS.tokens
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    half: gl.constexpr = _ROWS // 2
    CHUNKS: gl.constexpr = (K + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    BLOCKS: gl.constexpr = (I + half - 1) // half
    LOOK: gl.constexpr = (CHUNKS - 1 + STAGES) // CHUNKS
    HELD: gl.constexpr = RESIDENT and CHUNKS * TOKENS <= 64
    sums: gl.constexpr = sums_layout(half, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), STORED.piece)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    w_s = weights_ring(weight, WIDTH, WARPS, STAGES, STORED)
    scales_s = scales_memory(weight, CHUNKS, WARPS, STORED)
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        if block < SHARED * BLOCKS:
            copy_gate_up(
                w_s.index(stage), weight, block, EXPERTS + block // BLOCKS, True, stage % CHUNKS, STORED, I, K, WIDTH,
                WARPS,
            )  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()  # after the wait: `down` reads the choice before its own
    blocks = (SHARED + gl.load(slot + slots, cache_modifier=".cg")) * BLOCKS
    experts = ()
    for j in gl.static_range(LOOK + 1):
        experts = experts + (expert_of(slot, (program + j * programs) // BLOCKS, slots, EXPERTS, SHARED),)
    square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_at = token.to(gl.int64) * X_STRIDE
    if RESIDENT:
        x_s = shared_tiles(x, WIDTH, WARPS, TOKENS, CHUNKS)
        for chunk in gl.static_range(CHUNKS):
            copy_token_tile(x_s[chunk], x, x_at, token < tokens, chunk, 0, K, WIDTH, WARPS)
    else:
        x_s = tokens_ring(x, TOKENS, WIDTH, WARPS, STAGES)
        having = ()
        for j in gl.static_range(LOOK + 1):
            having = having + (
                choice_ranks(place, experts[j], tokens, tokens_layout(WIDTH, WARPS), EXPERTS, CHOSEN, TOKENS) >= 0,
            )  # fmt: skip
    async_copy.commit_group()
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        if block >= SHARED * BLOCKS:
            copy_gate_up(
                w_s.index(stage), weight, block, experts[stage // CHUNKS], block < blocks, stage % CHUNKS, STORED, I, K,
                WIDTH, WARPS,
            )  # fmt: skip
        if not RESIDENT:
            copy_token_tile(x_s.index(stage), x, x_at, having[stage // CHUNKS], stage % CHUNKS, 0, K, WIDTH, WARPS)
        async_copy.commit_group()
    if STORED.fp8:
        scales_s.store(gate_up_scales(
            weight_scale, program, experts[0], program < blocks, STORED, I, CHUNKS, WIDTH, WARPS
        ))  # fmt: skip
    async_copy.wait_group(STAGES)
    gl.thread_barrier()
    scale = inverse_rms(square_s, eps, K, half, WARPS)
    if HELD:
        held = ()
        for chunk in gl.static_range(CHUNKS):
            held = held + (token_tile(x_s[chunk], WARPS, STORED),)
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    t = gl.arange(0, TOKENS, columns)
    rank = choice_ranks(place, experts[0], tokens, columns, EXPERTS, CHOSEN, TOKENS)
    factor = choice_weights(choice_weight, rank, columns, CHOSEN, TOKENS)
    stage = 0
    for block in range(program, blocks, programs):
        later = expert_of(slot, (block + (LOOK + 1) * programs) // BLOCKS, slots, EXPERTS, SHARED)
        later_rank = choice_ranks(place, experts[1], tokens, columns, EXPERTS, CHOSEN, TOKENS)
        if STORED.fp8:
            later_scales = gate_up_scales(
                weight_scale, block + programs, experts[1], block + programs < blocks, STORED, I, CHUNKS, WIDTH, WARPS
            )  # fmt: skip
        if not RESIDENT:
            later_having = (
                choice_ranks(place, later, tokens, tokens_layout(WIDTH, WARPS), EXPERTS, CHOSEN, TOKENS) >= 0
            )  # fmt: skip
        total = gl.zeros([WARPS, _ROWS, TOKENS], gl.float32, products_layout(WARPS))
        for chunk in gl.static_range(CHUNKS):
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            if HELD:
                tile = held[chunk]
            elif RESIDENT:
                tile = token_tile(x_s[chunk], WARPS, STORED)
            else:
                tile = token_tile(x_s.index(stage), WARPS, STORED)
            total = times(w_s.index(stage).load(left), tile, scales_s, chunk, total, WARPS, STORED)
            gl.thread_barrier()
            ahead = block + (chunk + STAGES) // CHUNKS * programs
            copy_gate_up(
                w_s.index(stage), weight, ahead, experts[(chunk + STAGES) // CHUNKS], ahead < blocks,
                (chunk + STAGES) % CHUNKS, STORED, I, K, WIDTH, WARPS,
            )  # fmt: skip
            if not RESIDENT:
                copy_token_tile(
                    x_s.index(stage), x, x_at, having[(chunk + STAGES) // CHUNKS], (chunk + STAGES) % CHUNKS, 0, K,
                    WIDTH, WARPS,
                )  # fmt: skip
            async_copy.commit_group()
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        if STORED.fp8:
            scales_s.store(later_scales)
        later_factor = choice_weights(choice_weight, later_rank, columns, CHOSEN, TOKENS)
        gate, up = gate_up_values(share(total, WARPS, TOKENS), WARPS)
        gate = gate * scale[None, :]
        up = up * (scale * factor)[None, :]
        value = gate / (1 + gl.exp(-gate)) * up
        f = block % BLOCKS * half + gl.arange(0, half, gl.SliceLayout(1, sums))
        to = out + (t * (CHOSEN + SHARED) + rank).to(gl.int64)[None, :] * I + f[:, None]
        kept = (f < I)[:, None] & (rank >= 0)[None, :]
        gl.store(to, value.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        experts = experts[1:] + (later,)
        rank = later_rank
        factor = later_factor
        if not RESIDENT:
            having = having[1:] + (later_having,)
    async_copy.wait_group(0)


@gluon.jit
def copy_unit_weights(
    tile_s, weight, row, expert, chunk,
    STORED: gl.constexpr, E: gl.constexpr, I: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a chunk of the rows of an expert that begin at the offsets `row`; zeros for no expert."""
    at = row + gl.maximum(expert, 0).to(gl.int64) * (E * I)
    copy_token_tile(tile_s, weight, at, (row >= 0) & (expert >= 0), chunk, 0, I, WIDTH, WARPS, STORED.piece)


@gluon.jit
def unit_scales(
    scale, row, expert,
    STORED: gl.constexpr, E: gl.constexpr, CHUNKS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The scales of an expert's `row` ([16]), of all chunks."""
    EXPERT_ROWS: gl.constexpr = (E + STORED.rows - 1) // STORED.rows
    at = (gl.maximum(expert, 0).to(gl.int64) * EXPERT_ROWS + row // STORED.rows) * STORED.scales
    return weight_scales(scale, at, CHUNKS, WIDTH, WARPS, STORED, expert >= 0)


@gluon.jit
def copy_unit_tokens(tile_s, act, first, rank, chunk, I: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Start copying a chunk of the activations `rank` of every token, whose activations begin at `first`."""
    copy_token_tile(tile_s, act, (first + rank).to(gl.int64) * I, rank >= 0, chunk, 0, I, WIDTH, WARPS)


@gluon.jit(do_not_specialize=["tokens", "slots"])
def down(
    act, weight, weight_scale, slot, place, residual, norm, out, out_square, tokens, slots,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, SUM: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sum over every unit's activations; added to the residual, or stored. Grid: E / 16.

    The choice and the first stages' weights are read before the wait: `gate_up` lets this kernel start only when the
    choice is there.
    """
    E: gl.constexpr = SIZE.rows
    I: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    RESIDUAL: gl.constexpr = SUM.residual
    TOKENS: gl.constexpr = STREAMS.tokens
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (I + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    LOOK: gl.constexpr = (CHUNKS - 1 + STAGES) // CHUNKS
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    rows: gl.constexpr = tokens_layout(WIDTH, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), STORED.piece)
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    units = SHARED + gl.load(slot + slots, cache_modifier=".cg")
    experts = ()
    for j in gl.static_range(LOOK + 2):
        experts = experts + (expert_of(slot, j, slots, EXPERTS, SHARED),)
    ranks = ()
    for j in gl.static_range(LOOK + 1):
        ranks = ranks + (choice_ranks(place, experts[j], tokens, rows, EXPERTS, CHOSEN, TOKENS),)
    row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, tokens_layout(WIDTH, WARPS, STORED.piece)), E - 1)
    row = row.to(gl.int64) * I
    scales_s = scales_memory(weight, CHUNKS, WARPS, STORED)
    if STORED.fp8:
        scaled_row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, scale_rows_layout(WARPS)), E - 1)
        scales_s.store(unit_scales(weight_scale, scaled_row, experts[0], STORED, E, CHUNKS, WIDTH, WARPS))
    token = gl.arange(0, TOKENS, rows) * (CHOSEN + SHARED)
    w_s = weights_ring(weight, WIDTH, WARPS, STAGES, STORED)
    x_s = tokens_ring(act, TOKENS, WIDTH, WARPS, STAGES)
    for stage in gl.static_range(STAGES):
        copy_unit_weights(
            w_s.index(stage), weight, row, experts[stage // CHUNKS], stage % CHUNKS, STORED, E, I, WIDTH, WARPS
        )  # fmt: skip
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    inside = (f < E)[:, None] & (t < tokens)[None, :]
    if RESIDUAL:
        factor = gl.load(norm + f, mask=f < E, other=0.0).to(gl.float32)
    total = gl.zeros([WARPS, _ROWS, TOKENS], gl.float32, products_layout(WARPS))
    if DEPENDENT:
        wait_for_kernel_before()
    # With 16 tokens its registers would keep the kernel after from starting beside this one, which costs more.
    EARLY_RESIDUAL: gl.constexpr = RESIDUAL and TOKENS <= 8
    if EARLY_RESIDUAL:
        before = residual_before(residual, f, t, inside, SUM.residual_stride)
    for stage in gl.static_range(STAGES):
        copy_unit_tokens(x_s.index(stage), act, token, ranks[stage // CHUNKS], stage % CHUNKS, I, WIDTH, WARPS)
        async_copy.commit_group()
    stage = 0
    for unit in range(units):
        later = expert_of(slot, unit + LOOK + 2, slots, EXPERTS, SHARED)
        later_rank = choice_ranks(place, experts[LOOK + 1], tokens, rows, EXPERTS, CHOSEN, TOKENS)
        if STORED.fp8:
            later_scales = unit_scales(weight_scale, scaled_row, experts[1], STORED, E, CHUNKS, WIDTH, WARPS)
        for chunk in gl.static_range(CHUNKS):
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            weights = w_s.index(stage).load(left)
            tile = token_tile(x_s.index(stage), WARPS, STORED)
            total = times(weights, tile, scales_s, chunk, total, WARPS, STORED)
            gl.thread_barrier()
            copy_unit_weights(
                w_s.index(stage), weight, row, experts[(chunk + STAGES) // CHUNKS], (chunk + STAGES) % CHUNKS, STORED,
                E, I, WIDTH, WARPS,
            )  # fmt: skip
            copy_unit_tokens(
                x_s.index(stage), act, token, ranks[(chunk + STAGES) // CHUNKS], (chunk + STAGES) % CHUNKS, I, WIDTH,
                WARPS,
            )  # fmt: skip
            async_copy.commit_group()
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        experts = experts[1:] + (later,)
        ranks = ranks[1:] + (later_rank,)
        if STORED.fp8:
            scales_s.store(later_scales)
    async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, TOKENS).load(sums.parent), 0)
    if RESIDUAL and not EARLY_RESIDUAL:
        before = residual_before(residual, f, t, inside, SUM.residual_stride)
    if RESIDUAL:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, SUM.residual_stride,
            SUM.stride, SUM.pieces,
        )  # fmt: skip
    else:
        to = out + t.to(gl.int64)[None, :] * SUM.stride + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
