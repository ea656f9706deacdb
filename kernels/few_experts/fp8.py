"""The experts of a few tokens in FP8 on Hopper: as `stream`, with weights as `kernels.linear.fp8` fetches and
multiplies them.

`gate_up` keeps all tokens in shared memory, in scaled fp16; `down` takes the activations in scaled fp16 already. For
short experts there is `fp8_short`.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.few_experts.stream import choice_ranks, choice_weights, expert_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    ROWS,
    add_to_residual,
    copy_squares,
    gate_up_values,
    products_layout,
    residual_before,
    share,
    sums_layout,
    tokens_layout,
)
from kernels.linear.fp8 import (
    BOXES,
    COLUMNS,
    WIDTH,
    add_products,
    all_scales,
    barriers,
    copy_tokens,
    fetch,
    gate_up_scales,
    keep_tokens,
    load_tokens,
    mean_root,
    next_stage,
    no_sums,
    per_column,
    scale_rows,
    token_memory,
)

_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_GATE_UP_BOX = gl.constexpr(BOXES[5])
_DOWN_BOX = gl.constexpr(BOXES[4])


@gluon.constexpr_function
def blocks_ahead(fetched):
    """Blocks whose experts a program knows: those that are fetched, and two at least. Of the second it then asks where
    it stands among a token's choices, and of the first, for which that is there, the weight: a block has no answer of
    its own to wait for."""
    return max(fetched, 2)


@gluon.jit
def fetch_gate_up(box, w_s, full, stage, expert, block, chunk, exists, WARPS: gl.constexpr):
    """Start fetching a chunk of 8 gate rows and of their 8 up rows."""
    at = [expert, chunk * WARPS, 0, block * (_ROWS // 2), 0]
    fetch(box, at, w_s.index(stage), full.index(stage), exists)


@gluon.jit(do_not_specialize=["tokens", "slots", "eps"])
def gate_up(
    x, square, box, scale, slot, place, choice_weight, out, tokens, slots, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, X_STRIDE: gl.constexpr, NORM: gl.constexpr,
    STREAMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Gated activations of every token and each of its experts, already weighted: row t * (CHOSEN + SHARED) + rank.

    A block is 8 of a unit's I columns; a program takes every grid-th. Each of x's rows is still to be divided by its
    root mean square.
    """
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    half: gl.constexpr = _ROWS // 2
    CHUNKS: gl.constexpr = (K + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    BLOCKS: gl.constexpr = (I + half - 1) // half
    LOOK: gl.constexpr = blocks_ahead((CHUNKS - 1 + STAGES) // CHUNKS)
    sums: gl.constexpr = sums_layout(half, WARPS)
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, WARPS, 2, half, _WIDTH], _GATE_UP_BOX)
    full = barriers(STAGES)
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        fetch_gate_up(
            box, w_s, full, stage, EXPERTS + block // BLOCKS, block % BLOCKS, stage % CHUNKS, block < SHARED * BLOCKS,
            WARPS,
        )  # fmt: skip
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()  # after the wait: `down` reads the choice before its own
    # Before weights, behind which they would have to queue.
    tiles = load_tokens(x, tokens, X_STRIDE, K, CHUNKS, TOKENS, WARPS)
    blocks = (SHARED + gl.load(slot + slots, cache_modifier=".cg")) * BLOCKS
    experts = ()
    for j in gl.static_range(LOOK + 1):
        experts = experts + (expert_of(slot, (program + j * programs) // BLOCKS, slots, EXPERTS, SHARED),)
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        fetch_gate_up(
            box, w_s, full, stage, experts[stage // CHUNKS], block % BLOCKS, stage % CHUNKS,
            (block >= SHARED * BLOCKS) & (block < blocks), WARPS,
        )  # fmt: skip
    square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
    async_copy.commit_group()
    scales = gate_up_scales(scale, experts[0], program % BLOCKS, program < blocks, I, CHUNKS, WARPS, STORED)
    x_s = token_memory(TOKENS, WARPS, CHUNKS)
    unit = keep_tokens(x_s, tiles, CHUNKS)
    async_copy.wait_group(0)
    gl.thread_barrier()
    token_scale = mean_root(square_s, eps, K, half, TOKENS, WARPS) * per_column(unit, half, TOKENS, WARPS)
    t = gl.arange(0, _COLUMNS, columns)
    rank = choice_ranks(place, experts[0], tokens, columns, EXPERTS, CHOSEN, _COLUMNS)
    factor = choice_weights(choice_weight, rank, columns, CHOSEN, _COLUMNS)
    next_rank = choice_ranks(place, experts[1], tokens, columns, EXPERTS, CHOSEN, _COLUMNS)
    stage = 0
    phase = 0
    for block in range(program, blocks, programs):
        later = expert_of(slot, (block + (LOOK + 1) * programs) // BLOCKS, slots, EXPERTS, SHARED)
        later_rank = choice_ranks(place, experts[2], tokens, columns, EXPERTS, CHOSEN, _COLUMNS)
        later_factor = choice_weights(choice_weight, next_rank, columns, CHOSEN, _COLUMNS)
        later_scales = gate_up_scales(
            scale, experts[1], (block + programs) % BLOCKS, block + programs < blocks, I, CHUNKS, WARPS, STORED
        )  # fmt: skip
        total = no_sums(WARPS)
        for chunk in gl.static_range(CHUNKS):
            total = add_products(
                total, w_s.index(stage), full.index(stage), phase, x_s.index(chunk), scales[chunk][:, :, None], WARPS,
                TOKENS,
            )  # fmt: skip
            gl.thread_barrier()
            ahead = block + (chunk + STAGES) // CHUNKS * programs
            fetch_gate_up(
                box, w_s, full, stage, experts[(chunk + STAGES) // CHUNKS], ahead % BLOCKS, (chunk + STAGES) % CHUNKS,
                ahead < blocks, WARPS,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        gate, up = gate_up_values(share(total, WARPS, _COLUMNS), WARPS)
        gate = gate * token_scale[None, :]
        up = up * (token_scale * factor)[None, :]
        value = gate / (1 + gl.exp(-gate)) * up
        f = block % BLOCKS * half + gl.arange(0, half, gl.SliceLayout(1, sums))
        to = out + (t * (CHOSEN + SHARED) + rank).to(gl.int64)[None, :] * I + f[:, None]
        kept = (f < I)[:, None] & (rank >= 0)[None, :]
        gl.store(to, value.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        experts = experts[1:] + (later,)
        rank = next_rank
        next_rank = later_rank
        factor = later_factor
        scales = later_scales


@gluon.jit
def fetch_down(box, w_s, full, stage, expert, program, chunk, WARPS: gl.constexpr):
    """Start fetching a chunk of the program's rows of an expert, where there is one."""
    at = [expert, chunk * WARPS, program * _ROWS, 0]
    fetch(box, at, w_s.index(stage), full.index(stage), expert >= 0)


@gluon.jit
def copy_unit(tile_s, act, rank, chunk, I: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, OF: gl.constexpr):
    """Start copying a chunk of the activations `rank` of every token; each token has OF of them."""
    token = gl.arange(0, TOKENS, tokens_layout(_WIDTH, WARPS))
    copy_tokens(tile_s, act, (token * OF + rank).to(gl.int64) * I, rank >= 0, chunk, I, WARPS)


@gluon.jit
def down_scales(
    scale, expert, program,
    E: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The scales of the program's rows of an expert, of all chunks."""
    EXPERT_ROWS: gl.constexpr = (E + STORED.rows - 1) // STORED.rows
    row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, scale_rows(WARPS)), E - 1) // STORED.rows
    at = (gl.maximum(expert, 0) * EXPERT_ROWS + row) * STORED.scales
    return all_scales(scale, at, expert >= 0, CHUNKS, WARPS, STORED)


@gluon.jit(do_not_specialize=["tokens", "slots"])
def down(
    act, unit, box, scale, slot, place, residual, norm, out, out_square, tokens, slots,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, SUM: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sum over every unit's activations, which are in scaled fp16; added to the residual, or stored. Grid: E / 16.

    The choice and the first stages' weights are read before the wait: `gate_up` lets what comes after start only
    when the choice is there.
    """
    E: gl.constexpr = SIZE.rows
    I: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    OF: gl.constexpr = CHOICES.chosen + CHOICES.shared
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (I + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    LOOK: gl.constexpr = (CHUNKS - 1 + STAGES) // CHUNKS
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    rows: gl.constexpr = tokens_layout(_WIDTH, WARPS)
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, products_layout(WARPS)))
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, WARPS, _ROWS, _WIDTH], _DOWN_BOX)
    full = barriers(STAGES)
    units = SHARED + gl.load(slot + slots, cache_modifier=".cg")
    experts = ()
    for j in gl.static_range(LOOK + 2):
        experts = experts + (expert_of(slot, j, slots, EXPERTS, SHARED),)
    for stage in gl.static_range(STAGES):
        fetch_down(box, w_s, full, stage, experts[stage // CHUNKS], program, stage % CHUNKS, WARPS)
    ranks = ()
    for j in gl.static_range(LOOK + 1):
        ranks = ranks + (choice_ranks(place, experts[j], tokens, rows, EXPERTS, CHOSEN, TOKENS),)
    scales = down_scales(scale, experts[0], program, E, CHUNKS, WARPS, STORED)
    x_s = token_memory(TOKENS, WARPS, STAGES)
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, _COLUMNS, gl.SliceLayout(0, sums))
    inside = (f < E)[:, None] & (t < tokens)[None, :]
    if SUM.residual:
        factor = gl.load(norm + f, mask=f < E, other=0.0).to(gl.float32)
    total = no_sums(WARPS)
    rank = choice_ranks(place, experts[0], tokens, columns, EXPERTS, CHOSEN, _COLUMNS)
    unit_at = unit + gl.arange(0, _COLUMNS, columns) * OF
    if DEPENDENT:
        wait_for_kernel_before()
    if SUM.residual:
        before = residual_before(residual, f, t, inside, SUM.residual_stride)
    for stage in gl.static_range(STAGES):
        copy_unit(x_s.index(stage), act, ranks[stage // CHUNKS], stage % CHUNKS, I, TOKENS, WARPS, OF)
        async_copy.commit_group()
    stage = 0
    phase = 0
    for u in range(units):
        later = expert_of(slot, u + LOOK + 2, slots, EXPERTS, SHARED)
        later_ranks = choice_ranks(place, experts[LOOK + 1], tokens, rows, EXPERTS, CHOSEN, TOKENS)
        later_scales = down_scales(scale, experts[1], program, E, CHUNKS, WARPS, STORED)
        later_rank = choice_ranks(place, experts[1], tokens, columns, EXPERTS, CHOSEN, _COLUMNS)
        units_of = gl.load(unit_at + rank, mask=rank >= 0, other=0.0, cache_modifier=".cg")
        for chunk in gl.static_range(CHUNKS):
            async_copy.wait_group(STAGES - 1)
            factors = scales[chunk][:, :, None] * units_of[None, None, :]  # zero for what is not a token's own
            total = add_products(
                total, w_s.index(stage), full.index(stage), phase, x_s.index(stage), factors, WARPS, TOKENS
            )  # fmt: skip
            gl.thread_barrier()
            fetch_down(
                box, w_s, full, stage, experts[(chunk + STAGES) // CHUNKS], program, (chunk + STAGES) % CHUNKS, WARPS
            )  # fmt: skip
            copy_unit(
                x_s.index(stage), act, ranks[(chunk + STAGES) // CHUNKS], (chunk + STAGES) % CHUNKS, I, TOKENS, WARPS,
                OF,
            )  # fmt: skip
            async_copy.commit_group()
            stage, phase = next_stage(stage, phase, STAGES)
        experts = experts[1:] + (later,)
        ranks = ranks[1:] + (later_ranks,)
        scales = later_scales
        rank = later_rank
    async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, _COLUMNS).load(sums.parent), 0)
    if SUM.residual:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, SUM.residual_stride,
            SUM.stride, SUM.pieces,
        )  # fmt: skip
    else:
        to = out + t.to(gl.int64)[None, :] * SUM.stride + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
