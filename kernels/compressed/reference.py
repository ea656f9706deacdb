"""The functions of `kernels.compressed` in plain torch. Numbers are computed in fp32, of fp64 in fp64.

Shape legend: as of `kernels.compressed`; Q tokens of a row, W tokens of which an entry may be made, N compressed
entries of a row, S entries that its tokens may attend to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.compressed.rows import TokenRows
from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamMemory


def turned(x: Tensor, rotation: Tensor, *, back: bool = False) -> Tensor:
    """Rope of the last O features, `back` that by the opposite angles; `rotation` has their shape, but for
    dimensions of 1."""
    plain = x.shape[-1] - rotation.shape[-1]
    even, odd = x[..., plain::2], x[..., plain + 1 :: 2]
    cos, sin = rotation[..., 0::2], rotation[..., 1::2] * (-1 if back else 1)
    pair = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([x[..., :plain], pair.flatten(-2)], -1)


def begin(
    token_T: Tensor,
    position_T: Tensor,
    embedding_YE: Tensor,
    rotations_YO: tuple[Tensor, Tensor],
    token_out_T: Tensor,
    rotations_TO: tuple[Tensor, Tensor],
    out_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
) -> None:
    token_out_T.copy_(token_T)
    for table_YO, own_TO in zip(rotations_YO, rotations_TO, strict=True):
        torch.index_select(table_YO, 0, position_T, out=own_TO)
    out_TE.copy_(embedding_YE[token_T])
    residual_TSE.zero_()
    memory.open_TS.fill_(1.0)
    assert memory.mix_TSS is not None
    memory.mix_TSS.zero_()


def lay_out_rows(
    position_T: Tensor, length_R: Tensor, wanted_R: Tensor | None, row_T: Tensor, bound_T: Tensor, ratio: int
) -> None:
    if not len(position_T):
        return
    rows, width = len(length_R), len(position_T) // len(length_R)
    own_RW = torch.ones(rows, width, dtype=torch.bool)
    if wanted_R is not None:
        own_RW = torch.arange(width) < wanted_R.unsqueeze(1)
    row_T.view(rows, width).copy_(torch.arange(rows).unsqueeze(1).where(own_RW, -1))
    bound_T.view(rows, width).copy_(((position_T + 1) // ratio).view(rows, width))
    bound_T.view(rows, width).mul_(own_RW & (length_R > 0).unsqueeze(1))


def rope_store(
    q_THD: Tensor,
    kv_TD: Tensor,
    norm_D: Tensor,
    rotation_TO: Tensor,
    entry_TD: Tensor,
    ring_XLD: Tensor,
    rows: TokenRows,
    eps: float,
) -> None:
    features = norm_D.shape
    normed_THD = F.rms_norm(_wide(q_THD), features, None, eps)
    q_THD.copy_(turned(normed_THD, rotation_TO.unsqueeze(1)))
    wide_TD = _wide(kv_TD)
    entry_TD.copy_(turned(F.rms_norm(wide_TD, features, norm_D.to(wide_TD.dtype), eps), rotation_TO))
    if rows.width:
        keep_entries(entry_TD, ring_XLD, rows, counting=True)


def rope_queries(q_THD: Tensor, rotation_TO: Tensor) -> None:
    q_THD.copy_(turned(_wide(q_THD), rotation_TO.unsqueeze(1)))


def keep_entries(entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows, *, counting: bool = True) -> None:
    """Keep entries. `counting`: whether faults are counted."""
    length = ring_XLD.shape[1]
    for _, place, token_Q in _rows(rows, len(ring_XLD), counting):
        newest_Q = token_Q[-length:]
        ring_XLD[place, rows.position_T[newest_Q] % length] = entry_TD[newest_Q].to(ring_XLD.dtype)


def compress(
    made_TF: Tensor,
    bias_AC: Tensor,
    norm_D: Tensor,
    rotation_YO: Tensor,
    state_XLF: Tensor,
    entry_PKD: Tensor,
    rows: TokenRows,
    eps: float,
) -> None:
    (ratio, made), features, length = bias_AC.shape, norm_D.shape[0], state_XLF.shape[1]
    overlaps = made > features
    reach = ratio * (1 + overlaps)
    for row, place, token_Q in _rows(rows, len(state_XLF), True):
        position_Q = rows.position_T[token_Q]
        made_QF = _wide(made_TF[token_Q]).clone()
        made_QF[:, made:] += bias_AC[position_Q % ratio]
        start = int(position_Q[0])
        if len(last_N := position_Q[(position_Q + 1) % ratio == 0]):
            # Of the tokens before the first one so many as an entry may be made of; where there are none, it is -inf.
            past_W = torch.arange(start - reach + 1, start)
            known_WF = torch.cat([state_XLF[place, past_W % length].to(made_QF.dtype), made_QF])
            at_NW = last_N.unsqueeze(1) - reach + 1 + torch.arange(reach)
            value_NWC, logit_NWC = known_WF[at_NW - start + reach - 1].chunk(2, 2)
            if overlaps:
                value_NWD, logit_NWD = (
                    torch.cat([x[:, :ratio, :features], x[:, ratio:, features:]], 1) for x in (value_NWC, logit_NWC)
                )
            else:
                value_NWD, logit_NWD = value_NWC, logit_NWC
            absent_NW1 = (at_NW < 0).unsqueeze(2)
            weight_NWD = logit_NWD.masked_fill(absent_NW1, -torch.inf).softmax(1)
            mean_ND = (weight_NWD * value_NWD.masked_fill(absent_NW1, 0.0)).sum(1)
            normed_ND = F.rms_norm(mean_ND, norm_D.shape, norm_D.to(mean_ND.dtype), eps)
            page_N, there_N = _pages(rows, row, last_N, len(entry_PKD))
            there_N &= last_N < len(rotation_YO)
            rows.fault_1.add_(int((~there_N).sum()))
            last_N = last_N[there_N]
            entry_ND = turned(normed_ND[there_N], rotation_YO[last_N - ratio + 1])
            entry_PKD[page_N[there_N], last_N % PAGE_TOKENS // ratio] = entry_ND.to(entry_PKD.dtype)
        newest = slice(-length, None)
        state_XLF[place, position_Q[newest] % length] = made_QF[newest].to(state_XLF.dtype)


def attend(
    q_THD: Tensor,
    ring_XLD: Tensor,
    entry_TD: Tensor | None,
    entry_PKD: Tensor | None,
    selected_TS: Tensor | None,
    sink_H: Tensor,
    rotation_TO: Tensor,
    out_THD: Tensor,
    rows: TokenRows,
    window: int,
    ratio: int,
    scale: float,
    first: int,
    block: int = 0,
) -> None:
    out_THD.zero_()
    length = ring_XLD.shape[1]
    for row, place, token_Q in _rows(rows, len(ring_XLD), True):
        position_Q = rows.position_T[token_Q]
        start, end = int(position_Q[0]), int(position_Q[-1]) + 1
        sees_Q1 = (position_Q.clamp(min=end - 1) if block else position_Q).unsqueeze(1)
        stored = end if entry_TD is None else start
        begin = min(max(first, (end if block else start + 1) - window, 0), stored)
        key_SD = ring_XLD[place, torch.arange(begin, stored) % length]
        if entry_TD is not None:
            key_SD = torch.cat([key_SD, entry_TD[token_Q]])
        at_S = torch.arange(begin, end)
        seen_QS = (at_S <= sees_Q1) & (at_S > sees_Q1 - window) & (at_S >= first)
        if first:
            seen_QS &= key_SD.isfinite().all(1)
        if entry_PKD is not None:
            end_Q1 = _complete(position_Q, ratio).unsqueeze(1)
            columns = int(end_Q1.max())
            number_N = torch.arange(columns)
            wanted_QN = number_N < end_Q1
            if selected_TS is not None:
                wanted_QN = _chosen(rows, selected_TS[token_Q], end_Q1, columns)
            last_N = number_N * ratio + ratio - 1
            page_N, there_N = _pages(rows, row, last_N, len(entry_PKD))
            rows.fault_1.add_(int((wanted_QN & ~there_N).sum()))
            key_SD = torch.cat([key_SD, entry_PKD[page_N, last_N % PAGE_TOKENS // ratio]])
            seen_QS = torch.cat([seen_QS, wanted_QN & there_N], 1)
        # What a token does not see may be anything; what it sees makes its weights NaN where it is not finite.
        score_QHS = scale * _wide(q_THD[token_Q]) @ _wide(key_SD).t() + (0 * _wide(key_SD)).sum(1)
        score_QHS = score_QHS.masked_fill(~seen_QS.unsqueeze(1), -torch.inf)
        sink_QH1 = sink_H.to(score_QHS.dtype).view(1, -1, 1).expand(len(token_Q), -1, 1)
        weight_QHS = torch.cat([score_QHS, sink_QH1], 2).softmax(2)[..., :-1]
        out_QHD = weight_QHS @ _wide(key_SD).nan_to_num(0.0, 0.0, 0.0)
        out_THD[token_Q] = turned(out_QHD, rotation_TO[token_Q].unsqueeze(1), back=True).to(out_THD.dtype)


def _complete(position_Q: Tensor, ratio: int) -> Tensor:
    """Entries of so many tokens that are complete at these positions."""
    return (position_Q + 1) // ratio


def _chosen(rows: TokenRows, selected_QS: Tensor, end_Q1: Tensor, columns: int) -> Tensor:
    """Which of the first `columns` entries of a row each of its tokens is given, bool [Q, N]. Numbers that a token may
    not see are counted and left out."""
    listed_QS = (torch.arange(selected_QS.shape[1]) < end_Q1) & (selected_QS != -1)
    lawful_QS = listed_QS & (selected_QS >= 0) & (selected_QS < end_Q1)
    rows.fault_1.add_(int((listed_QS & ~lawful_QS).sum()))
    chosen_QN = torch.zeros(len(selected_QS), columns + 1, dtype=torch.bool)
    chosen_QN.scatter_(1, selected_QS.where(lawful_QS, columns).long(), True)
    return chosen_QN[:, :columns]


def _pages(rows: TokenRows, row: int, last_N: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Pages of a row's entries whose last tokens are at these positions, int64, and whether there are such pages; those
    outside of tables and pages are 0."""
    column_N, columns = last_N // PAGE_TOKENS, rows.page_RP.shape[1]
    there_N = column_N < columns
    page_N = rows.page_RP[row, column_N.where(there_N, 0)].long()
    there_N &= (page_N >= 0) & (page_N < pages)
    return page_N.where(there_N, 0), there_N


def _rows(rows: TokenRows, places: int, counting: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Yield of each row that has a slot: the row, the place of its slot, and its tokens, int64."""
    slot_R, row_T = rows.slot_R.tolist(), rows.row_T.tolist()
    found: dict[int, list[int]] = {}
    for token, row in enumerate(row_T):
        known = 0 <= row < len(slot_R)
        if known and 0 <= slot_R[row] < places - 1:
            found.setdefault(row, []).append(token)
        elif counting and (row != -1 if not known else slot_R[row] != -1):
            rows.fault_1.add_(1)
    for row, tokens in found.items():
        yield row, slot_R[row] + 1, torch.tensor(tokens)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
