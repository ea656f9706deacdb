"""Gate and up of a single token's experts in FP8 on Hopper: as `fp8.gate_up`, but a program knows all that it has to
know of its blocks before it multiplies the first.

Before the copy engine is asked for a stage there is a fence, which waits for whatever threads have asked memory for. So
nothing is loaded between two stages: experts, their places among the choices and their weights are in registers, for
each unit, and scales in shared memory, for each block of the program.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.few_experts.fp8 import fetch_gate_up
from kernels.few_experts.stream import expert_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import ROWS, copy_squares, gate_up_values, share, sums_layout
from kernels.linear.fp8 import (
    BOXES,
    COLUMNS,
    WIDTH,
    add_products,
    barriers,
    gate_up_scales,
    keep_tokens,
    load_tokens,
    mean_root,
    next_stage,
    no_sums,
    per_column,
    scales_layout,
    token_memory,
)

_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_BOX = gl.constexpr(BOXES[5])


@gluon.jit
def of_unit(values, unit, UNITS: gl.constexpr):
    """The value of a unit; the last one's behind the last."""
    found = values[UNITS - 1]
    for u in gl.static_range(UNITS - 1):
        found = gl.where(unit == u, values[u], found)
    return found


@gluon.jit(do_not_specialize=["slots", "eps"])
def gate_up_single(
    x, square, box, scale, slot, place, choice_weight, out, slots, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, CHOICES: gl.constexpr, X_STRIDE: gl.constexpr, NORM: gl.constexpr,
    STREAMS: gl.constexpr, MOST: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Gated activations of the token's experts, already weighted: row `rank`, the shared experts' behind the chosen.

    A block is 8 of a unit's I columns; a program takes every grid-th, at most MOST of them. The token is still to be
    divided by its root mean square.
    """
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    EXPERTS: gl.constexpr = CHOICES.experts
    SHARED: gl.constexpr = CHOICES.shared
    CHOSEN: gl.constexpr = CHOICES.chosen
    UNITS: gl.constexpr = CHOICES.shared + CHOICES.chosen
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    half: gl.constexpr = _ROWS // 2
    CHUNKS: gl.constexpr = (K + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    BLOCKS: gl.constexpr = (I + half - 1) // half
    sums: gl.constexpr = sums_layout(half, WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, WARPS, 2, half, _WIDTH], _BOX)
    scales_s = gl.allocate_shared_memory(gl.float32, [MOST * CHUNKS, WARPS, _ROWS], plain)
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
    tiles = load_tokens(x, 1, X_STRIDE, K, CHUNKS, 1, WARPS)
    blocks = (SHARED + gl.load(slot + slots, cache_modifier=".cg")) * BLOCKS
    experts = ()
    for u in gl.static_range(UNITS):
        experts = experts + (expert_of(slot, u, slots, EXPERTS, SHARED),)
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        fetch_gate_up(
            box, w_s, full, stage, of_unit(experts, block // BLOCKS, UNITS), block % BLOCKS, stage % CHUNKS,
            (block >= SHARED * BLOCKS) & (block < blocks), WARPS,
        )  # fmt: skip
    square_s = copy_squares(square, 1, NORM.sums, NORM.block, 1, WARPS)
    async_copy.commit_group()
    held = ()
    for j in gl.static_range(MOST):
        block = program + j * programs
        expert = of_unit(experts, block // BLOCKS, UNITS)
        held = held + (gate_up_scales(scale, expert, block % BLOCKS, block < blocks, I, CHUNKS, WARPS, STORED),)
    ranks = ()
    for u in gl.static_range(UNITS):
        routed = (experts[u] >= 0) & (experts[u] < EXPERTS)
        rank = gl.load(place + experts[u], mask=routed, other=-1, cache_modifier=".cg")
        ranks = ranks + (gl.where(experts[u] >= EXPERTS, CHOSEN + experts[u] - EXPERTS, rank),)
    factors = ()
    for u in gl.static_range(UNITS):
        chosen = (ranks[u] >= 0) & (ranks[u] < CHOSEN)
        factors = factors + (gl.load(choice_weight + ranks[u], mask=chosen, other=1.0, cache_modifier=".cg"),)
    x_s = token_memory(1, WARPS, CHUNKS)
    unit_x = keep_tokens(x_s, tiles, CHUNKS)
    for j in gl.static_range(MOST):
        for chunk in gl.static_range(CHUNKS):
            scales_s.index(j * CHUNKS + chunk).store(held[j][chunk])
    async_copy.wait_group(0)
    gl.thread_barrier()
    token_scale = mean_root(square_s, eps, K, half, 1, WARPS) * per_column(unit_x, half, 1, WARPS)
    t = gl.arange(0, _COLUMNS, gl.SliceLayout(0, sums))
    stage = 0
    phase = 0
    at = 0
    for block in range(program, blocks, programs):
        total = no_sums(WARPS)
        for chunk in gl.static_range(CHUNKS):
            scales = scales_s.index(at + chunk).load(scales_layout(WARPS))
            total = add_products(
                total, w_s.index(stage), full.index(stage), phase, x_s.index(chunk), scales[:, :, None], WARPS, 1
            )  # fmt: skip
            gl.thread_barrier()
            ahead = block + (chunk + STAGES) // CHUNKS * programs
            fetch_gate_up(
                box, w_s, full, stage, of_unit(experts, ahead // BLOCKS, UNITS), ahead % BLOCKS,
                (chunk + STAGES) % CHUNKS, ahead < blocks, WARPS,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        rank = of_unit(ranks, block // BLOCKS, UNITS)
        factor = of_unit(factors, block // BLOCKS, UNITS)
        gate, up = gate_up_values(share(total, WARPS, _COLUMNS), WARPS)
        gate = gate * token_scale[None, :]
        up = up * (token_scale * factor)[None, :]
        value = gate / (1 + gl.exp(-gate)) * up
        f = block % BLOCKS * half + gl.arange(0, half, gl.SliceLayout(1, sums))
        to = out + rank.to(gl.int64) * I + f[:, None] + 0 * t[None, :]
        kept = (f < I)[:, None] & (t == 0)[None, :] & (rank >= 0)
        gl.store(to, value.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        at += CHUNKS
