"""References of `kernels.sparse` in plain torch. They read rows and bounds on the host, so they cannot be captured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from kernels.index_entry import encode, is_int8, parts
from kernels.latent_entry import entries
from kernels.linear.reference import invariant_linear
from kernels.mla_decode.invariant import invariant_mla_decode
from kernels.page import NULL_PAGE, PAGE_TOKENS, pages_for

GATHER_ELEMENTS: Final = 1 << 26
"""Cache elements gathered at once; more tokens than fit are taken in groups, so memory stays bounded."""


def write_index_keys(key_TD: Tensor, slot_T: Tensor, index_PKE: Tensor) -> None:
    entries_there = index_PKE.shape[0] * PAGE_TOKENS
    if bool(((slot_T < 0) | (slot_T >= entries_there)).any()):
        raise IndexError(f"index keys are written outside the {entries_there} entries of the cache: {slot_T.tolist()}")
    page_T, place_T = slot_T // PAGE_TOKENS, slot_T % PAGE_TOKENS
    if is_int8(index_PKE):
        code_PKD, scale_PK = parts(index_PKE)
        code_PKD[page_T, place_T], scale_PK[page_T, place_T] = encode(key_TD)
    else:
        index_PKE[page_T, place_T] = key_TD


def index_scores(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    *,
    invariant: bool = False,
) -> None:
    compute = torch.float32 if is_int8(index_PKE) else torch.promote_types(index_PKE.dtype, torch.float32)
    keys = index_PKE.shape[1]
    for row, first, bounds in _rows(row_T, bound_T, page_RP.shape[0], score_TN.shape[1], fault_1):
        longest = max(bounds)
        page_X = page_RP[row, : -(-longest // keys)].long()
        wrong = (page_X < 0) | (page_X >= index_PKE.shape[0])
        fault_1 += wrong.sum()
        key_ND, scale_N = _keys(index_PKE, page_X.masked_fill(wrong, NULL_PAGE), compute)
        key_ND = key_ND[:longest]
        key_ND.masked_fill_(wrong.repeat_interleave(keys)[:longest].unsqueeze(1), torch.nan)
        for token, bound in enumerate(bounds, first):
            q_HD = q_THD[token].to(compute)
            dot_HN = torch.empty(len(q_HD), bound, dtype=compute, device=q_HD.device)
            if invariant:
                invariant_linear(q_HD, key_ND[:bound], dot_HN)
            else:
                torch.mm(q_HD, key_ND[:bound].t(), out=dot_HN)
            part_HN = dot_HN.relu_().mul_(weight_TH[token].to(compute).unsqueeze(1))
            absent_N = wrong.repeat_interleave(keys)[:bound]
            sum_N = part_HN.t().contiguous().sum(-1) * scale_N[:bound]
            score_TN[token, :bound] = sum_N.masked_fill(absent_N, -torch.inf)


def select_positions(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, fault_1: Tensor) -> None:
    most = selected_TS.shape[1]
    selected_TS.fill_(-1)
    for token, bound in enumerate(bound_T.tolist()):
        if not 0 <= bound <= score_TN.shape[1]:
            fault_1 += 1
        elif bound <= most:
            selected_TS[token, :bound] = torch.arange(bound)
        else:
            best = torch.sort(score_TN[token, :bound], descending=True, stable=True).indices[:most]
            selected_TS[token] = best.sort().values


def sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    scale: float,
) -> None:
    place_TS = _places(cache_PKC, page_RP, row_T, selected_TS, fault_1)
    used = int((place_TS >= 0).any(0).nonzero().max()) + 1 if bool((place_TS >= 0).any()) else 0
    if not used:
        out_THL.zero_()
        lse_TH.fill_(-torch.inf)
        return
    place_TS, latent = place_TS[:, :used], out_THL.shape[-1]
    compute = torch.promote_types(q_THC.dtype, torch.float32)
    flat_NE = cache_PKC.flatten(0, 1)
    step = max(1, GATHER_ELEMENTS // (used * q_THC.shape[-1]))
    for begin in range(0, len(q_THC), step):
        part = slice(begin, begin + step)
        absent_TS = place_TS[part] < 0
        found_TSE = flat_NE[place_TS[part].clamp(min=0)]
        entry_TSC = entries(found_TSE, latent, q_THC.shape[-1] - latent, q_THC.dtype).to(compute)
        # What an absent entry's place holds may be NaN, which a weight of 0 does not undo.
        entry_TSC = entry_TSC.masked_fill(absent_TS.unsqueeze(-1), 0.0)
        score_THS = torch.bmm(q_THC[part].to(compute), entry_TSC.transpose(1, 2)).mul_(scale)
        score_THS.masked_fill_(absent_TS.unsqueeze(1), -torch.inf)
        lse_TH[part] = torch.logsumexp(score_THS, dim=-1)
        shift_TH1 = lse_TH[part].masked_fill(lse_TH[part] == -torch.inf, 0.0).unsqueeze(-1)
        out_THL[part] = torch.bmm(score_THS.sub_(shift_TH1).exp_(), entry_TSC[..., :latent]).to(out_THL.dtype)


def invariant_sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    scale: float,
) -> None:
    """The same, each token as a row of `kernels.mla_decode` whose cache holds nothing but its selected entries."""
    flat_NE = cache_PKC.flatten(0, 1)
    for token, place_S in enumerate(_places(cache_PKC, page_RP, row_T, selected_TS, fault_1)):
        place_X = place_S[place_S >= 0]
        count = len(place_X)
        own_PKE = flat_NE.new_zeros(pages_for(count), PAGE_TOKENS, flat_NE.shape[-1])
        own_PKE.flatten(0, 1)[:count] = flat_NE[place_X]
        invariant_mla_decode(
            q_THC[token].unsqueeze(0).unsqueeze(0),
            own_PKE,
            torch.arange(len(own_PKE)).unsqueeze(0),
            torch.tensor([count]),
            out_THL[token].unsqueeze(0).unsqueeze(0),
            lse_TH[token].unsqueeze(0).unsqueeze(0),
            scale,
            0,
        )


def _keys(index_PKE: Tensor, page_X: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys of whole pages (int64 [X]) one after the other, in `compute`: [N, D]; and what their scores have to be
    multiplied by, [N]. Keys in INT8 stay codes, whose products have exact sums."""
    if not is_int8(index_PKE):
        key_ND = index_PKE[page_X].flatten(0, 1).to(compute)
        return key_ND, torch.ones(len(key_ND), dtype=compute, device=key_ND.device)
    code_PKD, scale_PK = parts(index_PKE)
    return code_PKD[page_X].flatten(0, 1).to(compute), scale_PK[page_X].flatten()


