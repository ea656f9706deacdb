"""Prompt look-up in Triton: a program per row and block of places finds its best place, then one per row takes the best
of those and writes the drafts. No atomics, and nothing read from padded rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ngram.size import LEAST, MOST

_LEAST, _MOST = tl.constexpr(LEAST), tl.constexpr(MOST)
_PLACES = tl.constexpr(2**32)
"""More than a row has places: what is found is count * this + place, so the most tokens win, then the last place."""


@triton.jit(do_not_specialize=["tokens"])
def find(token_state, newest_state, slots, found_out, tokens, BLOCK: tl.constexpr):
    """Programs (row, block). A place is the position of the last token of what stood before."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    live = slot >= 0
    newest = tl.load(newest_state + slot, mask=live, other=0)
    at = found_out + row.to(tl.int64) * tl.num_programs(1) + part
    found = tl.zeros((), tl.int64)
    if part.to(tl.int64) * BLOCK < newest:
        own = token_state + slot * tokens
        place = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        same = place < newest
        count = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(_MOST):
            wanted = tl.load(own + newest - back, mask=newest >= back, other=-1)
            token = tl.load(own + place - back, mask=same & (place >= back), other=-2)
            same = same & (token == wanted)
            count += same.to(tl.int64)
        found = tl.max(tl.where(count >= _LEAST, count * _PLACES + place, 0), 0)
    tl.store(at, found)


@triton.jit(do_not_specialize=["tokens", "parts", "room", "drafts"])
def take(
    token_state,
    newest_state,
    slots,
    found_in,
    draft_state,
    tokens,
    parts,
    room,
    drafts,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    live = slot >= 0
    part = tl.arange(0, PARTS)
    found = tl.max(tl.load(found_in + row.to(tl.int64) * parts + part, mask=part < parts, other=0), 0)
    newest = tl.load(newest_state + slot, mask=live, other=0)
    behind = found % _PLACES + 1
    lane = tl.arange(0, LANES)
    inside = live & (lane < drafts)
    source = behind + lane % tl.maximum(newest + 1 - behind, 1)
    token = tl.load(token_state + slot * tokens + source, mask=inside & (found > 0), other=0)
    tl.store(draft_state + slot * room + lane, token.to(tl.int64), mask=inside)
