"""Prompt look-up: what followed the newest tokens of a row where they last stood before (Saxena, "Prompt Lookup
Decoding", 2023). Text repeats itself, most of all answers that quote their prompt.

Of the newest tokens, `MOST` of them down to `LEAST`, the most are looked for that stood before in the row's own prompt
and output; of several places the last. Drafts are the tokens behind that place. Where those reach the row's end they
go on with the first of them: a row that ends in a period goes on with it.

Where nothing is found drafts are token 0. Verification is exact, so any id of the vocabulary would do, and 0 is in
every one.

Shape legend: S slots, R rows, X most tokens of a row, K most drafts of a slot, C blocks of `BLOCK` places.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST: Final = 2
"""Fewest newest tokens that are looked for: a single one stands nearly everywhere, and says little."""
MOST: Final = 4
"""Most of them."""
BLOCK: Final = 2048
"""Places that one program looks at."""
_LEAST, _MOST = tl.constexpr(LEAST), tl.constexpr(MOST)
_PLACES = tl.constexpr(2**32)
"""Number of places, more than a row has: a match is ranked by count * this + place, so the most tokens win, then the
last place."""


def blocks(tokens: int) -> int:
    """C, of rows of so many tokens."""
    return -(-tokens // BLOCK)


def propose(
    token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, found_RC: Tensor
) -> None:
    """Write the first `drafts` columns of `draft_SK` (int64) in the rows' slots; a slot of -1 has none.

    `token_SX` (int32): the rows' tokens, of which those up to position `newest_S` (int64) count. `found_RC` (int64):
    memory for what is found on the way.
    """
    assert found_RC.shape == (slot_R.shape[0], blocks(token_SX.shape[1]))
    assert 0 < drafts <= draft_SK.shape[1]
    if not slot_R.is_cuda:
        propose_reference(token_SX, newest_S, slot_R, draft_SK, drafts)
        return
    launch_propose(token_SX, newest_S, slot_R, draft_SK, drafts, found_RC)


def propose_reference(token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int) -> None:
    """`propose` in plain torch."""
    for slot in slot_R[slot_R >= 0].tolist():
        newest = int(newest_S[slot])
        row_X = token_SX[slot, : newest + 1]
        draft_SK[slot, :drafts] = 0
        for count in range(min(MOST, newest), LEAST - 1, -1):
            # Windows of `count` tokens, but for the newest itself.
            same = (row_X.unfold(0, count, 1)[:-1] == row_X[-count:]).all(1).nonzero()
            if len(same):
                behind = int(same[-1]) + count
                index_K = behind + torch.arange(drafts, device=token_SX.device) % (newest + 1 - behind)
                draft_SK[slot, :drafts] = row_X[index_K].to(torch.int64)
                break


def launch_propose(
    token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, found_RC: Tensor
) -> None:
    """`propose` as Triton kernels."""
    rows, parts = found_RC.shape
    tokens = token_SX.shape[1]
    find_kernel[(rows, parts)](token_SX, newest_S, slot_R, found_RC, tokens, BLOCK=BLOCK, num_warps=4)
    take_kernel[(rows,)](
        token_SX,
        newest_S,
        slot_R,
        found_RC,
        draft_SK,
        tokens,
        parts,
        draft_SK.shape[1],
        drafts,
        PARTS=triton.next_power_of_2(parts),
        LANES=triton.next_power_of_2(draft_SK.shape[1]),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["tokens"])
def find_kernel(token_state, newest_state, slots, found_out, tokens, BLOCK: tl.constexpr):
    """Programs (row, block), each of which finds its best place. No atomics, and nothing read from padded rows. A place
    is the position of the last token of what stood before."""
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
def take_kernel(
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
    """Take the best of the blocks' places and write the drafts; one program per row."""
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
