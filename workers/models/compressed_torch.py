"""The operations of DeepSeek V4's attention in plain torch, for CPUs: `CompressedOps` row by row, in fp32.

The readable forward pass (`workers.models.deepseek_v4`) computes the same numbers, and shares nothing with this file:
the self-test holds steps that run this one against it.

Shape legend: see `workers.models.compressed_ops`; N tokens of one row, M entries that end at them, B tokens that an
entry is made of, V entries that a row's tokens may attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import override

from kernels.compressed import TokenRows
from kernels.page import PAGE_TOKENS
from workers.cache.rings import NULL_SLOT
from workers.memory.scratch import Scratch
from workers.models.compressed_ops import CompressedOps
from workers.weights.weight import Weight


@dataclass(frozen=True)
class _Row:
    """The tokens of one row."""

    own: slice
    start: int
    end: int
    """Position behind the last of them."""
    place: int
    """Of the row's slot in rings."""
    page_P: Tensor

    @property
    def position_N(self) -> Tensor:
        return torch.arange(self.start, self.end)

    def entry_at(self, entry_M: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Page, and place on it, of these entries of the row."""
        last_M = (entry_M + 1) * ratio - 1
        return self.page_P[last_M // PAGE_TOKENS].long(), last_M % PAGE_TOKENS // ratio


def _rows(rows: TokenRows) -> Iterator[_Row]:
    """The rows that are somebody's."""
    begin = 0
    for row, tokens in groupby(rows.row_T.tolist()):
        own = slice(begin, begin + len(list(tokens)))
        begin = own.stop
        slot = int(rows.slot_R[row]) if row >= 0 else -1
        if slot >= 0:
            start = int(rows.position_T[own.start])
            yield _Row(own, start, start + own.stop - own.start, slot + 1 + NULL_SLOT, rows.page_RP[row])


def _turned(x_TxD: Tensor, rotation_TO: Tensor, *, back: bool = False) -> Tensor:
    """`x` with its last O features turned by a token's angles, or turned back."""
    roped = rotation_TO.shape[-1]
    rotation_TxO = rotation_TO.view(len(rotation_TO), *[1] * (x_TxD.dim() - 2), roped)
    even, odd = x_TxD[..., -roped::2], x_TxD[..., x_TxD.shape[-1] - roped + 1 :: 2]
    cos, sin = rotation_TxO[..., ::2], rotation_TxO[..., 1::2]
    if back:
        sin = -sin
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([x_TxD[..., :-roped], pairs.flatten(-2)], -1)


def _normed(x_TxD: Tensor, eps: float) -> Tensor:
    return x_TxD * torch.rsqrt(x_TxD.square().mean(-1, keepdim=True) + eps)


class TorchOps(CompressedOps):
    """See the head of this file."""

    @override
    def rope_queries(self, q_TJI: Tensor, rotation_TO: Tensor) -> None:
        q_TJI.copy_(_turned(q_TJI.float(), rotation_TO))

    @override
    def rope_store(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        norm_D: Tensor,
        rotation_TO: Tensor,
        entry_TD: Tensor,
        ring_XLD: Tensor,
        rows: TokenRows,
        *,
        window: int,
        eps: float,
    ) -> None:
        q_THD.copy_(_turned(_normed(q_THD.float(), eps), rotation_TO))
        entry_TD.copy_(_turned(_normed(kv_TD.float(), eps) * norm_D.float(), rotation_TO))
        if rows.width:
            self.keep_entries(entry_TD, ring_XLD, rows)

    @override
    def compress(
        self,
        made_TF: Tensor,
        bias_AC: Tensor,
        norm_D: Tensor,
        rotation_YO: Tensor,
        state_XLF: Tensor,
        entry_PKD: Tensor,
        rows: TokenRows,
        *,
        eps: float,
    ) -> None:
        ratio, features = bias_AC.shape[0], norm_D.shape[0]
        reach = ratio * bias_AC.shape[1] // features
        length = state_XLF.shape[1]
        for row in _rows(rows):
            value_NC, logit_NC = made_TF[row.own].float().chunk(2, 1)
            made_NF = torch.cat([value_NC, logit_NC + bias_AC[row.position_N % ratio]], 1)
            # Of the tokens before the first one so many as an entry may be made of; where there are none, it is -inf.
            past = torch.arange(row.start - reach + 1, row.start)
            past_F = state_XLF[row.place, past % length]
            near_F = torch.cat([past_F, made_NF])
            entry_M = torch.arange(row.start // ratio, row.end // ratio)
            if len(entry_M):
                position_MB = (entry_M.unsqueeze(1) + 1) * ratio - reach + torch.arange(reach)
                own_MBF = near_F[position_MB - row.start + reach - 1]
                value_MBC, logit_MBC = own_MBF.chunk(2, 2)
                if reach > ratio:
                    value_MBD, logit_MBD = (
                        torch.cat([x[:, :ratio, :features], x[:, ratio:, features:]], 1) for x in (value_MBC, logit_MBC)
                    )
                else:
                    value_MBD, logit_MBD = value_MBC, logit_MBC
                absent_MB1 = (position_MB < 0).unsqueeze(2)
                weight_MBD = logit_MBD.masked_fill(absent_MB1, -torch.inf).softmax(1)
                mean_MD = (weight_MBD * value_MBD.masked_fill(absent_MB1, 0.0)).sum(1)
                entry_MD = _turned(_normed(mean_MD, eps) * norm_D.float(), rotation_YO[entry_M * ratio])
                entry_PKD[row.entry_at(entry_M, ratio)] = entry_MD.to(entry_PKD.dtype)
            _keep(made_NF, state_XLF, row)

    @override
    def select(
        self,
        q_TJI: Tensor,
        weight_TJ: Tensor,
        key_PKI: Tensor,
        ratio: int,
        bound_T: Tensor,
        selected_TS: Tensor,
        rows: TokenRows,
        scratch: Scratch,
    ) -> None:
        selected_TS.fill_(-1)
        most = selected_TS.shape[1]
        for row in _rows(rows):
            key_VI = key_PKI[row.entry_at(torch.arange(row.end // ratio), ratio)].float()
            for token in range(row.own.start, row.own.stop):
                bound = int(bound_T[token])
                if bound <= most:
                    selected_TS[token, :bound] = torch.arange(bound)
                    continue
                score_JV = (q_TJI[token].float() @ key_VI[:bound].T).relu()
                score_V = (weight_TJ[token].unsqueeze(1) * score_JV).sum(0)
                best_S = score_V.sort(descending=True, stable=True).indices[:most]
                selected_TS[token] = best_S.sort().values

    @override
    def attend(
        self,
        q_THD: Tensor,
        ring_XLD: Tensor,
        entry_TD: Tensor | None,
        entry_PKD: Tensor | None,
        selected_TS: Tensor | None,
        sink_H: Tensor,
        rotation_TO: Tensor,
        out_THD: Tensor,
        rows: TokenRows,
        scratch: Scratch,
        *,
        window: int,
        ratio: int,
        scale: float,
        first: int = 0,
    ) -> None:
        out_THD.zero_()
        for row in _rows(rows):
            position_N1 = row.position_N.unsqueeze(1)
            begin, stored = max(first, row.start - window + 1), row.end if entry_TD is None else row.start
            key_VD = ring_XLD[row.place, torch.arange(begin, stored) % ring_XLD.shape[1]].float()
            if entry_TD is not None:
                key_VD = torch.cat([key_VD, entry_TD[row.own].float()])
            key_V = torch.arange(begin, row.end)
            seen_NV = (key_V <= position_N1) & (key_V > position_N1 - window)
            if first:
                seen_NV &= key_VD.isfinite().all(1)
            if entry_PKD is not None:
                entry_V = torch.arange(row.end // ratio)
                key_VD = torch.cat([key_VD, entry_PKD[row.entry_at(entry_V, ratio)].float()])
                complete_NV = _complete(entry_V, position_N1, ratio)
                if selected_TS is not None:
                    complete_NV &= (selected_TS[row.own].unsqueeze(2) == entry_V).any(1)
                seen_NV = torch.cat([seen_NV, complete_NV], 1)
            # What nobody of them sees may be anything; of what is seen, NaN goes to those who see it.
            score_NHV = scale * (q_THD[row.own].float() @ key_VD.T)
            score_NHV = score_NHV.masked_fill(~seen_NV.unsqueeze(1), -torch.inf)
            sink_NH1 = sink_H.view(1, -1, 1).expand(len(score_NHV), -1, 1)
            weight_NHV = (score_NHV - torch.cat([score_NHV, sink_NH1], 2).logsumexp(2, keepdim=True)).exp()
            out_NHD = weight_NHV @ key_VD.nan_to_num(0.0, 0.0, 0.0)
            out_THD[row.own] = _turned(out_NHD, rotation_TO[row.own], back=True).to(out_THD.dtype)

    @override
    def keep_entries(self, entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows) -> None:
        for row in _rows(rows):
            _keep(entry_TD[row.own], ring_XLD, row)

    @override
    def group_linear(self, x_TGF: Tensor, weight_NF: Weight, out_TGU: Tensor, scratch: Scratch) -> None:
        groups, compute = x_TGF.shape[1], torch.promote_types(x_TGF.dtype, torch.float32)
        weight_GUF = weight_NF.dequantized(compute).view(groups, -1, x_TGF.shape[2])
        out_TGU.copy_(torch.einsum("tgf,guf->tgu", x_TGF.to(compute), weight_GUF))


def _complete(entry_V: Tensor, position_N1: Tensor, ratio: int) -> Tensor:
    """Which entries are complete at which positions, bool [N, V]."""
    return entry_V < (position_N1 + 1) // ratio


def _keep(new_NC: Tensor, ring_XLC: Tensor, row: _Row) -> None:
    """Put a row's newest tokens into its ring."""
    newest = row.position_N[-ring_XLC.shape[1] :]
    ring_XLC[row.place, newest % ring_XLC.shape[1]] = new_NC[-len(newest) :].to(ring_XLC.dtype)
