"""The geometry of a step's prefill rows, computed once and read by every layer.

Cached context is attended to in bounded pieces, all rows side by side: its keys and values, expanded from the latent,
are many times the latent's size and never exist for a whole long context at once.

Shape legend: T tokens of the prefill rows, H heads of this rank, N / O non-rope / rope features of a key, V value
features, L latent features, C = L + O cached features, F = H (N + V), B rows, P pages a row may hold, S entries of all
rows, X >= S latents that are expanded at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS
from workers.batch import Batch
from workers.pinned import on_device

CONTEXT_ENTRIES: Final = 4096
"""Cached entries expanded at once, all rows together (at least one page a row)."""


@dataclass(frozen=True)
class ContextPiece:
    """The entries from `begin` on of every row that has so many: rows without any own an empty range."""

    begin: int
    cu_k_B1: Tensor
    """int32 [rows + 1]: where each row's entries begin among those of all."""
    max_k: int
    entries: int
    """Of all rows together."""


@dataclass(frozen=True)
class PrefillKeys:
    """One set of keys and values of the prefill rows, and where attention over these alone goes."""

    key_SHN: Tensor
    key_SO: Tensor
    value_SHV: Tensor
    cu_k_B1: Tensor
    max_k: int
    out_THV: Tensor
    lse_TH: Tensor


@dataclass(frozen=True)
class RecalledContext:
    """A piece of cached context on its way back to keys: the memory it takes, which the pieces share."""

    begin: int
    source_SC: Tensor
    """Its latents and roped keys, row after row."""
    latent_XL: Tensor
    """The latents, and arbitrary ones behind them where they are few."""
    kv_XF: Tensor
    """What each expands to, all heads side by side."""
    keys: PrefillKeys


@dataclass(frozen=True)
class PrefillGeometry:
    """The prefill rows' queries, and the pieces of context cached before them."""

    cu_q_B1: Tensor
    """int32 [rows + 1]: where each row's tokens begin, counted from the first prefill token."""
    max_q: int
    page_BP: Tensor
    """int32 page tables of the rows."""
    pieces: tuple[ContextPiece, ...]

    @staticmethod
    def of(batch: Batch) -> PrefillGeometry | None:
        """Geometry of `batch`, or None when it has no prefill rows."""
        prefill = batch.prefill
        if prefill is None or not prefill.count:
            return None
        share = entries_of_a_row(sum(start > batch.first for start in prefill.start))
        begins = range(batch.first, max(prefill.start), share)
        counts = [[max(0, min(begin + share, start) - begin) for start in prefill.start] for begin in begins]
        # Cumulative sums of the queries', then of every piece's keys: one copy for all of them. Each begins at a
        # multiple of 16 bytes, whatever the number of rows: kernels are compiled anew where that differs.
        filling = [0] * (-(len(prefill.count) + 1) % 4)
        cu = [[*accumulate(row, initial=0), *filling] for row in (prefill.count, *counts)]
        cu_XB1 = on_device(cu, torch.int32, prefill.page_NP.device)[:, : len(prefill.count) + 1]
        pieces = tuple(
            ContextPiece(begin, cu_k_B1, max(row), sum(row))
            for begin, cu_k_B1, row in zip(begins, cu_XB1[1:], counts, strict=True)
        )
        return PrefillGeometry(cu_XB1[0], max(prefill.count), prefill.page_NP, pieces)

    @staticmethod
    def largest(tokens: int, rows: int, device: torch.device) -> PrefillGeometry:
        """One that needs as much memory as any of so many tokens and rows. Nothing can attend by it."""
        entries = max(CONTEXT_ENTRIES, rows * PAGE_TOKENS)
        cu_B1 = torch.zeros(2, dtype=torch.int32, device=device)
        return PrefillGeometry(cu_B1, tokens, cu_B1.view(1, 2), (ContextPiece(0, cu_B1, entries, entries),))


def entries_of_a_row(rows: int) -> int:
    """Entries of a row that one piece holds where so many rows have context: whole pages."""
    return max(CONTEXT_ENTRIES // max(rows, 1) // PAGE_TOKENS, 1) * PAGE_TOKENS
