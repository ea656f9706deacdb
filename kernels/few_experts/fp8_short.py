"""The second half of the experts of a few tokens in FP8 on Hopper, of short experts: as `fp8.down`.

An expert of a few hundred features is done sooner than memory answers. So what it needs besides its weights and
activations (its scales, who has chosen it) is loaded some experts ahead, and two experts are multiplied at once, so
that their products do not wait for each other. Threads copy the weights rather than the copy engine: before that may
overwrite what threads have read there is a fence, which waits for all that they have asked for.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.few_experts.fp8 import copy_unit, down_scales
from kernels.few_experts.stream import choice_ranks, copy_unit_weights, expert_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.ring import weights_ring
from kernels.gluon.tiles import (
    ROWS,
    add_to_residual,
    products_layout,
    residual_before,
    share,
    sums_layout,
    tokens_layout,
)
from kernels.linear.fp8 import COLUMNS, WIDTH, no_sums, to_fp16, token_memory, token_tile

AT_ONCE = 2
"""Units that are multiplied at once; also units by which what they need is loaded ahead."""

_AT_ONCE = gl.constexpr(AT_ONCE)
_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)


@gluon.constexpr_function
def unit_columns(warps):
    """Layout of the tokens [8] whose powers of two are loaded."""
    return gl.SliceLayout(0, gl.SliceLayout(1, products_layout(warps)))


@gluon.jit
def token_units(unit, rank, OF: gl.constexpr, WARPS: gl.constexpr):
    """The powers of two of the activations `rank` of every token, [8]; 0 for what is not a token's own."""
    t = gl.arange(0, _COLUMNS, unit_columns(WARPS))
    return gl.load(unit + t * OF + rank, mask=rank >= 0, other=0.0, cache_modifier=".cg")


@gluon.jit(do_not_specialize=["tokens", "slots"])
def down_short(
    act, unit, weight, scale, slot, place, residual, norm, out, out_square, tokens, slots,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, SUM: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Variant of `fp8.down` for experts whose features the warps take at once. Grid: E / 16."""
    E: gl.constexpr = SIZE.rows
    I: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    OF: gl.constexpr = CHOICES.chosen + CHOICES.shared
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    LOOK: gl.constexpr = STAGES + _AT_ONCE - 1
    KNOWN: gl.constexpr = LOOK + 3 * _AT_ONCE
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    rows: gl.constexpr = tokens_layout(_WIDTH, WARPS)
    columns: gl.constexpr = unit_columns(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), STORED.piece)
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s = weights_ring(weight, _WIDTH, WARPS, STAGES, STORED)
    row = program * _ROWS + gl.arange(0, _ROWS, tokens_layout(_WIDTH, WARPS, STORED.piece))
    weight_at = gl.minimum(row, E - 1) * I
    units = SHARED + gl.load(slot + slots, cache_modifier=".cg")
    # Of this unit and of later ones: experts, who has them as rows and as columns, their scales. A turn of the loop
    # uses the first ones, and loads as many behind the last.
    experts = ()
    for j in gl.static_range(KNOWN):
        experts = experts + (expert_of(slot, j, slots, EXPERTS, SHARED),)
    for stage in gl.static_range(STAGES):
        copy_unit_weights(w_s.index(stage), weight, weight_at, experts[stage], 0, STORED, E, I, _WIDTH, WARPS)
        async_copy.commit_group()
    row_ranks = ()
    for j in gl.static_range(LOOK + _AT_ONCE):
        row_ranks = row_ranks + (choice_ranks(place, experts[j], tokens, rows, EXPERTS, CHOSEN, TOKENS),)
    column_ranks = ()
    for j in gl.static_range(2 * _AT_ONCE):
        column_ranks = column_ranks + (choice_ranks(place, experts[j], tokens, columns, EXPERTS, CHOSEN, _COLUMNS),)
    scales = ()
    for j in gl.static_range(_AT_ONCE):
        scales = scales + (down_scales(scale, experts[j], program, E, 1, WARPS, STORED)[0],)
    x_s = token_memory(TOKENS, WARPS, STAGES)
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, _COLUMNS, gl.SliceLayout(0, sums))
    inside = (f < E)[:, None] & (t < tokens)[None, :]
    if SUM.residual:
        factor = gl.load(norm + f, mask=f < E, other=0.0).to(gl.float32)
    total = no_sums(WARPS)
    if DEPENDENT:
        wait_for_kernel_before()
    if SUM.residual:
        before = residual_before(residual, f, t, inside, SUM.residual_stride)
    for stage in gl.static_range(STAGES):
        copy_unit(x_s.index(stage), act, row_ranks[stage], 0, I, TOKENS, WARPS, OF)
        async_copy.commit_group()
    powers = ()
    for j in gl.static_range(_AT_ONCE):
        powers = powers + (token_units(unit, column_ranks[j], OF, WARPS),)
    stage = 0
    for u in range(0, units, _AT_ONCE):
        later = ()
        later_rows = ()
        later_columns = ()
        later_scales = ()
        later_powers = ()
        for i in gl.static_range(_AT_ONCE):
            later = later + (expert_of(slot, u + KNOWN + i, slots, EXPERTS, SHARED),)
            expert = experts[LOOK + _AT_ONCE + i]
            later_rows = later_rows + (choice_ranks(place, expert, tokens, rows, EXPERTS, CHOSEN, TOKENS),)
            expert = experts[2 * _AT_ONCE + i]
            later_columns = later_columns + (choice_ranks(place, expert, tokens, columns, EXPERTS, CHOSEN, _COLUMNS),)
            expert = experts[_AT_ONCE + i]
            later_scales = later_scales + (down_scales(scale, expert, program, E, 1, WARPS, STORED)[0],)
            later_powers = later_powers + (token_units(unit, column_ranks[_AT_ONCE + i], OF, WARPS),)
        async_copy.wait_group(STAGES - _AT_ONCE)
        gl.thread_barrier()
        parts = ()
        for i in gl.static_range(_AT_ONCE):
            at = gl.where(stage + i >= STAGES, stage + i - STAGES, stage + i)
            tile = to_fp16(w_s.index(at).load(left))
            parts = parts + (mma_v2(tile, token_tile(x_s.index(at), WARPS, TOKENS), no_sums(WARPS)),)
        gl.thread_barrier()
        for i in gl.static_range(_AT_ONCE):
            total = total + parts[i] * (scales[i][:, :, None] * powers[i][None, None, :])
            expert = experts[STAGES + i]
            copy_unit_weights(w_s.index(stage), weight, weight_at, expert, 0, STORED, E, I, _WIDTH, WARPS)
            copy_unit(x_s.index(stage), act, row_ranks[STAGES + i], 0, I, TOKENS, WARPS, OF)
            async_copy.commit_group()
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        experts = experts[_AT_ONCE:] + later
        row_ranks = row_ranks[_AT_ONCE:] + later_rows
        column_ranks = column_ranks[_AT_ONCE:] + later_columns
        scales = scales[_AT_ONCE:] + later_scales
        powers = powers[_AT_ONCE:] + later_powers
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