def _rows(
    row_T: Tensor, bound_T: Tensor, rows: int, most: int, fault_1: Tensor
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield, for tokens of one row that stand side by side and see something: the row, the first of them, and their
    bounds."""
    both = []
    for row, bound in zip(row_T.tolist(), bound_T.tolist(), strict=True):
        wrong = bound != 0 and not (0 <= row < rows and 0 < bound <= most)
        fault_1 += int(wrong)
        both.append((row, 0 if wrong else bound))
    for (row, seeing), group in groupby(enumerate(both), lambda item: (item[1][0], item[1][1] > 0)):
        found = list(group)
        if seeing:
            yield row, found[0][0], [bound for _, (_, bound) in found]


def _places(cache_PKC: Tensor, page_RP: Tensor, row_T: Tensor, selected_TS: Tensor, fault_1: Tensor) -> Tensor:
    """Return the indices of the selected entries in the flattened cache, int64 [T, S]; -1 for absent ones."""
    rows, columns = page_RP.shape
    position_TS = selected_TS.long()
    outside_T1 = ((row_T < 0) | (row_T >= rows)).unsqueeze(1)
    wrong_TS = (position_TS < -1) | (position_TS >= columns * PAGE_TOKENS)
    wrong_TS |= outside_T1 & (position_TS >= 0)
    there_TS = (position_TS >= 0) & ~wrong_TS
    row_T1 = row_T.long().unsqueeze(1).masked_fill(outside_T1, 0)
    page_TS = page_RP[row_T1, (position_TS // PAGE_TOKENS).where(there_TS, 0)].long()
    out_of_bounds_TS = there_TS & ((page_TS < 0) | (page_TS >= len(cache_PKC)))
    fault_1 += wrong_TS.sum() + out_of_bounds_TS.sum()
    return (page_TS * PAGE_TOKENS + position_TS % PAGE_TOKENS).where(there_TS & ~out_of_bounds_TS, -1)
