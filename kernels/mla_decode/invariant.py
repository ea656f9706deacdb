"""Reference of `kernels.mla_decode` in invariant mode, in plain torch: sums in an order of their own.

It reads lengths on the host, so it cannot be captured in a graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import deterministic_math
from kernels.latent_entry import entries as latent_entries
from kernels.linear import reference as linear
from kernels.own_entries import OwnEntries
from kernels.page import PAGE_TOKENS, PIECE_PAGES, pages_for
from kernels.strands import STRANDS, merge_strands, pieces_of


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
    """`mla_decode`, each query's sums in an order that depends on what it sees alone: whole pages from entry 0 on, and
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
        pieces, strands = [], STRANDS // shards
        for strand, pages in pieces_of(pages_for(length), strands, PIECE_PAGES):
            offset = pages.start * PAGE_TOKENS
            found_SC = cache_PKC[page_RP[row, pages.start : pages.stop]].flatten(0, 1)
            entry_SC = latent_entries(found_SC, latent, q_XC.shape[1] - latent, q_RWHC.dtype).to(compute)
            pieces.append((strand, _piece(q_XC, entry_SC, bound_X - offset, begin - offset, latent, scale)))
        out_XL, lse_X = merge_strands(pieces, strands)
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
