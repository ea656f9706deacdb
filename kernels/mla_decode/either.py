"""Decode attention for Hopper of one row alone whose width x heads are more than two blocks of `narrow`: the row is
taken as `narrow` takes it while it is short, and as `wide` does from then on.

`wide` reads the cache once for 64 query vectors, `narrow` once for every 16, four times the bytes for 64; but where a
worker has a tile or two, latency is all that counts, and there `narrow` is the faster. How long the row is only the
device knows when a captured graph is replayed. So one kernel holds both, and the plan says in every program's record
which it is: as many programs work either way. Of two kernels, launched one after the other, the one without work would
hold up the other: their programs do not fit onto a multiprocessor side by side.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.mla_decode.narrow import let_kernel_after_start, narrow_worker, wait_for_kernel_before
from kernels.mla_decode.schedule import NARROW_BLOCK, NARROW_STAGES, PARTS_FIELD, WORKER_FIELDS
from kernels.mla_decode.wide import wide_worker
from kernels.mla_decode.wide_tile import TILE

_WORKER = gl.constexpr(WORKER_FIELDS)
_PARTS = gl.constexpr(PARTS_FIELD)
_BLOCK = gl.constexpr(NARROW_BLOCK)
_STAGES = gl.constexpr(NARROW_STAGES)
_INTS = ["first", "table_stride", "queries", "drafts", "heads", "workers"]


@gluon.jit(do_not_specialize=_INTS)
def attend_either(
    q, cache, q_half, q_rope, kv_half, kv_rope, table, length, out, lse, partial, partial_lse, plan, scale, first,
    table_stride, queries, drafts, heads, workers,
    UNIT: gl.constexpr, ROW_COST: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """As `narrow.attend_narrow` or `wide.attend_wide`, for a row of at most 64 queries; four warps, others come on top.

    The two parts' shared memory lies in the same place. Until `wide` gives its groups the registers they need, the
    first four warps have 256 each, which `narrow` fills.
    """
    gl.assume(first >= 0)  # so that rounding it down takes no registers
    program = gl.program_id(0)
    record = plan + program * _WORKER
    if DEPENDENT and not EARLY:
        wait_for_kernel_before()
        let_kernel_after_start()
    parts = gl.load(record + _PARTS)
    if parts > 1:
        narrow_worker(
            q, cache, table, length, out, lse, partial, partial_lse, record, scale, first, table_stride, queries,
            drafts, heads, workers, program // parts, program % parts,
            _BLOCK, TILE, UNIT, ROW_COST, TILE, _STAGES, DEPENDENT, EARLY,
        )  # fmt: skip
    else:
        wide_worker(
            cache, q_half, q_rope, kv_half, kv_rope, table, length, out, lse, partial, partial_lse, plan, scale, first,
            table_stride, queries, drafts, heads, workers, program, 0,
            UNIT, ROW_COST, False, DEPENDENT, EARLY, PREFETCH,
        )  # fmt: skip
