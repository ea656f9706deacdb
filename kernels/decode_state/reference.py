"""Plain torch versions of the bookkeeping of a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, WHOLE, Shards

if TYPE_CHECKING:
    from kernels.decode_state import SlotTensors


def cache_slots(page_SP: Tensor, slot_T: Tensor, position_T: Tensor, shards: Shards) -> Tensor:
    """Flat cache index of (slot, position) pairs of any shape: page * 64 + offset; in the null page where another shard
    owns the page."""
    page_T = page_SP[slot_T, position_T // PAGE_TOKENS].to(torch.int64)
    if shards.count > 1:
        page_T = own_pages(page_T, shards)
    return page_T * PAGE_TOKENS + position_T % PAGE_TOKENS


def own_pages(page_T: Tensor, shards: Shards) -> Tensor:
    """Local ids of pages that this shard owns, of their global ids; the null page for all others."""
    rest_T = page_T + (shards.count - 1)
    return torch.where(rest_T % shards.count == shards.index, rest_T // shards.count, NULL_PAGE)


def feed(
    state: SlotTensors,
    slot_R: Tensor,
    token_RW: Tensor,
    position_RW: Tensor,
    cache_slot_RW: Tensor,
    length_R: Tensor,
    page_RP: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """See the launcher."""
    width = token_RW.shape[1]
    live_R1 = (slot_R >= 0).unsqueeze(1)
    token_RW[:, :1] = state.last_S[slot_R].unsqueeze(1)
    token_RW[:, 1:] = state.draft_SK[slot_R, : width - 1]
    token_RW.mul_(live_R1)
    window_W = torch.arange(width, device=slot_R.device)
    position_RW.copy_((state.length_S[slot_R].unsqueeze(1) + window_W) * live_R1)
    null_RW = NULL_PAGE * PAGE_TOKENS + position_RW % PAGE_TOKENS
    own_RW = cache_slots(state.page_SP, slot_R.unsqueeze(1), position_RW, shards)
    cache_slot_RW.copy_(torch.where(live_R1, own_RW, null_RW))
    length_R.copy_((position_RW[:, -1] + 1) * live_R1.squeeze(1))
    page_RP.copy_(torch.where(live_R1, state.page_SP[slot_R], NULL_PAGE))


def advance(
    state: SlotTensors,
    slot_R: Tensor,
    token_RW: Tensor,
    accepted_R: Tensor,
    position_RW: Tensor,
    cache_slot_RW: Tensor,
    length_R: Tensor,
    newest_R: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """See the launcher."""
    width = token_RW.shape[1]
    live_R = slot_R >= 0
    # Boolean indexing waits for a GPU; that is what the kernel is for.
    slot_L = slot_R[live_R]
    state.length_S[slot_L] += accepted_R[live_R] + 1
    state.last_S[slot_L] = token_RW.gather(1, accepted_R.unsqueeze(1)).squeeze(1)[live_R]
    position_RW.add_(live_R.unsqueeze(1))
    if state.token_SX.shape[1]:
        state.token_SX[slot_L.unsqueeze(1), position_RW[live_R]] = token_RW[live_R].to(torch.int32)
    null_RW = NULL_PAGE * PAGE_TOKENS + position_RW % PAGE_TOKENS
    own_RW = cache_slots(state.page_SP, slot_R.unsqueeze(1), position_RW, shards)
    cache_slot_RW.copy_(torch.where(live_R.unsqueeze(1), own_RW, null_RW))
    length_R.add_(live_R)
    newest_R.copy_(torch.arange(len(slot_R), device=slot_R.device) * width + accepted_R)


def feed_draft(
    state: SlotTensors,
    slot_R: Tensor,
    token_R: Tensor,
    index: int,
    position_R: Tensor,
    cache_slot_R: Tensor,
    length_R: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """See the launcher."""
    live_R = slot_R >= 0
    slot_L = slot_R[live_R]
    state.draft_SK[slot_L, index] = token_R[live_R]
    position_R.copy_((state.length_S[slot_R] + index + 1) * live_R)
    null_R = NULL_PAGE * PAGE_TOKENS + position_R % PAGE_TOKENS
    cache_slot_R.copy_(torch.where(live_R, cache_slots(state.page_SP, slot_R, position_R, shards), null_R))
    length_R.copy_((position_R + 1) * live_R)
