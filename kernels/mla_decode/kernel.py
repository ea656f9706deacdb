"""Decode attention over the paged latent cache in portable Triton: plan the splits, attend, merge.

Flash-decoding (Dao et al. 2023) with the absorbed query of DeepSeek-V2 (section 2.1): a row's width x heads query
vectors share its cache, so they are the M of every product. Online softmax after Milakov and Gimelshein (2018), in
base 2.

Memory rules: page ids become int64 before they are multiplied; the page table is never read past a row's last page;
cache entries outside a row's bounds are loaded as zero, because 0 x NaN is NaN. Three kernels, none with atomics:
`schedule_splits` deals the KV blocks of all rows to the CTAs; `attend` writes a row's output, or a piece of it; `merge`
adds a row's pieces up in order and writes the rows nobody works on.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_entry import load_keys, load_latents
from kernels.mla_decode.schedule import CTA_FIELDS, MERGED_FIELD, PARTS_FIELD, ROW_FIELDS
from kernels.strands import FINE_ROUNDS

_MASKED = tl.constexpr(-1.0e33)
_LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: far above `_MASKED`, so that exp2(masked - lowest) is 0, and below every real score."""
_CTA = tl.constexpr(CTA_FIELDS)
_ROW = tl.constexpr(ROW_FIELDS)
_MERGED = tl.constexpr(MERGED_FIELD)
_LN2 = tl.constexpr(0.6931471805599453)
_FINE_ROUNDS = tl.constexpr(FINE_ROUNDS)
_PARTS = tl.constexpr(PARTS_FIELD)
_INTS = ["rows", "ctas", "first", "table_stride", "short", "parts", "queries", "drafts", "heads", "blocks"]


@triton.jit
def _features(rows, COUNT: tl.constexpr, LANES: tl.constexpr):
    """Mask of the features of some rows: theirs, and if there are fewer features than lanes only those that exist."""
    mask = rows[:, None]
    if COUNT != LANES:
        mask = mask & (tl.arange(0, LANES) < COUNT)[None, :]
    return mask


@triton.jit
def _pieces_before(block, SINGLE: tl.constexpr):
    """Number of a row's pieces that begin before a KV block of it. SINGLE: `Split.invariant`."""
    pairs = tl.minimum(tl.maximum(block - SINGLE, 0), (_FINE_ROUNDS - 1) * SINGLE)
    fours = tl.maximum(block - _FINE_ROUNDS * SINGLE, 0)
    return tl.minimum(block, SINGLE) + (pairs + 1) // 2 + (fours + 3) // 4


@triton.jit
def _piece_end(block, SINGLE: tl.constexpr):
    """The KV block behind the piece in which a KV block of a row lies."""
    last = tl.where(block < SINGLE, 0, tl.where(block < _FINE_ROUNDS * SINGLE, 1, 3))
    return (block | last) + 1


@triton.jit
def _whole_pieces(position, row, begin, span, first, rows, SPLIT: tl.constexpr):
    """Move flat positions on to where a piece begins."""
    ended = ((begin + span)[None, :] <= position[:, None]) & (row < rows)[None, :]
    here = row[None, :] == tl.sum(ended.to(tl.int32), 1)[:, None]
    start = tl.sum(tl.where(here, begin[None, :], 0), 1)
    most = tl.sum(tl.where(here, span[None, :], 0), 1)
    lowest = first // SPLIT.unit
    block = lowest + position - start
    # The end of the piece of the block before, unless that is another row's.
    moved = tl.where(position > start, _piece_end(block - 1, SPLIT.invariant) - lowest, 0)
    # Behind the last row nothing is moved.
    return tl.where(most > 0, start + tl.minimum(moved, most), position)


