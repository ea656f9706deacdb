"""Reference of `kernels.mla_decode` in plain torch: gathers the latent of the live pages, then dense attention.

It reads the longest length on the host, so it cannot be captured in a graph.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from kernels import deterministic_math
from kernels.latent_entry import entries as latent_entries
from kernels.linear import reference as linear
from kernels.own_entries import OwnEntries
from kernels.page import NULL_PAGE, PAGE_TOKENS, PIECE_PAGES, pages_for
from kernels.strands import STRANDS, merge_strands

GATHER_ELEMENTS: Final = 1 << 26
"""Cache elements gathered at once; more rows than fit are taken in groups, so memory stays bounded."""


def mla_decode(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    scale: float,
    first: int,
    own: OwnEntries | None = None,
) -> None:
    """See `kernels.mla_decode.mla_decode`."""
    longest = int(length_R.max()) if length_R.numel() else 0
    if longest <= first:
        out_RWHL.zero_()
        lse_RWH.fill_(-torch.inf)
        return
    rows = q_RWHC.shape[0]
    step = max(1, GATHER_ELEMENTS // (pages_for(longest) * PAGE_TOKENS * q_RWHC.shape[-1]))
    ragged = rows > 1  # a row that is alone in the call is as long as the longest: nothing of it needs masking
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _decode_rows(
            q_RWHC[part],
            cache_PKC,
            page_RP[part],
            length_R[part],
            out_RWHL[part],
            lse_RWH[part],
            longest,
            ragged,
            scale,
            first,
            None if own is None else (own.bound_RW[part], own.first_R[part]),
        )


def _decode_rows(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    longest: int,
    ragged: bool,
    scale: float,
    first: int,
    own: tuple[Tensor, Tensor] | None,
) -> None:
    rows, width, heads, features = q_RWHC.shape
    latent, entries = out_RWHL.shape[-1], longest - first
    compute = torch.promote_types(q_RWHC.dtype, torch.float32)
    entry_S = torch.arange(first, longest, device=length_R.device)
    length_R1 = length_R.unsqueeze(1)

    # Table entries past the length are arbitrary, and so is what the cache holds past it: NaN times a zero probability
    # would still be NaN, hence both are replaced before they are used.
    page_RP = page_RP[:, : pages_for(longest)]
    if ragged:
        begin_P = torch.arange(0, longest, PAGE_TOKENS, device=length_R.device)
        page_RP = torch.where(begin_P < length_R1, page_RP, NULL_PAGE)
    found_RSC = cache_PKC[page_RP].flatten(1, 2)[:, first:longest]  # a copy
    cache_RSC = latent_entries(found_RSC, latent, features - latent, q_RWHC.dtype).to(compute)
    if ragged:
        cache_RSC.masked_fill_((entry_S >= length_R1).unsqueeze(-1), 0.0)
    before_RS = None
    if own is not None:
        before_RS = entry_S < own[1].unsqueeze(1)
        cache_RSC.masked_fill_(before_RS.unsqueeze(-1), 0.0)

    q_RXC = q_RWHC.reshape(rows, width * heads, -1).to(compute)
    score_RXS = torch.bmm(q_RXC, cache_RSC.transpose(1, 2)).mul_(scale)
    score_RWHS = score_RXS.view(rows, width, heads, entries)
    if own is not None and before_RS is not None:
        unseen_RWS = (entry_S >= own[0].unsqueeze(-1)) | before_RS.unsqueeze(1)
        score_RWHS.masked_fill_(unseen_RWS.unsqueeze(2), -torch.inf)
    elif ragged or width > 1:
        back_W = torch.arange(width - 1, -1, -1, device=length_R.device)
        unseen_RWS = entry_S >= (length_R1 - back_W).unsqueeze(-1)
        score_RWHS.masked_fill_(unseen_RWS.unsqueeze(2), -torch.inf)
    lse_RWH.copy_(torch.logsumexp(score_RWHS, dim=-1))
    # A token that sees nothing has LSE -inf; a finite shift turns its weights into exp(-inf) = 0 instead of NaN.
    shift_RWH1 = lse_RWH.masked_fill(lse_RWH == -torch.inf, 0.0).unsqueeze(-1)
    weight_RXS = score_RWHS.sub_(shift_RWH1).exp_().view(rows, width * heads, entries)
    out_RWHL.copy_(torch.bmm(weight_RXS, cache_RSC[..., :latent]).view_as(out_RWHL))


def invariant_mla_decode(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    scale: float,
    first: int,
    own: OwnEntries | None = None,
    shards: int = 1,
) -> None:
    """The same, each query's sums in an order that depends on what it sees alone: whole pages from entry 0 on, and
    pieces of these as `kernels.strands` has them. With `own` the result is a part: its log-sum-exp is to the base 2."""
    compute = torch.promote_types(q_RWHC.dtype, torch.float32)
    width, heads, latent = out_RWHL.shape[1:]
    unseen_W = torch.arange(width - 1, -1, -1)
    for row, length in enumerate(length_R.tolist()):
        bound_W, begin = length - unseen_W, first
        if own is not None:
            bound_W, begin = own.bound_RW[row], int(own.first_R[row])
        if length <= begin:
            out_RWHL[row], lse_RWH[row] = 0.0, -torch.inf
            continue
        q_XC, bound_X = q_RWHC[row].reshape(width * heads, -1).to(compute), bound_W.repeat_interleave(heads)
        pieces = []
        for index, pages in enumerate(torch.split(page_RP[row, : pages_for(length)], PIECE_PAGES)):
            offset = index * PIECE_PAGES * PAGE_TOKENS
            found_SC = cache_PKC[pages].flatten(0, 1)
            entry_SC = latent_entries(found_SC, latent, q_XC.shape[1] - latent, q_RWHC.dtype).to(compute)
            pieces.append(_piece(q_XC, entry_SC, bound_X - offset, begin - offset, latent, scale))
        out_XL, lse_X = merge_strands(pieces, STRANDS // shards)
        out_RWHL[row] = out_XL.view(width, heads, latent)
        lse_RWH[row] = (lse_X if own is not None else lse_X * math.log(2)).view(width, heads)


def _piece(
    q_XC: Tensor, entry_SC: Tensor, bound_X: Tensor, first: int, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the entries first <= i < bound of some whole pages: the output, and its log2-sum-exp2."""
    queries, pages = q_XC.shape[0], entry_SC.shape[0] // PAGE_TOKENS
    index_S = torch.arange(len(entry_SC))
    entry_SC = entry_SC.masked_fill(((index_S < first) | (index_S >= bound_X.max())).unsqueeze(1), 0.0)
    score_XS = torch.empty(queries, len(index_S), dtype=q_XC.dtype)
    linear.invariant_linear(q_XC, entry_SC, score_XS)
    unseen_XS = (index_S < first) | (index_S >= bound_X.unsqueeze(1))
    score_XS = (score_XS * scale).masked_fill(unseen_XS, -torch.inf)
    top_X = score_XS.amax(-1)
    weight_XS = deterministic_math.exp(score_XS - top_X.masked_fill(top_X == -torch.inf, 0.0).unsqueeze(1))
    weight_XPK = weight_XS.view(queries, pages, PAGE_TOKENS)
    value_PKL = entry_SC[:, :latent].view(pages, PAGE_TOKENS, latent)
    total_X, sum_XL = q_XC.new_zeros(queries), q_XC.new_zeros(queries, latent)
    # As many pages at once as there is room for their parts of the sums, which are added one after the other.
    turn = max(1, linear.PRODUCTS_AT_ONCE // (queries * latent))
    for some_XPK, values_PKL in zip(torch.split(weight_XPK, turn, 1), torch.split(value_PKL, turn), strict=True):
        part_XPL = torch.empty(queries, some_XPK.shape[1], latent, dtype=q_XC.dtype)
        linear.invariant_groups(some_XPK, values_PKL.transpose(1, 2), part_XPL)
        for page_X, part_XL in zip(some_XPK.sum(-1).unbind(1), part_XPL.unbind(1), strict=True):
            total_X += page_X
            sum_XL += part_XL
    out_XL = sum_XL / total_X.masked_fill(total_X == 0, 1.0).unsqueeze(1)
    return out_XL, top_X * math.log2(math.e) + deterministic_math.log2(total_X)
