"""Decode attention for Hopper when a row has at most 16 query vectors, or a row alone a few blocks of 16: bound by
memory, and by latency in small batches.

The portable kernel waits three times in a row: for the query, for a page id, for the cache. Here every copy of the
first tiles is under way before the first wait; page id and length of a worker's first tile come with its plan record.
Where a worker goes on with another row, that row's query and first tile are under way before this one's last product.
With programmatic dependent launch (`early`) the first cache tiles are even requested before the kernel before has
finished, as far as that kernel cannot have written them. Products use mma.sync: 16 query vectors are too few for
wgmma.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.mla_decode.records import Share
from kernels.mla_decode.schedule import PARTS_FIELD, WORKER_FIELDS

_MASKED = gl.constexpr(-1.0e33)
_LOWEST = gl.constexpr(-1.0e30)
_WORKER = gl.constexpr(WORKER_FIELDS)
_PARTS = gl.constexpr(PARTS_FIELD)
_LN2 = gl.constexpr(0.6931471805599453)
_INTS = ["first", "table_stride", "queries", "drafts", "heads", "blocks", "workers"]


@gluon.jit
def wait_for_kernel_before():
    """With programmatic dependent launch: wait until the kernel before has finished and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_kernel_after_start():
    """With programmatic dependent launch: let the kernel after start; it still waits for this one where it must."""
    instruction: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hand_on():
    """In place of the work, in every program of a kernel launched dependently that has none: let the kernel after start
    at once. One program waits, so that the kernel's end still proves that all before have ended; the others make room.
    """
    if gl.program_id(0) == 0:
        let_kernel_after_start()
        wait_for_kernel_before()


@gluon.jit
def unknown_zero():
    """A zero that the compiler does not know. Addresses that depend on it stay inside the loop, where they are cheap;
    hoisted out of it, as many as there are products, they would spill registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_tile(
    cache, page, tile, tokens, first, latent_s, rope_s, TILE: gl.constexpr, PAGE: gl.constexpr, WARPS: gl.constexpr
):
    """Start copying one tile; entries outside [first, tokens) become zero."""
    LATENT: gl.constexpr = 512
    ROPE: gl.constexpr = 64
    by_latent: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    by_rope: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    base = cache + (page.to(gl.int64) * PAGE + tile * TILE % PAGE) * (LATENT + ROPE)
    n = gl.arange(0, TILE, gl.SliceLayout(1, by_latent))
    c = gl.arange(0, LATENT, gl.SliceLayout(0, by_latent))
    entry = tile * TILE + n
    written = ((entry < tokens) & (entry >= first))[:, None]
    async_copy.async_copy_global_to_shared(latent_s, base + n[:, None] * (LATENT + ROPE) + c[None, :], mask=written)
    n = gl.arange(0, TILE, gl.SliceLayout(1, by_rope))
    c = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, by_rope))
    entry = tile * TILE + n
    written = ((entry < tokens) & (entry >= first))[:, None]
    async_copy.async_copy_global_to_shared(rope_s, base + n[:, None] * (LATENT + ROPE) + c[None, :], mask=written)


@gluon.jit
def _copy_query(q, row, block, queries, latent_s, rope_s, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Start copying a block of a row's query vectors; those the row does not have become zero."""
    LATENT: gl.constexpr = 512
    ROPE: gl.constexpr = 64
    by_latent: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    by_rope: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    base = q + row.to(gl.int64) * queries * (LATENT + ROPE)
    begin = block * BLOCK + unknown_zero()  # the addresses of one row's copies, kept for the next's, would spill
    m = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, by_latent))
    c = gl.arange(0, LATENT, gl.SliceLayout(0, by_latent))
    inside = (m < queries)[:, None]
    async_copy.async_copy_global_to_shared(latent_s, base + m[:, None] * (LATENT + ROPE) + c[None, :], mask=inside)
    m = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, by_rope))
    c = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, by_rope))
    inside = (m < queries)[:, None]
    async_copy.async_copy_global_to_shared(rope_s, base + m[:, None] * (LATENT + ROPE) + c[None, :], mask=inside)