@triton.jit(do_not_specialize=_INTS)
def schedule_splits(
    length,
    table,
    metadata,
    rows,
    ctas,
    first,
    table_stride,
    short,
    parts,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the split-KV schedule. Each program writes the records of `CTAS` programs of the attention; the first one
    also lists the rows to merge and where their pieces will lie.

    A CTA has one record, unless no row has more than `short` tokens: then `parts` in turn, one for each narrow
    block, and as many CTAs fewer share the rows.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    tokens = tl.load(length + row, mask=row < rows, other=0)
    units = tl.where(tokens > first, tl.cdiv(tokens, SPLIT.unit) - first // SPLIT.unit, 0)
    span = tl.where(units > 0, units + SPLIT.row_cost, 0)
    total = tl.sum(span, 0)
    parts = tl.where(tl.max(tokens, 0) <= short, parts, 1)
    row_ctas = ctas // parts
    share = tl.maximum(tl.cdiv(total, row_ctas), LEAST)
    room = span
    if not SPLIT.invariant:
        # Shares that start where a row starts save partial results. When all rows are about equally long, slightly
        # larger shares make every row a whole number of shares, or every share a whole number of rows.
        longest = tl.max(span, 0)
        used = tl.sum((span > 0).to(tl.int32), 0)
        part = tl.maximum(tl.cdiv(longest, tl.maximum(row_ctas // tl.maximum(used, 1), 1)), LEAST)
        several = tl.cdiv(used, row_ctas)
        aligned = tl.where(used > row_ctas, longest * several, part)
        padded = tl.where(used > row_ctas, tl.where(span > 0, longest, 0), tl.cdiv(span, part) * part)
        if (aligned * 16 <= share * 17) & (tl.sum(padded, 0) <= aligned * row_ctas):
            share = aligned
            room = padded
    end = tl.cumsum(room, 0)
    begin = end - room

    index = tl.program_id(0) * CTAS + tl.arange(0, CTAS)
    position = index // parts * share
    behind = position + share
    if SPLIT.invariant:
        position = _whole_pieces(position, row, begin, span, first, rows, SPLIT)
        behind = _whole_pieces(behind, row, begin, span, first, rows, SPLIT)
    ended = (end[None, :] <= position[:, None]) & (row < rows)[None, :]
    mine = tl.sum(ended.to(tl.int32), 1)  # the first row that ends after the CTA's position
    here = row[None, :] == mine[:, None]
    offset = position - tl.sum(tl.where(here, begin[None, :], 0), 1)
    overlap = tl.minimum((begin + span)[None, :], behind[:, None]) - tl.maximum(begin[None, :], position[:, None])
    left = tl.sum(tl.maximum(overlap, 0), 1)
    unit = tl.maximum(offset - SPLIT.row_cost, 0) + first // SPLIT.unit
    tokens_here = tl.sum(tl.where(here, tokens[None, :], 0), 1)
    entry = tl.minimum((unit * SPLIT.unit) // SPLIT.page, tl.maximum(tl.cdiv(tokens_here, SPLIT.page) - 1, 0))
    alive = (index < ctas) & (left > 0)
    page = tl.load(table + mine.to(tl.int64) * table_stride + entry, mask=alive, other=0)
    record = metadata + index * _CTA
    inside = index < ctas
    lowest = first // SPLIT.unit
    if SPLIT.invariant:
        before = _pieces_before(lowest, SPLIT.invariant)
        pieces = tl.where(span > 0, _pieces_before(lowest + span, SPLIT.invariant) - before, 0)
        slot = tl.cumsum(pieces, 0) - pieces
        of_row = tl.sum(tl.where(here, slot[None, :], 0), 1)
        position = of_row + _pieces_before(lowest + offset, SPLIT.invariant) - before
    tl.store(record, mine, mask=inside)
    tl.store(record + 1, offset, mask=inside)
    tl.store(record + 2, left, mask=inside)
    tl.store(record + 3, position, mask=inside)
    tl.store(record + 4, page, mask=inside)
    tl.store(record + 5, tokens_here, mask=inside)
    tl.store(record + _PARTS, parts, mask=inside)

    if tl.program_id(0) == 0:
        if SPLIT.invariant:
            later = slot + 1
        else:
            head = (begin + SPLIT.row_cost) // share
            pieces = tl.where(units > 0, (begin + tl.maximum(span, 1) - 1) // share - head + 1, 0)
            slot = ctas + head
            later = head + 1
        about = metadata + ctas * _CTA + row * _ROW
        tl.store(about, slot, mask=row < rows)
        tl.store(about + 1, later, mask=row < rows)
        tl.store(about + 2, pieces, mask=row < rows)
        listed = (row < rows) & ((pieces != 1) | (SPLIT.invariant > 0))
        rank = tl.cumsum(listed.to(tl.int32), 0)
        tl.store(metadata + _MERGED, tl.max(rank, 0))
        tl.store(metadata + ctas * _CTA + (rank - 1) * _ROW + 3, row, mask=listed)


@triton.jit(do_not_specialize=_INTS)
def attend(
    q,
    cache,
    table,
    length,
    whole,
    pieces,
    metadata,
    seen_by,
    scale,
    first,
    table_stride,
    queries,
    drafts,
    heads,
    blocks,
    ctas,
    FEATURES: tl.constexpr,
    ENTRY: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One CTA: its KV blocks of one or several rows, for one block of queries. `scale` includes log2(e), `drafts` is
    the tokens of a row less one. Results of rows that it has alone are those of `whole`, others `pieces` (`Results`).
    `SPLIT.own`: `seen_by` says what each token sees, and `first` is 0."""
    BLOCK: tl.constexpr = TILE.queries
    TOKENS: tl.constexpr = TILE.tokens
    LATENT: tl.constexpr = FEATURES.latent
    LATENT_LANES: tl.constexpr = FEATURES.latent_lanes
    VECTOR: tl.constexpr = LATENT + FEATURES.rope
    APART: tl.constexpr = ENTRY.size if ENTRY.fp8 else VECTOR
    cta = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    m = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, TOKENS)
    c = tl.arange(0, LATENT_LANES)
    r = tl.arange(0, FEATURES.rope_lanes)
    inside = m < queries
    has_latent = _features(inside, LATENT, LATENT_LANES)
    has_rope = _features(inside, FEATURES.rope, FEATURES.rope_lanes)
    back = drafts - m // heads  # tokens of the row after this one
    row = tl.load(metadata + cta * _CTA)
    at = tl.load(metadata + cta * _CTA + 1)
    left = tl.load(metadata + cta * _CTA + 2)
    position = tl.load(metadata + cta * _CTA + 3)
    while left > 0:
        tokens = tl.load(length + row)
        units = tl.where(tokens > first, tl.cdiv(tokens, SPLIT.unit) - first // SPLIT.unit, 0)
        span = tl.where(units > 0, units + SPLIT.row_cost, 0)
        take = tl.minimum(left, span - at)
        if SPLIT.invariant:
            block = first // SPLIT.unit + at
            take = tl.minimum(take, _piece_end(block, SPLIT.invariant) - block)
        begin = tl.maximum(at - SPLIT.row_cost, 0)
        end = at + take - SPLIT.row_cost
        if end > begin:
            vector = (row.to(tl.int64) * queries + m)[:, None]
            # .cg: a dependent launch may find lines of an earlier layer in L1.
            at_q = q + vector * VECTOR
            q_latent = tl.load(at_q + c[None, :], mask=has_latent, other=0.0, cache_modifier=".cg")
            q_rope = tl.load(at_q + LATENT + r[None, :], mask=has_rope, other=0.0, cache_modifier=".cg")
            bound = tl.minimum(tokens - back, tokens)
            begin_entry = first
            if SPLIT.own:
                own = seen_by + row.to(tl.int64) * (drafts + 2)
                bound = tl.load(own + m // heads, mask=inside, other=0)
                begin_entry = tl.load(own + drafts + 1)
            top = tl.full((BLOCK,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            sum_latent = tl.zeros((BLOCK, LATENT_LANES), tl.float32)
            pages = table + row.to(tl.int64) * table_stride
            last = (tokens - 1) // SPLIT.page
            start = (first // SPLIT.unit + begin) * SPLIT.unit // TOKENS
            stop = tl.minimum((first // SPLIT.unit + end) * SPLIT.unit, tokens)
            page = tl.load(pages + start * TOKENS // SPLIT.page)
            for tile in range(start, tl.cdiv(stop, TOKENS)):
                next_page = tl.load(pages + tl.minimum((tile + 1) * TOKENS // SPLIT.page, last))
                entry = tile * TOKENS + n
                base = cache + (page.to(tl.int64) * SPLIT.page + tile * TOKENS % SPLIT.page) * APART
                written = (entry < tokens) & (entry >= begin_entry)
                latent = load_latents(base + n * APART, written, q.dtype.element_ty, LATENT, LATENT_LANES, ENTRY)
                rope = load_keys(
                    base + n * APART, written, q.dtype.element_ty, LATENT, FEATURES.rope, FEATURES.rope_lanes, ENTRY
                )
                page = next_page
                score = tl.dot(q_latent, tl.trans(latent), input_precision=FEATURES.precision)
                score = tl.dot(q_rope, tl.trans(rope), score, input_precision=FEATURES.precision) * scale
                seen = (entry[None, :] < bound[:, None]) & (entry >= begin_entry)[None, :]
                score = tl.where(seen, score, _MASKED)
                new_top = tl.maximum(top, tl.max(score, 1))
                shrink = tl.exp2(top - new_top)
                weight = tl.exp2(score - new_top[:, None])
                total = total * shrink + tl.sum(weight, 1)
                sum_latent = sum_latent * shrink[:, None]
                top = new_top
                sum_latent = tl.dot(weight.to(latent.dtype), latent, sum_latent, input_precision=FEATURES.precision)
            divisor = tl.where(total > 0, total, 1.0)
            sum_latent = sum_latent / divisor[:, None]
            log = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
            alone = (begin == 0) & (end == units)
            if SPLIT.invariant:
                # Never: there all rows have pieces. Where the compiler knows that, FP8 entries spill registers.
                alone = units < 0
            if alone:
                at_out = whole.latent + vector * LATENT + c[None, :]
                tl.store(at_out, sum_latent.to(whole.latent.dtype.element_ty), mask=has_latent)
                tl.store(whole.lse + row.to(tl.int64) * queries + m, log * _LN2, mask=inside)
            else:
                slot = tl.where(begin == 0, ctas + cta, cta)
                if SPLIT.invariant:
                    slot = position
                piece = (slot.to(tl.int64) * queries + m)[:, None]
                at_out = pieces.latent + piece * LATENT + c[None, :]
                tl.store(at_out, sum_latent.to(pieces.latent.dtype.element_ty), mask=has_latent)
                tl.store(pieces.lse + slot.to(tl.int64) * queries + m, log, mask=inside)
            position += 1  # in invariant mode the slot of the next piece
        left -= take
        at += take
        done = at >= span
        row = tl.where(done, row + 1, row)
        at = tl.where(done, 0, at)


@triton.jit(do_not_specialize=_INTS)
def merge(
    partial,
    partial_lse,
    metadata,
    out,
    lse,
    queries,
    ctas,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    QUERIES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add up the pieces of `QUERIES` queries of listed rows, in order, for `COLUMNS` columns. Grid: rows, queries,
    columns."""
    # The plan is older than the attention, which let this kernel start only after its own wait (of its two kernels the
    # one that works did): no need to wait for it.
    count = tl.load(metadata + _MERGED)
    rows = metadata + ctas * _CTA
    row = tl.load(rows + tl.program_id(0) * _ROW + 3, mask=tl.program_id(0) < count, other=0)
    slot = tl.load(rows + row * _ROW)
    later = tl.load(rows + row * _ROW + 1)
    pieces = tl.load(rows + row * _ROW + 2)
    if DEPENDENT:
        gdc_launch_dependents()  # what comes after may ask for its weights while the attention still runs
        gdc_wait()
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = query < queries
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sum_latent = tl.zeros((QUERIES, COLUMNS), tl.float32)
        # [queries, pieces, columns] in this order, so that the layout keeps the pieces of a column within a warp.
        for start in range(0, pieces, PIECES):
            piece = start + tl.arange(0, PIECES)
            at = tl.where(piece == 0, slot, later + piece - 1).to(tl.int64)[None, :] * queries + query[:, None]
            there = (piece < pieces)[None, :] & inside[:, None]
            # .cg: a dependent launch may find lines of an earlier layer in L1.
            log = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            piece_at = partial + at[:, :, None] * LATENT + c[None, None, :]
            part = tl.load(piece_at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, tl.max(log, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(log - base[:, None])
            total = total * shrink + tl.sum(weight, 1)
            sum_latent = sum_latent * shrink[:, None] + tl.sum(part.to(tl.float32) * weight[:, :, None], 1)
            top = new_top
        divisor = tl.where(total > 0, total, 1.0)
        sum_latent = sum_latent / divisor[:, None]
        vector = row.to(tl.int64) * queries + query
        tl.store(out + vector[:, None] * LATENT + c[None, :], sum_latent.to(out.dtype.element_ty), mask=inside[:, None])
        if tl.program_id(2) == 0:
            log = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
            tl.store(lse + vector, log * _LN2, mask=inside)
        if index + tl.num_programs(0) < count:
            row = tl.load(rows + (index + tl.num_programs(0)) * _ROW + 3)
            slot = tl.load(rows + row * _ROW)
            later = tl.load(rows + row * _ROW + 1)
            pieces = tl.load(rows + row * _ROW + 2)
