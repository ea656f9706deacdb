"""The expanded form: keys and values of all heads, which costs fewer products than the absorbed form when many queries
share them. For prefill rows: the loop of `deepseek.attention`. Their geometry is made once per pass and read by every
layer.

Cached context is attended to in bounded pieces: its keys and values, expanded from the latent, are many times the
latent's size and never exist for a whole long context at once. A piece holds as much of every row, side by side, and
rows that have ended leave their part to the others: so there are as few pieces as there can be, and all rows keep the
device busy at once.

Few queries alone would leave most of the device idle, so they attend to a piece in parts at once (`key_parts`).

Shape legend: T tokens of the prefill rows, H heads of this rank, N / O non-rope / rope features of a key, V value
features, L latent features, C = L + O cached features, F = H (N + V), B rows, P most pages of a row, S entries of all
rows, X >= S latents that are expanded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels.gather_context import gather_context
from kernels.linear import linear
from kernels.merge_attention import merge_attention
from kernels.mla_prefill import key_parts, mla_prefill, most_partial
from kernels.page import PAGE_TOKENS
from workers.memory.scratch import Scratch, on_device
from workers.models.attention.backend import Backend, Geometry, Heads
from workers.models.attention.shards import SharedContext
from workers.models.batch import PrefillBatch
from workers.parallel.group import Group

CONTEXT_ENTRIES: Final = 4096
"""Cached entries expanded at once, all rows together (at least one page per row)."""
EXPANDED: Final = 128
"""Latents of cached context are expanded in multiples of so many. So there are few products, and each has been launched
before the first step: whoever multiplies loads kernels when they first come, and a step would wait for that."""


@dataclass(frozen=True)
class ContextPiece:
    """The entries from `begin` on of every row that has so many: rows without any own an empty range."""

    begin: int
    cu_k_B1: Tensor
    """int32 [rows + 1]: where each row's entries begin among those of all."""
    max_k: int
    entries: int
    """Entries of all rows together."""


@dataclass(frozen=True)
class PrefillKeys:
    """Keys and values of the prefill rows, and where attention over these alone goes."""

    key_SHN: Tensor
    key_SO: Tensor
    value_SHV: Tensor
    cu_k_B1: Tensor
    max_k: int
    out_THV: Tensor
    """Output. For context [Z, T, H, V]: one for each of Z parts of its keys."""
    lse_TH: Tensor
    """Log-sum-exp of the scores. For context [Z, T, H]."""


@dataclass(frozen=True)
class RecalledContext:
    """A piece of cached context on its way back to keys: the memory it takes, which the pieces share."""

    begin: int
    source_SC: Tensor
    """Latents and roped keys, row after row."""
    latent_XL: Tensor
    """The latents, and arbitrary ones behind them up to a multiple of `EXPANDED`."""
    kv_XF: Tensor
    """Expansion of each latent, all heads side by side."""
    keys: PrefillKeys
    shared: SharedContext | None
    """Where the entries lie on several ranks."""


