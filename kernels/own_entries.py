"""A shard's own part of decode rows, where ranks share out the pages of one latent cache (`kernels.page.Shards`).

Shape legend: R rows, W width, P most pages of a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards

_PAGE = tl.constexpr(PAGE_TOKENS)
_COLUMNS = 256
"""Page-table entries that a program looks at together."""


@dataclass(frozen=True)
class OwnEntries:
    """The entries of decode rows that lie on this shard, one page behind the other: its part of a row is a row of its
    own, but for what a token may see of it, which does not grow by one from token to token."""

    page_RP: Tensor
    """int32: local ids of the own pages with entries, in the order of the row; the null page behind them."""
    length_R: Tensor
    """int32: own entries that the last of a row's tokens sees, the longest of its bounds."""
    seen_RX: Tensor
    """int32 [R, W + 1]: `bound_RW`, and `first_R` behind it. Kernels have few registers for addresses."""

    @property
    def bound_RW(self) -> Tensor:
        """How many of the own entries each token sees, the first ones."""
        return self.seen_RX[:, :-1]

    @property
    def first_R(self) -> Tensor:
        """Own entries that no token sees, before those."""
        return self.seen_RX[:, -1]

    @staticmethod
    def allocate(rows: int, width: int, pages: int, empty: Callable[..., Tensor]) -> OwnEntries:
        """Take memory from `empty(*shape, dtype=...)`."""
        shapes = (rows, pages), (rows,), (rows, width + 1)
        return OwnEntries(*(empty(*shape, dtype=torch.int32) for shape in shapes))

    def of_first(self, rows: int) -> OwnEntries:
        """The part of the first so many rows."""
        return OwnEntries(self.page_RP[:rows], self.length_R[:rows], self.seen_RX[:rows])


def own_entries(page_RP: Tensor, length_R: Tensor, out: OwnEntries, shards: Shards, *, first: int = 0) -> None:
    """Find the own part of every row.

    `page_RP` (int32): page tables of global ids, arbitrary behind a row's length. `length_R` (int32): entries that the
    last of a row's W tokens sees in the whole cache; token j sees W - 1 - j fewer. `first`: entries of every row, less
    than a page, that no token sees. Over all shards the bounds of a token add up to what it sees, and `first_R` of a
    row that has entries to `first`.
    """
    if not 0 <= first < PAGE_TOKENS:
        raise ValueError(f"first = {first}: only entries of the first page can be left out")
    compute = launch_own_entries if page_RP.is_cuda else own_entries_reference
    compute(page_RP, length_R, out, shards, first)


def own_entries_reference(page_RP: Tensor, length_R: Tensor, out: OwnEntries, shards: Shards, first: int) -> None:
    """`own_entries` in plain torch."""
    count, width = shards.count, out.bound_RW.shape[1]
    begin_P = torch.arange(0, page_RP.shape[1] * PAGE_TOKENS, PAGE_TOKENS, device=page_RP.device)
    live_RP = (begin_P < length_R.unsqueeze(1)) & (page_RP != NULL_PAGE)
    own_RP = live_RP & ((page_RP - 1) % count == shards.index)
    # Stable, so that the own pages stay in order.
    own_first_RP = own_RP.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    local_RP = torch.where(own_RP, (page_RP - 1) // count + 1, NULL_PAGE)
    out.page_RP.copy_(local_RP.gather(1, own_first_RP))
    back_W = torch.arange(width - 1, -1, -1, device=page_RP.device)
    seen_RW = length_R.unsqueeze(1) - back_W
    seen_RWP = (seen_RW.unsqueeze(2) - begin_P).clamp(0, PAGE_TOKENS) * own_RP.unsqueeze(1)
    out.bound_RW.copy_(seen_RWP.sum(2))
    out.length_R.copy_(out.bound_RW[:, -1])
    out.first_R.copy_(own_RP[:, 0] * first)


def launch_own_entries(page_RP: Tensor, length_R: Tensor, out: OwnEntries, shards: Shards, first: int) -> None:
    """`own_entries` as a Triton kernel."""
    rows, width = out.bound_RW.shape
    own_entries_kernel[(rows,)](
        page_RP,
        length_R,
        out.page_RP,
        out.length_R,
        out.seen_RX,
        page_RP.shape[1],
        page_RP.stride(0),
        first,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        COLUMNS=_COLUMNS,
        SHARDS=shards.count,
        SHARD=shards.index,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["pages", "table_stride", "first"])
def own_entries_kernel(
    table,
    length_in,
    own_table,
    own_length,
    seen_out,
    pages,
    table_stride,
    first,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):
    """One program per row. It looks at some columns at a time, and keeps count of the own pages before them."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_in + row)
    lane = tl.arange(0, LANES)
    seen = length - (WIDTH - 1 - lane)
    bound = tl.zeros((LANES,), tl.int32)
    found = 0
    own_first = 0
    for start in range(0, pages, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        begin = column * _PAGE
        live = (column < pages) & (begin < length)
        page = tl.load(table + row * table_stride + column, mask=live, other=0)
        # As `Shards` has it, without negative numbers.
        own = live & (page != 0) & ((page + SHARDS - 1) % SHARDS == SHARD)
        one = own.to(tl.int32)
        at = found + tl.cumsum(one, 0) - one
        tl.store(own_table + row * pages + at, (page + SHARDS - 1) // SHARDS, mask=own)
        inside = tl.minimum(tl.maximum(seen[:, None] - begin[None, :], 0), _PAGE)
        bound += tl.sum(tl.where(own[None, :], inside, 0), 1)
        own_first += tl.sum(tl.where(own & (column == 0), first, 0), 0)
        found += tl.sum(one, 0)
    for start in range(0, pages, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tl.store(own_table + row * pages + column, 0, mask=(column < pages) & (column >= found))
    tl.store(seen_out + row * (WIDTH + 1) + lane, bound, mask=lane < WIDTH)
    tl.store(own_length + row, tl.sum(tl.where(lane == WIDTH - 1, bound, 0), 0))
    tl.store(seen_out + row * (WIDTH + 1) + WIDTH, own_first)
