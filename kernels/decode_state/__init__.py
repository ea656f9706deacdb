"""The bookkeeping of a decode step on the device: where its tokens come from and go to, how many of its drafts are
accepted, and what the next step finds.

State of every slot lives in tensors of S + 1 rows; the last row belongs to nobody. A slot of -1 marks a padded row: it
feeds token 0 at position 0, writes into the null page, has length 0, and changes no state.

Page tables have global ids. Where ranks share out the cache (`shards`), the entry of a token is written by the owner of
its page, at the local id; the others write it into their null page.

A decode row feeds its last token and X drafts, and the target model's token is sampled at each of the W = X + 1
positions. Draft i is accepted if all drafts before it are and it equals the target token at its position, the token
that would have been sampled there without drafts. The row emits its target tokens 0 ... accepted.

Noise is a function of the position alone, so the emitted tokens follow the target's distribution p whatever was
drafted. A draft that is sampled with the same noise from q agrees with probability (1 - d) / (1 + d) or more, where d
is the total variation distance of p and q: a Gumbel coupling (Daliri, Musco, Suresh, arXiv:2408.07978), not rejection
sampling.

Shape legend: S slots, R rows, D decode rows, W width, X = W - 1 drafts per row, T = R * W, P most pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.decode_state import kernel
from kernels.page import NULL_PAGE, PAGE_TOKENS, WHOLE, Shards

_NO_LIMIT = 2**62
_COLUMNS = 256
"""Page-table entries a program copies."""


@dataclass(frozen=True)
class SlotTensors:
    """State of the slots. All int64 but the page table and the tokens."""

    length_S: Tensor
    """Cache entries of accepted tokens; also the position of the last token, which is not cached yet."""
    last_S: Tensor
    """The newest token, sampled but not yet fed."""
    draft_SK: Tensor
    """Drafts that follow the last token."""
    page_SP: Tensor
    """int32 page table, the null page where nothing is granted."""
    token_SX: Tensor
    """int32: the row's tokens by position, up to the newest. X is 0 where nobody reads them."""
    unlikely_S: Tensor
    """Of the last places of `draft_SK`, as many as the next step does not verify. Nothing here reads them: drafts there
    are fed as others are, and whoever verifies them accepts none."""

    @staticmethod
    def allocate(
        slots: int, drafts: int, pages_per_row: int, device: torch.device, *, tokens: bool = False
    ) -> SlotTensors:
        """State of `slots` empty slots, and the row of nobody. `tokens`: whether rows' tokens are kept."""
        return SlotTensors(
            length_S=torch.zeros(slots + 1, dtype=torch.int64, device=device),
            last_S=torch.zeros(slots + 1, dtype=torch.int64, device=device),
            draft_SK=torch.zeros(slots + 1, max(drafts, 1), dtype=torch.int64, device=device),
            page_SP=torch.zeros(slots + 1, pages_per_row, dtype=torch.int32, device=device),
            token_SX=torch.zeros(slots + 1, pages_per_row * PAGE_TOKENS * tokens, dtype=torch.int32, device=device),
            unlikely_S=torch.zeros(slots + 1, dtype=torch.int64, device=device),
        )


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
    """Prepare the tokens that the rows feed: the last token, then W - 1 drafts, at positions length ... length + W - 1.

    Writes `token_RW`, `position_RW`, `cache_slot_RW` (int64: page * 64 + offset), `length_R` (int32: entries the last
    of a row's tokens may see, itself included; 0 for a padded row) and `page_RP` (int32, the rows' page tables).
    """
    if not slot_R.is_cuda:
        feed_reference(state, slot_R, token_RW, position_RW, cache_slot_RW, length_R, page_RP, shards)
        return
    launch_feed(state, slot_R, token_RW, position_RW, cache_slot_RW, length_R, page_RP, shards)


