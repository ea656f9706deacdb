"""Chunks of prompts whose cached context is widened: FP8 entries become numbers of the model's dtype once per layer.

Of many heads, the kernel that attends to selected FP8 entries widens each of them anew for every token and block of
heads. The tokens of a chunk select from one context, so each entry would be widened many times. A copy of the context
in the model's dtype holds the same numbers, and what attends to it gives the same bits. It is memory of a pass, which
the layers share, and it is bounded: rows that have no room there, or few tokens for their context, attend to the cache.

Shape legend: N rows, B1 = N + 1 bounds, P most pages of a row, W widened pages, K = 64 entries per page, C cached
features, S = W K widened entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

import torch
from torch import Tensor

from kernels.gather_context import gather_context
from kernels.page import PAGE_TOKENS, pages_for
from kernels.sparse import widens_selected
from workers.memory.scratch import Scratch, on_device
from workers.models.attention.backend import Heads
from workers.models.batch import PrefillBatch

WIDENED: Final = 1 << 17
"""Most entries that are widened at once, all rows together: 151 MB of 512 + 64 features in bf16."""
FEW_HEADS: Final = 32
"""Heads up to which the kernel for FP8 entries reads them as they are."""
FEWEST_TOKENS: Final = 64
"""Tokens of the shortest chunk for which its context is widened."""
CONTEXT_OF_A_TOKEN: Final = 512
"""Entries of a row that are widened for every token of its chunk, at most."""


def may_widen(heads: Heads, device: torch.device) -> bool:
    """Whether chunks of these heads may have their context widened: where Hopper's kernel would do it for every token,
    and on a CPU, which shows that it is the same."""
    if not heads.fp8_cache or heads.invariant or heads.count <= FEW_HEADS:
        return False
    return device.type == "cpu" or widens_selected(heads.count, heads.latent, heads.norm_L.dtype, device)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens that attend to one cache."""

    tokens: int
    widened: bool
    """Whether they attend to the widened one."""


@dataclass(frozen=True)
class Widening:
    """Prefill rows of a pass whose context is widened, and the place of what is widened."""

    cu_B1: Tensor
    """int32: where each row's entries begin among those that are widened; whole pages, none of the other rows."""
    page_NP: Tensor
    """int32 page tables of what is widened; arbitrary in the other rows."""
    pages: int
    """W."""
    stretches: tuple[Stretch, ...]
    """Stretches of the rows' tokens, in their order."""

    @staticmethod
    def of(prefill: PrefillBatch) -> Widening | None:
        """Choose the rows whose context is widened; None if there are none."""
        lengths = [start + count for start, count in zip(prefill.start, prefill.count, strict=True)]
        chosen = _chosen(prefill.count, lengths)
        if not any(chosen):
            return None
        pages = [pages_for(length) if own else 0 for length, own in zip(lengths, chosen, strict=True)]
        cu = [PAGE_TOKENS * before for before in accumulate(pages, initial=0)]
        cu_B1 = on_device(cu, torch.int32, prefill.page_NP.device)
        column_P = torch.arange(pages_for(max(lengths)), dtype=torch.int32, device=cu_B1.device)
        first_N = torch.div(cu_B1[:-1], PAGE_TOKENS, rounding_mode="floor")
        alike = groupby(zip(chosen, prefill.count, strict=True), key=lambda row: row[0])
        stretches = tuple(Stretch(sum(count for _, count in rows), own) for own, rows in alike)
        return Widening(cu_B1, first_N.unsqueeze(1) + column_P, sum(pages), stretches)

    @staticmethod
    def largest(tokens: int, rows: int, pages: int, device: torch.device) -> Widening | None:
        """One that needs as much memory as any of so many tokens, rows, and pages per row. Nothing attends by it."""
        if tokens < FEWEST_TOKENS:
            return None
        cu_B1 = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        return Widening(cu_B1, cu_B1.new_zeros(rows, pages), min(WIDENED // PAGE_TOKENS, rows * pages), ())


def _chosen(counts: Sequence[int], lengths: Sequence[int]) -> list[bool]:
    """Choose the rows to widen, by their tokens in this pass and their entries after it: the longest chunks first,
    while there is room."""
    chosen, left = [False] * len(counts), WIDENED // PAGE_TOKENS
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        many = counts[row] >= max(FEWEST_TOKENS, lengths[row] / CONTEXT_OF_A_TOKEN)
        if many and pages_for(lengths[row]) <= left:
            chosen[row] = True
            left -= pages_for(lengths[row])
    return chosen


@dataclass(frozen=True)
class WidenedContext:
    """Memory for what a pass widens, one layer after the other."""

    widening: Widening
    cache_WKC: Tensor
    page_NP: Tensor
    """Page tables of `cache_WKC`; -1 stands for pages that are outside of the cache."""
    source_NP: Tensor
    """Page tables of the cache, all of whose pages may be read."""
    outside_NP: Tensor

    @staticmethod
    def of(heads: Heads, widening: Widening, scratch: Scratch) -> WidenedContext:
        """Uninitialised."""
        tables = widening.page_NP.shape
        return WidenedContext(
            widening,
            scratch.empty(widening.pages, PAGE_TOKENS, heads.latent + heads.rope, dtype=heads.norm_L.dtype),
            scratch.empty(*tables, dtype=torch.int32),
            scratch.empty(*tables, dtype=torch.int32),
            scratch.empty(*tables, dtype=torch.bool),
        )

    def fill(self, heads: Heads, cache_PKC: Tensor, page_NP: Tensor) -> None:
        """Fill it with the context that a layer's cache holds of the rows with these page tables."""
        # The gather follows whatever a table holds. Of pages that are not there nothing may be read, and attention,
        # which counts them, must find them absent.
        torch.clamp(page_NP, 0, cache_PKC.shape[0] - 1, out=self.source_NP)
        torch.ne(page_NP, self.source_NP, out=self.outside_NP)
        self.page_NP.copy_(self.widening.page_NP)
        self.page_NP.masked_fill_(self.outside_NP, -1)
        entry_SC = self.cache_WKC.flatten(0, 1)
        gather_context(cache_PKC, self.source_NP, self.widening.cu_B1, entry_SC, begin=0, latent=heads.latent)
