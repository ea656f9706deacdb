"""The functions of `kernels.compressed` in plain torch. Numbers are computed in fp32, of fp64 in fp64.

Shape legend: as of `kernels.compressed`; Q tokens of a row, W tokens that an entry is made of, S entries that a token
attends to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.compressed.rows import TokenRows
from kernels.page import PAGE_TOKENS


def turned(x: Tensor, rotation: Tensor, *, back: bool = False) -> Tensor:
    """Rope of the last O features, `back` that by the opposite angles; `rotation` has their shape, but for
    dimensions of 1."""
    plain = x.shape[-1] - rotation.shape[-1]
    even, odd = x[..., plain::2], x[..., plain + 1 :: 2]
    cos, sin = rotation[..., 0::2], rotation[..., 1::2] * (-1 if back else 1)
    pair = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([x[..., :plain], pair.flatten(-2)], -1)


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
    """See `kernels.compressed.rope_store`."""
    features = norm_D.shape
    normed_THD = F.rms_norm(_wide(q_THD), features, None, eps)
    q_THD.copy_(turned(normed_THD, rotation_TO.unsqueeze(1)))
    wide_TD = _wide(kv_TD)
    entry_TD.copy_(turned(F.rms_norm(wide_TD, features, norm_D.to(wide_TD.dtype), eps), rotation_TO))
    if rows.width:
        keep_entries(entry_TD, ring_XLD, rows, counting=True)


def rope_queries(q_THD: Tensor, rotation_TO: Tensor) -> None:
    """See `kernels.compressed.rope_queries`."""
    q_THD.copy_(turned(_wide(q_THD), rotation_TO.unsqueeze(1)))


def keep_entries(entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows, *, counting: bool = True) -> None:
    """See `kernels.compressed.keep_entries`. `counting`: whether faults are counted."""
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
    """See `kernels.compressed.compress`."""
    (ratio, made), features, length = bias_AC.shape, norm_D.shape[0], state_XLF.shape[1]
    overlaps = made > features
    reach = ratio * (1 + overlaps)
    for row, place, token_Q in _rows(rows, len(state_XLF), True):
        position_Q = rows.position_T[token_Q]
        made_QF = _wide(made_TF[token_Q]).clone()
        made_QF[:, made:] += bias_AC[position_Q % ratio]
        start = int(position_Q[0])
        for position in position_Q[(position_Q + 1) % ratio == 0].tolist():
            begin = max(0, position - reach + 1)
            past_W, own_W = torch.arange(begin, max(begin, start)), torch.arange(max(begin, start), position + 1)
            known_WF = torch.cat([state_XLF[place, past_W % length].to(made_QF.dtype), made_QF[own_W - start]])
            value_WC, logit_WC = known_WF.chunk(2, 1)
            if overlaps:
                before = len(known_WF) - ratio
                value_WD, logit_WD = (
                    torch.cat([x_WC[:before, :features], x_WC[before:, features:]]) for x_WC in (value_WC, logit_WC)
                )
            else:
                value_WD, logit_WD = value_WC, logit_WC
            mean_D = (logit_WD.softmax(0) * value_WD).sum(0)
            normed_D = F.rms_norm(mean_D, norm_D.shape, norm_D.to(mean_D.dtype), eps)
            at = _place_of_entry(rows, row, position, ratio, len(entry_PKD))
            if at is None or position >= len(rotation_YO):
                rows.fault_1.add_(1)
                continue
            entry_PKD[at] = turned(normed_D, rotation_YO[position - ratio + 1]).to(entry_PKD.dtype)
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
    """See `kernels.compressed.attend`."""
    out_THD.zero_()
    length = ring_XLD.shape[1]
    for row, place, token_Q in _rows(rows, len(ring_XLD), True):
        start = int(rows.position_T[token_Q[0]])
        for token in token_Q.tolist():
            sees = token + (block - 1 - token % block if block else 0)
            position = int(rows.position_T[sees])
            at_S = torch.arange(max(first, position - window + 1, 0), position + 1)
            key_SD = ring_XLD[place, at_S % length]
            if entry_TD is not None:
                key_SD = torch.cat([key_SD[at_S < start], entry_TD[sees + at_S[at_S >= start] - position]])
            if first:
                key_SD = key_SD[key_SD.isfinite().all(1)]
            if entry_PKD is not None:
                end = (position + 1) // ratio
                number_S = torch.arange(end) if selected_TS is None else selected_TS[token, :end].long()
                number_S = number_S[number_S != -1]
                key_SD = torch.cat([key_SD, _on_pages(entry_PKD, rows, row, number_S, end, ratio)])
            score_HS = scale * _wide(q_THD[token]) @ _wide(key_SD).t()
            score_HS = torch.cat([score_HS, sink_H.to(score_HS.dtype).unsqueeze(1)], 1)
            out_HD = score_HS.softmax(1)[:, :-1] @ _wide(key_SD)
            out_THD[token] = turned(out_HD, rotation_TO[token], back=True).to(out_THD.dtype)


def _on_pages(entry_PKD: Tensor, rows: TokenRows, row: int, number_S: Tensor, end: int, ratio: int) -> Tensor:
    """The entries of a row that have these numbers, all below `end`. Those outside are counted and left out."""
    last_S, columns = number_S * ratio + ratio - 1, rows.page_RP.shape[1]
    there_S = (number_S >= 0) & (number_S < end) & (last_S < columns * PAGE_TOKENS)
    page_S = rows.page_RP[row, (last_S // PAGE_TOKENS).where(there_S, 0)].long()
    there_S &= (page_S >= 0) & (page_S < len(entry_PKD))
    rows.fault_1.add_(int((~there_S).sum()))
    return entry_PKD[page_S[there_S], last_S[there_S] % PAGE_TOKENS // ratio]


def _place_of_entry(rows: TokenRows, row: int, last: int, ratio: int, pages: int) -> tuple[int, int] | None:
    """Page and place of the entry whose last token is at this position; None outside of tables and pages."""
    column = last // PAGE_TOKENS
    if last < 0 or column >= rows.page_RP.shape[1]:
        return None
    page = int(rows.page_RP[row, column])
    return (page, last % PAGE_TOKENS // ratio) if 0 <= page < pages else None


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