@dataclass(frozen=True)
class PrefillGeometry(Geometry):
    """The prefill rows' queries, and the pieces of context cached before them."""

    cu_q_B1: Tensor
    """int32 [rows + 1]: where each row's tokens begin, counted from the first prefill token."""
    max_q: int
    page_BP: Tensor
    """int32 page tables of the rows."""
    pieces: tuple[ContextPiece, ...]

    @staticmethod
    def of(prefill: PrefillBatch, first: int) -> PrefillGeometry:
        """Geometry of prefill rows, of which there are some. `first`: see `Batch`."""
        bounds = [first + end for end in (0, *_ends([start - first for start in prefill.start]))]
        counts = [[max(0, min(end, start) - begin) for start in prefill.start] for begin, end in pairwise(bounds)]
        # Cumulative sums of the queries', then of every piece's keys: one copy for all of them. Each begins at a
        # multiple of 16 bytes, whatever the number of rows: kernels are compiled anew where that differs.
        filling = [0] * (-(len(prefill.count) + 1) % 4)
        cu = [[*accumulate(row, initial=0), *filling] for row in (prefill.count, *counts)]
        cu_XB1 = on_device(cu, torch.int32, prefill.page_NP.device)[:, : len(prefill.count) + 1]
        pieces = tuple(
            ContextPiece(begin, cu_k_B1, max(row), sum(row))
            for begin, cu_k_B1, row in zip(bounds, cu_XB1[1:], counts, strict=False)
        )
        return PrefillGeometry(cu_XB1[0], max(prefill.count), prefill.page_NP, pieces)

    @staticmethod
    def largest(tokens: int, rows: int, device: torch.device) -> PrefillGeometry:
        """Return a geometry that needs as much memory as any with this number of tokens and rows. Nothing can attend by
        it."""
        entries = max(CONTEXT_ENTRIES, rows * PAGE_TOKENS)
        cu_B1 = torch.zeros(2, dtype=torch.int32, device=device)
        return PrefillGeometry(cu_B1, tokens, cu_B1.view(1, 2), (ContextPiece(0, cu_B1, entries, entries),))


@dataclass(frozen=True)
class ExpandedChunks(Backend):
    """Prefill rows whose keys and values are expanded: the chunk's own tokens causally, then cached context."""

    geometry: PrefillGeometry
    q_THD: Tensor
    own: PrefillKeys
    """Keys of the chunk's own tokens; they are there when attention begins."""
    context: tuple[RecalledContext, ...]
    out_THV: Tensor

    @staticmethod
    def of(
        q_THD: Tensor,
        latent_TC: Tensor,
        kv_THF: Tensor,
        out_THV: Tensor,
        geometry: PrefillGeometry,
        nope: int,
        scratch: Scratch,
        group: Group | None = None,
    ) -> ExpandedChunks:
        """Make the backend of the prefill rows' tokens alone, from queries, latents with their roped keys, the other
        `nope` features of their keys with their values, and the place for the output. `group`: see `Batch`."""
        (tokens, heads), dtype, pieces = q_THD.shape[:2], q_THD.dtype, geometry.pieces
        # Partial results stay in fp32 until the last merge.
        sums = [(out_THV, scratch.empty(tokens, heads, dtype=torch.float32))]
        # Of the largest geometry, which is of more tokens than are given, what any of them needs.
        partial = most_partial(max(tokens, geometry.max_q), heads, q_THD.device)
        latent = latent_TC.shape[1] - (q_THD.shape[2] - nope)

        def keys(
            source_SC: Tensor, kv_SHF: Tensor, cu_k_B1: Tensor, max_k: int, sum: tuple[Tensor, Tensor]
        ) -> PrefillKeys:
            return PrefillKeys(kv_SHF[..., :nope], source_SC[:, latent:], kv_SHF[..., nope:], cu_k_B1, max_k, *sum)

        if pieces:
            # One piece's keys exist at a time.
            most = max(_rounded(piece.entries) for piece in pieces)
            context_SC = scratch.empty(most, latent_TC.shape[1], dtype=dtype)
            if group is not None:
                shared_memory = SharedContext.memory(group, most, latent_TC.shape[1], dtype, scratch)
            kv_SHF = scratch.empty(most, *kv_THF.shape[1:], dtype=dtype)
            sums = [
                (
                    scratch.empty(count, *out_THV.shape[1:], dtype=torch.float32),
                    scratch.empty(count, heads, dtype=torch.float32),
                )
                for count in (tokens, partial)
            ]
        context = []
        for piece in pieces:
            source_SC, own_SHF = context_SC[: piece.entries], kv_SHF[: piece.entries]
            expanded = _rounded(piece.entries)
            parts = key_parts(geometry.max_q, piece.max_k, piece.cu_k_B1.shape[0] - 1, heads, q_THD.device)
            assert parts * tokens <= partial
            out_ZTHV, lse_ZTH = (of_T[: parts * tokens].view(parts, tokens, *of_T.shape[1:]) for of_T in sums[1])
            shared = None
            if group is not None:
                where = geometry.page_BP, piece.cu_k_B1, piece.begin, source_SC
                shared = SharedContext.of(group, *where, shared_memory)
            context.append(
                RecalledContext(
                    begin=piece.begin,
                    source_SC=source_SC,
                    latent_XL=context_SC[:expanded, :latent],
                    kv_XF=kv_SHF[:expanded].flatten(1),
                    keys=keys(source_SC, own_SHF, piece.cu_k_B1, piece.max_k, (out_ZTHV, lse_ZTH)),
                    shared=shared,
                )
            )
        own = keys(latent_TC, kv_THF, geometry.cu_q_B1, geometry.max_q, sums[0])
        return ExpandedChunks(geometry, q_THD, own, tuple(context), out_THV)

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        own, context = self.own, self.context
        self._attend(heads, own, causal=True)
        for piece in context:
            keys = piece.keys
            entries, begin, latent = (keys.cu_k_B1, piece.source_SC), piece.begin, heads.latent
            if piece.shared is None:
                gather_context(cache_PKC, self.geometry.page_BP, *entries, begin=begin, latent=latent)
            else:
                piece.shared.gather(cache_PKC, *entries, begin=begin, latent=latent)
            expand(heads, piece.latent_XL, piece.kv_XF)
            self._attend(heads, keys, causal=False)
            into_THV = self.out_THV if piece is context[-1] else own.out_THV
            merge_attention(own.out_THV, own.lse_TH, keys.out_THV, keys.lse_TH, into_THV, own.lse_TH)
        if heads.sink_H is not None:
            heads.add_sinks(self.out_THV, own.lse_TH)

    @override
    def reserve(self, heads: Heads) -> None:
        for piece in self.context:
            if piece.shared is not None:
                piece.shared.reserve()
            for count in range(EXPANDED, piece.latent_XL.shape[0] + 1, EXPANDED):
                expand(heads, piece.latent_XL[:count], piece.kv_XF[:count])

    def _attend(self, heads: Heads, keys: PrefillKeys, *, causal: bool) -> None:
        mla_prefill(
            self.q_THD,
            keys.key_SHN,
            keys.key_SO,
            keys.value_SHV,
            self.geometry.cu_q_B1,
            keys.cu_k_B1,
            keys.out_THV,
            keys.lse_TH,
            scale=heads.scale,
            causal=causal,
            max_q=self.geometry.max_q,
            max_k=keys.max_k,
        )