@gluon.jit
def narrow_worker(
    q, cache, table, table_stride, record, share, SPLIT: gl.constexpr, TILE: gl.constexpr, OVERLAP: gl.constexpr
):
    """One worker's `Share`, whose record in the plan is at `record`: its units of one or several rows, for one block of
    queries. Waits, and lets the kernel after start, where `OVERLAP.early`."""
    BLOCK: gl.constexpr = TILE.queries
    TOKENS: gl.constexpr = TILE.tokens
    PAGE: gl.constexpr = SPLIT.page
    STAGES: gl.constexpr = OVERLAP.stages
    EARLY: gl.constexpr = OVERLAP.dependent and OVERLAP.early
    LATENT: gl.constexpr = 512
    ROPE: gl.constexpr = 64
    CHUNK: gl.constexpr = 64
    AHEAD: gl.constexpr = STAGES - 1
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    per_query: gl.constexpr = gl.SliceLayout(1, mma)
    per_column: gl.constexpr = gl.SliceLayout(0, mma)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])

    first = share.first
    row = gl.load(record)
    at = gl.load(record + 1)
    left = gl.load(record + 2)
    page = gl.load(record + 4)
    tokens = gl.load(record + 5)
    latent_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, LATENT], swizzled)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, ROPE], swizzled)
    q_latent_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, LATENT], swizzled)
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, ROPE], swizzled)
    m = share.block * BLOCK + gl.arange(0, BLOCK, per_query)
    n = gl.arange(0, TOKENS, per_column)
    lowest_unit = first // SPLIT.unit
    lowest_tile = lowest_unit * SPLIT.unit // TOKENS
    slot = 0  # of this row's first tile
    own = 0  # which of the two places has this row's query
    ahead = left < 0  # whether the row before has asked for both
    if EARLY:
        if left <= 0:
            wait_for_kernel_before()
            let_kernel_after_start()
    while left > 0:
        units = gl.where(tokens > first, (tokens + SPLIT.unit - 1) // SPLIT.unit - lowest_unit, 0)
        span = gl.where(units > 0, units + SPLIT.row_cost, 0)
        take = gl.minimum(left, span - at)
        begin = gl.maximum(at - SPLIT.row_cost, 0)
        end = at + take - SPLIT.row_cost
        pages = table + row.to(gl.int64) * table_stride
        last = gl.maximum(tokens - 1, 0) // PAGE
        start = (lowest_unit + begin) * SPLIT.unit // TOKENS
        stop = (gl.minimum((lowest_unit + end) * SPLIT.unit, tokens) + TOKENS - 1) // TOKENS
        stop = gl.where(end > begin, stop, start)

        # What the kernel before may have written is asked for after it has finished: the row's newest entries and the
        # query. Everything older, when `OVERLAP.early`, before.
        settled = 0
        if EARLY:
            settled = tokens - share.drafts - 1
        for s in gl.static_range(AHEAD):
            asked = ahead & (s == 0)
            if (start + s < stop) & ((start + s + 1) * TOKENS <= settled) & (not asked):
                if s > 0:
                    page = gl.load(pages + gl.minimum((start + s) * TOKENS // PAGE, last))
                to = (slot + s) % STAGES
                _copy_tile(
                    cache, page, start + s, tokens, first, latent_s.index(to), rope_s.index(to), TOKENS, PAGE, WARPS
                )
        if EARLY:
            wait_for_kernel_before()
            let_kernel_after_start()
        if (stop > start) & (not ahead):
            _copy_query(q, row, share.block, share.queries, q_latent_s.index(own), q_rope_s.index(own), BLOCK, WARPS)
        for s in gl.static_range(AHEAD):
            asked = ahead & (s == 0)
            if (start + s < stop) & ((start + s + 1) * TOKENS > settled) & (not asked):
                if s > 0:
                    page = gl.load(pages + gl.minimum((start + s) * TOKENS // PAGE, last))
                to = (slot + s) % STAGES
                _copy_tile(
                    cache, page, start + s, tokens, first, latent_s.index(to), rope_s.index(to), TOKENS, PAGE, WARPS
                )
            async_copy.commit_group()
        page = gl.load(pages + gl.minimum((start + AHEAD) * TOKENS // PAGE, last))
        # The next row, if this worker's share goes beyond this one, and whether it has entries there.
        goes_on = left > take
        next_tokens = gl.load(share.length + row + 1, mask=goes_on, other=0)
        next_page = gl.load(table + (row + 1).to(gl.int64) * table_stride + first // PAGE, mask=goes_on, other=0)
        follows = goes_on & (next_tokens > first) & (left - take > SPLIT.row_cost)

        # Tokens of the row after a query's; kept from row to row they would spill registers.
        back = share.drafts - (m + unknown_zero()) // share.heads
        bound = gl.minimum(tokens - back, tokens)
        top = gl.full([BLOCK], _LOWEST, gl.float32, per_query)
        weights = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
        sum_latent = gl.zeros([BLOCK, LATENT], gl.float32, mma)
        for tile in range(start, stop):
            stage = (slot + tile - start) % STAGES
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()  # the tile is there for all warps, and all of them are done with the one before
            here = tile + AHEAD < stop
            beyond = follows & (tile + AHEAD == stop)
            if here | beyond:
                free = (slot + tile - start + AHEAD) % STAGES
                _copy_tile(
                    cache,
                    gl.where(here, page, next_page),
                    gl.where(here, tile + AHEAD, lowest_tile),
                    gl.where(here, tokens, next_tokens),
                    first,
                    latent_s.index(free),
                    rope_s.index(free),
                    TOKENS,
                    PAGE,
                    WARPS,
                )
            if beyond:
                _copy_query(
                    q, row + 1, share.block, share.queries,
                    q_latent_s.index(1 - own), q_rope_s.index(1 - own), BLOCK, WARPS,
                )  # fmt: skip
            async_copy.commit_group()
            page = gl.load(pages + gl.minimum((tile + AHEAD + 1) * TOKENS // PAGE, last))
            keys = latent_s.index(stage)
            query = q_latent_s.index(own)
            # Two chains of products hide half of their latency: a warp has only TOKENS / WARPS columns.
            score = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
            other = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
            score = mma_v2(q_rope_s.index(own).load(left_of), rope_s.index(stage).permute((1, 0)).load(right_of), score)
            for j in gl.static_range(LATENT // CHUNK // 2):
                other = mma_v2(
                    query.slice(2 * j * CHUNK, CHUNK, dim=1).load(left_of),
                    keys.slice(2 * j * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right_of),
                    other,
                )
                score = mma_v2(
                    query.slice((2 * j + 1) * CHUNK, CHUNK, dim=1).load(left_of),
                    keys.slice((2 * j + 1) * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right_of),
                    score,
                )
            score = (score + other) * share.scale
            entry = tile * TOKENS + n
            seen = (entry[None, :] < bound[:, None]) & (entry >= first)[None, :]
            score = gl.where(seen, score, _MASKED)
            new_top = gl.maximum(top, gl.max(score, 1))
            shrink = gl.exp2(top - new_top)
            weight = gl.exp2(score - new_top[:, None])
            weights = weights * shrink[:, None] + weight
            sum_latent = sum_latent * shrink[:, None]
            top = new_top
            factor = gl.convert_layout(weight.to(gl.bfloat16), left_of)
            sum_latent = mma_v2(factor, keys.load(right_of), sum_latent)
        gl.thread_barrier()  # before the next row's copies

        if stop > start:
            total = gl.sum(weights, 1)
            divisor = gl.where(total > 0, total, 1.0)
            log = gl.where(total > 0, top + gl.log2(divisor), float("-inf"))
            # Through shared memory into whole rows, so that each lane writes 16 bytes at a time.
            result = gl.convert_layout((sum_latent / divisor[:, None]).to(gl.bfloat16), stored)
            m_stored = share.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, stored)) + unknown_zero()
            c = gl.arange(0, LATENT, gl.SliceLayout(0, stored))
            at_out = (m_stored[:, None] * LATENT + c[None, :]).to(gl.int64)
            inside = (m_stored < share.queries)[:, None]
            if (begin == 0) & (end == units):
                base = row.to(gl.int64) * share.queries
                to = share.out + base * LATENT + at_out
                gl.store(to, result.to(share.out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
                gl.store(share.lse + base + m, log * _LN2, mask=m < share.queries)
            else:
                base = gl.where(begin == 0, share.workers + share.worker, share.worker).to(gl.int64) * share.queries
                to = share.partial + base * LATENT + at_out
                gl.store(to, result.to(share.partial.dtype.element_ty), mask=inside, eviction_policy="evict_last")
                gl.store(share.partial_lse + base + m, log, mask=m < share.queries)
        ahead = follows & (stop - start >= AHEAD) & (stop > start)
        slot = (slot + stop - start) % STAGES
        own = 1 - own
        # If anything is left the row is finished: a worker's share ends inside its last row.
        left -= take
        row += 1
        at = at * 0
        tokens = next_tokens
        page = next_page


@gluon.jit(do_not_specialize=_INTS)
def attend_narrow(
    q,
    cache,
    table,
    length,
    out,
    lse,
    partial,
    partial_lse,
    plan,
    scale,
    first,
    table_stride,
    queries,
    drafts,
    heads,
    blocks,
    workers,
    SPLIT: gl.constexpr,
    TILE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """As `kernel.attend` without invariant mode, for 512 latent and 64 roped features in bfloat16. `OVERLAP.either`:
    works if the plan says that the row is short."""
    worker = gl.program_id(0) // blocks
    if OVERLAP.dependent and not OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    record = plan + worker * _WORKER
    works = True
    if OVERLAP.either:
        record = plan + gl.program_id(0) * _WORKER
        works = gl.load(record + _PARTS) > 1
    if works:
        share = Share(
            length=length,
            out=out,
            lse=lse,
            partial=partial,
            partial_lse=partial_lse,
            plan=plan,
            scale=scale,
            first=first,
            queries=queries,
            drafts=drafts,
            heads=heads,
            workers=workers,
            worker=worker,
            block=gl.program_id(0) % blocks,
        )
        narrow_worker(q, cache, table, table_stride, record, share, SPLIT, TILE, OVERLAP)
    else:
        if OVERLAP.dependent and OVERLAP.early:
            hand_on()
