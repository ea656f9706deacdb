"""The geometry of a step's prefill rows, computed once and read by every layer.

Cached context is attended to in bounded pieces, all rows side by side: its keys and values, expanded from the latent,
are many times the latent's size and never exist for a whole long context at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS
from workers.batch import Batch, PrefillBatch
from workers.pinned import on_device

CONTEXT_ENTRIES: Final = 4096
"""Cached entries expanded at once, all rows together (at least one page a row)."""


@dataclass(frozen=True)
class ContextPiece:
    """Some cached entries of every row that has so many: rows without any own an empty range."""

    slot_S: Tensor
    """int64 indices into the flattened cache [pages * 64], row after row."""
    cu_k_B1: Tensor
    """int32 [rows + 1]: where each row's entries begin in `slot_S`."""
    max_k: int

    @property
    def entries(self) -> int:
        """Of all rows together."""
        return self.slot_S.shape[0]


@dataclass(frozen=True)
class Expansion:
    """One set of keys of the prefill rows, expanded from their latents: memory and the views that kernels read."""

    slot_S: Tensor | None
    """Where in the flattened cache the latents are; None when they are the chunk's own."""
    source_SC: Tensor
    """The latents and roped keys. `latent_SL` and `key_SO` are its columns."""
    latent_SL: Tensor
    kv_SF: Tensor
    """What a latent expands to, all heads side by side. `key_SHN` and `value_SHV` are parts of it."""
    key_SHN: Tensor
    key_SO: Tensor
    value_SHV: Tensor
    cu_k_B1: Tensor
    max_k: int
    out_THV: Tensor
    """Attention over these keys alone, with its log-sum-exp."""
    lse_TH: Tensor


@dataclass(frozen=True)
class PrefillGeometry:
    """The prefill rows' queries, and the pieces of context cached before them."""

    cu_q_B1: Tensor
    """int32 [rows + 1]: where each row's tokens begin, counted from the first prefill token."""
    max_q: int
    pieces: tuple[ContextPiece, ...]

    @staticmethod
    def of(batch: Batch) -> PrefillGeometry | None:
        """Geometry of `batch`, or None when it has no prefill rows."""
        prefill = batch.prefill
        if prefill is None or not prefill.count:
            return None
        counts = _piece_counts(prefill, batch.first)
        # Cumulative sums of the queries', then of every piece's keys: one copy for all of them. Each begins at a
        # multiple of 16 bytes, whatever the number of rows: kernels are compiled anew where that differs.
        filling = [0] * (-(len(prefill.count) + 1) % 4)
        cu = [[*accumulate(row, initial=0), *filling] for row in (prefill.count, *counts)]
        cu_XB1 = on_device(cu, torch.int32, prefill.page_NP.device)[:, : len(prefill.count) + 1]
        return PrefillGeometry(cu_XB1[0], max(prefill.count), tuple(_pieces(prefill, batch.first, counts, cu_XB1[1:])))

    @staticmethod
    def largest(tokens: int, rows: int, device: torch.device) -> PrefillGeometry:
        """One that needs as much memory as any of so many tokens and rows. Nothing can attend by it."""
        entries = max(CONTEXT_ENTRIES, rows * PAGE_TOKENS)
        none_S = torch.empty(entries, dtype=torch.int64, device=device)
        cu_B1 = torch.zeros(2, dtype=torch.int32, device=device)
        return PrefillGeometry(cu_B1, tokens, (ContextPiece(none_S, cu_B1, entries),))


def entries_of_a_row(rows: int) -> int:
    """Entries of a row that one piece holds where so many rows have context: whole pages."""
    return max(CONTEXT_ENTRIES // max(rows, 1) // PAGE_TOKENS, 1) * PAGE_TOKENS


def _share(prefill: PrefillBatch, first: int) -> int:
    return entries_of_a_row(sum(start > first for start in prefill.start))


def _piece_counts(prefill: PrefillBatch, first: int) -> list[list[int]]:
    """Entries of every row in every piece."""
    share = _share(prefill, first)
    begins = range(first, max(prefill.start), share)
    return [[max(0, min(begin + share, start) - begin) for start in prefill.start] for begin in begins]


def _pieces(
    prefill: PrefillBatch, first: int, counts: Sequence[Sequence[int]], cu_XB1: Tensor
) -> Iterator[ContextPiece]:
    """The pieces; where their entries lie is computed on the device, for all of them at once."""
    if not counts:
        return
    device, rows = prefill.page_NP.device, len(prefill.start)
    sizes = [sum(row) for row in counts]
    count_M = (cu_XB1[:, 1:] - cu_XB1[:, :-1]).flatten()  # of every (piece, row)
    before_M = count_M.cumsum(0) - count_M
    pair_S = torch.repeat_interleave(torch.arange(len(count_M), device=device), count_M, output_size=sum(sizes))
    entry_S = torch.arange(sum(sizes), device=device) - before_M[pair_S]
    entry_S += first + pair_S // rows * _share(prefill, first)
    page_S = prefill.page_NP[pair_S % rows, entry_S // PAGE_TOKENS].to(torch.int64)
    slots = torch.split(page_S * PAGE_TOKENS + entry_S % PAGE_TOKENS, sizes)
    for slot_S, cu_k_B1, row in zip(slots, cu_XB1, counts, strict=True):
        yield ContextPiece(slot_S, cu_k_B1, max(row))