def expand(heads: Heads, latent_SL: Tensor, kv_SF: Tensor) -> None:
    """Keys without their roped part, and values, of all heads side by side."""
    linear(latent_SL, heads.up_HFL.flatten(0, 1), kv_SF)


def entries_of_a_row(rows: int) -> int:
    """Entries of a row that one piece holds where so many rows have at least as many."""
    return max(CONTEXT_ENTRIES // rows, PAGE_TOKENS)


def _rounded(entries: int) -> int:
    return -(-entries // EXPANDED) * EXPANDED


def _ends(entries: Sequence[int]) -> list[int]:
    """Return the positions at which the pieces end, in every row with that many entries; the other rows end before. A
    piece is filled as water fills a vessel: up to where a row ends, then further with those that are left."""
    rows = sorted(count for count in entries if count > 0)
    ends: list[int] = []
    end, ended = 0, 0
    while ended < len(rows):
        least, room = end + PAGE_TOKENS, CONTEXT_ENTRIES
        while ended < len(rows) and (needed := (rows[ended] - end) * (len(rows) - ended)) <= room:
            end, ended, room = rows[ended], ended + 1, room - needed
        if ended < len(rows):
            end = min(max(end + room // (len(rows) - ended), least), rows[-1])
            while ended < len(rows) and rows[ended] <= end:
                ended += 1
        ends.append(end)
    return ends