def accept_drafts(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None = None,
    fault_1: Tensor | None = None,
    faults_1: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Write the number of leading drafts that are accepted, 0 ... X, to `accepted_D` (int64 [D]).

    `target_DW`, `draft_DX`: int64 token ids. An id that is no token (below 0, or not below `vocab`) is never accepted,
    even if both sides agree on it, and with `vocab` given adds 1 to `fault_1` (int64 [1]) wherever it occurs.
    `faults_1` (int64 [1], goes with `fault_1`): what `fault_1` is then. `dependent`: programmatic dependent launch
    (compute capability 9.0 and above), which is always safe.
    """
    rows, width = target_DW.shape
    assert draft_DX.shape == (rows, width - 1)
    assert accepted_D.shape == (rows,)
    if target_DW.is_cuda:
        launch_accept_drafts(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1, dependent=dependent)
        return
    accept_drafts_reference(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1)


def accept_drafts_reference(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None,
    fault_1: Tensor | None,
    faults_1: Tensor | None = None,
) -> None:
    """`accept_drafts` in plain torch."""
    before_DX = target_DW[:, :-1]
    accepted_DX = (draft_DX == before_DX) & (draft_DX >= 0)
    if vocab is not None:
        accepted_DX &= draft_DX < vocab
        if fault_1 is not None:
            tokens = torch.cat((target_DW, draft_DX), dim=1)
            fault_1.add_(((tokens < 0) | (tokens >= vocab)).sum())
            if faults_1 is not None:
                faults_1.copy_(fault_1)
    accepted_D.copy_(accepted_DX.to(torch.int64).cumprod(dim=1).sum(dim=1))


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
    """Take the verified tokens into the state, and turn the step's positions into those of the draft layer's pass.

    `token_RW`: the target's tokens; 0 ... `accepted_R` of each row are new. length += accepted + 1, last = the last of
    them; where tokens are kept they follow the row's, and what is behind the newest means nothing. `position_RW`,
    `cache_slot_RW` and `length_R` (in and out) move one entry on: the draft layer's entry j pairs the token at j with
    the hidden state before it. `newest_R`: int64 index into the T tokens of each row's newest.
    """
    if not slot_R.is_cuda:
        advance_reference(state, slot_R, token_RW, accepted_R, position_RW, cache_slot_RW, length_R, newest_R, shards)
        return
    launch_advance(state, slot_R, token_RW, accepted_R, position_RW, cache_slot_RW, length_R, newest_R, shards)


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
    """Store draft number `index` of every row, and say where the draft layer's next pass puts it.

    After `advance` the draft stands at position length + index + 1; `length_R` (int32) is what it may see in the draft
    layer's cache, itself included.
    """
    if not slot_R.is_cuda:
        feed_draft_reference(state, slot_R, token_R, index, position_R, cache_slot_R, length_R, shards)
        return
    launch_feed_draft(state, slot_R, token_R, index, position_R, cache_slot_R, length_R, shards)


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


def feed_reference(
    state: SlotTensors,
    slot_R: Tensor,
    token_RW: Tensor,
    position_RW: Tensor,
    cache_slot_RW: Tensor,
    length_R: Tensor,
    page_RP: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """`feed` in plain torch."""
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


def advance_reference(
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
    """`advance` in plain torch."""
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


def feed_draft_reference(
    state: SlotTensors,
    slot_R: Tensor,
    token_R: Tensor,
    index: int,
    position_R: Tensor,
    cache_slot_R: Tensor,
    length_R: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """`feed_draft` in plain torch."""
    live_R = slot_R >= 0
    slot_L = slot_R[live_R]
    state.draft_SK[slot_L, index] = token_R[live_R]
    position_R.copy_((state.length_S[slot_R] + index + 1) * live_R)
    null_R = NULL_PAGE * PAGE_TOKENS + position_R % PAGE_TOKENS
    cache_slot_R.copy_(torch.where(live_R, cache_slots(state.page_SP, slot_R, position_R, shards), null_R))
    length_R.copy_((position_R + 1) * live_R)


def launch_feed(
    state: SlotTensors,
    slot_R: Tensor,
    token_RW: Tensor,
    position_RW: Tensor,
    cache_slot_RW: Tensor,
    length_R: Tensor,
    page_RP: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """`feed` as a Triton kernel."""
    rows, width = token_RW.shape
    pages = page_RP.shape[1]
    kernel.feed[(rows, triton.cdiv(pages, _COLUMNS))](
        state.length_S,
        state.last_S,
        state.draft_SK,
        state.page_SP,
        slot_R,
        token_RW,
        position_RW,
        cache_slot_RW,
        length_R,
        page_RP,
        pages,
        state.draft_SK.shape[1],
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        COLUMNS=_COLUMNS,
        SHARDS=shards.count,
        SHARD=shards.index,
        num_warps=1,
    )


def launch_accept_drafts(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None,
    fault_1: Tensor | None,
    faults_1: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """`accept_drafts` as a Triton kernel."""
    rows, width = target_DW.shape
    if not rows:
        return
    lanes = triton.next_power_of_2(width)
    block = 128 // min(lanes, 128)
    if faults_1 is not None:  # one program, which knows all faults
        block = max(block, triton.next_power_of_2(rows))
    kernel.accept_drafts_kernel[(triton.cdiv(rows, block),)](
        target_DW,
        draft_DX if width > 1 else target_DW,
        accepted_D,
        accepted_D if fault_1 is None else fault_1,
        accepted_D if faults_1 is None else faults_1,
        rows,
        target_DW.stride(0),
        draft_DX.stride(0),
        _NO_LIMIT if vocab is None else vocab,
        DRAFTS=width - 1,
        LANES=lanes,
        ROWS=block,
        CHECKED=vocab is not None and fault_1 is not None,
        TOLD=faults_1 is not None,
        DEPENDENT=dependent,
        num_warps=min(max(block * lanes // 256, 4), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


def launch_advance(
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
    """`advance` as a Triton kernel."""
    rows, width = token_RW.shape
    kernel.advance[(rows,)](
        state.length_S,
        state.last_S,
        state.page_SP,
        slot_R,
        token_RW,
        accepted_R,
        position_RW,
        cache_slot_RW,
        length_R,
        newest_R,
        state.token_SX,
        state.page_SP.shape[1],
        state.token_SX.shape[1],
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        KEEPS_TOKENS=state.token_SX.shape[1] > 0,
        SHARDS=shards.count,
        SHARD=shards.index,
        num_warps=1,
    )


def launch_feed_draft(
    state: SlotTensors,
    slot_R: Tensor,
    token_R: Tensor,
    index: int,
    position_R: Tensor,
    cache_slot_R: Tensor,
    length_R: Tensor,
    shards: Shards = WHOLE,
) -> None:
    """`feed_draft` as a Triton kernel."""
    kernel.feed_draft[(slot_R.shape[0],)](
        state.length_S,
        state.draft_SK,
        state.page_SP,
        slot_R,
        token_R,
        index,
        position_R,
        cache_slot_R,
        length_R,
        state.page_SP.shape[1],
        state.draft_SK.shape[1],
        SHARDS=shards.count,
        SHARD=shards.index,
        num_warps=1,
    )
