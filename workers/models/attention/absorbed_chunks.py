"""Prefill rows as decode rows, for invariant mode: one form of attention whatever a token is fed with. Where ranks
share out the cache, they exchange what decode rows exchange.

Shape legend: R rows, W width, U = R * W queries, T prefill tokens, H heads of this rank, D features of a query, V value
features, C cached features, P pages, K = 64 entries per page.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels.own_entries import OwnEntries
from kernels.page import pages_for
from kernels.runtime.ahead import distinct
from kernels.strands import most_pieces
from workers.memory.scratch import Scratch, on_device
from workers.models.attention.backend import Backend, Geometry, Heads
from workers.models.attention.decode_rows import DecodeMemory, DecodeRows, plan_rows
from workers.models.attention.shards import ShardedRows
from workers.models.batch import DecodeBatch, PrefillBatch
from workers.parallel.group import Group

WIDEST: Final = 8
"""Most tokens of a row."""
QUERIES: Final = 128
"""Query vectors of a row, where its tokens can make so many: what fills the tiles of attention."""
PIECES: Final = 2048
"""Most partial results of `QUERIES` vectors at once: a few hundred MiB."""
ROWS: Final = 512
"""Most rows at once: a program of the plan holds them all."""
ALIGNMENT: Final = 16
"""Bytes at whose multiples lengths and page tables begin: Triton compiles kernels anew for those that do not."""


@dataclass(frozen=True)
class ChunkRows(Geometry):
    """The geometry: every chunk cut into rows of `width` tokens, the last of which ends where the chunk ends. What the
    first row lacks is filled up in front with the chunk's first token: bounds below its own, results that nobody
    reads."""

    width: int
    shards: int
    """Ranks that the rows' pieces go round."""
    token_U: Tensor
    """int64: the prefill token of every query."""
    place_T: Tensor
    """int64: where every prefill token's query is."""
    length_R: Tensor
    """int32, see `DecodeBatch`."""
    page_RP: Tensor

    @staticmethod
    def of(prefill: PrefillBatch, heads: int, shards: int = 1) -> ChunkRows:
        """The rows of `prefill`, of which there are some. `heads`: of all `shards`, which a rank attends with to its
        own entries."""
        width = ChunkRows.width_of(heads)
        token: list[int] = []
        place: list[int] = []
        length: list[int] = []
        row: list[int] = []
        begin = 0
        for index, (start, count) in enumerate(zip(prefill.start, prefill.count, strict=True)):
            missing = -count % width
            place += range(len(token) + missing, len(token) + missing + count)
            token += [begin] * missing + list(range(begin, begin + count))
            ends = range(width - missing, count + 1, width)
            length += [start + end for end in ends]
            row += [index] * len(ends)
            begin += count
        device = prefill.page_NP.device
        pages = prefill.page_NP[:, : pages_for(max(length))]
        return ChunkRows(
            width,
            shards,
            on_device(token, torch.int64, device),
            on_device(place, torch.int64, device),
            on_device(length, torch.int32, device),
            pages[on_device(row, torch.int64, device)],
        )

    @staticmethod
    def largest(
        tokens: int, rows: int, pages: int, heads: int, device: torch.device, shards: int = 1
    ) -> list[ChunkRows]:
        """Return instances of which one needs as much memory as any with this number of tokens, chunks and pages.
        Nothing attends by them.

        The more pieces of context, the fewer rows at once: most memory is at a power of two of them, or at the end.
        """
        width = ChunkRows.width_of(heads)
        count = tokens // width + rows
        token_U = torch.zeros(count * width, dtype=torch.int64, device=device)
        place_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        length_R = torch.zeros(count, dtype=torch.int32, device=device)
        # The most columns with so many pieces: they only grow with the columns.
        most = most_pieces(pages, shards)
        powers = [
            bisect_right(range(pages + 1), 1 << power, key=lambda columns: most_pieces(columns, shards)) - 1
            for power in range(most.bit_length())
        ]
        return [
            ChunkRows(width, shards, token_U, place_T, length_R, length_R.new_zeros(count, columns))
            for columns in sorted({min(columns, pages) for columns in (*powers, pages)})
        ]

    @staticmethod
    def width_of(heads: int) -> int:
        """Tokens of a row."""
        return max(1, min(WIDEST, QUERIES // heads))

    def parts(self) -> list[tuple[slice, DecodeBatch]]:
        """Slices of the queries with their rows, none larger than the first: partial results of long contexts stay
        bounded. A shard has but its share of the pieces."""
        pieces = most_pieces(self.page_RP.shape[1], self.shards)
        pieces = 1 << (pieces - 1).bit_length()
        step = max(1, min(ROWS, PIECES // pieces))
        turns = [slice(begin, begin + step) for begin in range(0, self.length_R.shape[0], step)]
        return [
            (
                slice(turn.start * self.width, turn.stop * self.width),
                DecodeBatch(_aligned(self.length_R[turn]), _aligned(self.page_RP[turn])),
            )
            for turn in distinct(turns)
        ]


def _aligned(part: Tensor) -> Tensor:
    """A part of a tensor, or a copy where it does not begin at a multiple of `ALIGNMENT`: of very long contexts so few
    rows are a part."""
    return part.clone() if part.data_ptr() % ALIGNMENT else part


@dataclass(frozen=True)
class AbsorbedChunks(Backend):
    """Prefill rows of which some neighbouring tokens are a decode row."""

    chunks: ChunkRows
    q_THD: Tensor
    q_UHD: Tensor
    parts: tuple[DecodeRows | ShardedRows, ...]
    """Parts, computed one after the other in the same memory."""
    first: int
    group: Group | None
    workspace: Tensor
    """Memory of the plan of the part that is being computed."""
    out_UHV: Tensor
    out_THV: Tensor

    @staticmethod
    def of(
        heads: Heads,
        q_THD: Tensor,
        out_THV: Tensor,
        chunks: ChunkRows,
        first: int,
        scratch: Scratch,
        group: Group | None = None,
    ) -> AbsorbedChunks:
        """Make the backend of the prefill rows' tokens alone, with their roped queries and the place for their output.
        `group`: see `Batch`."""
        queries = chunks.token_U.shape[0]
        q_UHD = scratch.empty(queries, *q_THD.shape[1:], dtype=q_THD.dtype)
        out_UHV = scratch.empty(queries, *out_THV.shape[1:], dtype=out_THV.dtype)
        parts = chunks.parts()
        first_queries, largest = parts[0]
        if group is not None:
            count, pages = largest.page_RP.shape
            largest = replace(largest, own=OwnEntries.allocate(count, chunks.width, pages, scratch.empty))
        workspace = scratch.empty(0, dtype=torch.uint8)

        def reserve(size: int) -> Tensor:
            nonlocal workspace
            workspace = scratch.empty(size, dtype=torch.uint8)
            return workspace

        plan_rows(heads, largest, chunks.width, first, reserve, group=group)
        rows: tuple[DecodeRows | ShardedRows, ...]
        if group is None:
            memory = DecodeMemory.of(heads, largest.length_R.shape[0], chunks.width, scratch)
            rows = tuple(
                DecodeRows(part, first, q_UHD[where], None, memory.first(part.length_R.shape[0]), out_UHV[where])
                for where, part in parts
            )
        else:
            of_all = ShardedRows.of(heads, group, largest, q_UHD[first_queries], None, out_UHV[first_queries], scratch)
            rows = tuple(of_all.of_first(part, q_UHD[where], out_UHV[where]) for where, part in parts)
        return AbsorbedChunks(chunks, q_THD, q_UHD, rows, first, group, workspace, out_UHV, out_THV)

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        torch.index_select(self.q_THD, 0, self.chunks.token_U, out=self.q_UHD)
        for part in self.parts:
            # One workspace for all parts, so each is planned when its turn comes.
            planned = plan_rows(
                heads, part.rows, self.chunks.width, self.first, lambda size: self.workspace, group=self.group
            )
            replace(part, rows=planned).attend(heads, cache_PKC)
        torch.index_select(self.out_UHV, 0, self.chunks.place_T, out=self.out_THV)
