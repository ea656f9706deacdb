"""The rows of a step that is proven, and what the step may do to the cache because of them.

Shape legend: P pages in play, K entries per page, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS, WHOLE, Shards


@dataclass(frozen=True)
class Row:
    """A decode row or a prefill row. The step may write the entries from `cached` to `end`."""

    slot: int
    start: int
    """Position of the first token that the step feeds."""
    cached: int
    """Entries that the cache holds before the step: `start`, or one more where that token is recomputed and its write
    suppressed."""
    end: int
    """Position behind the last token that the step feeds."""
    logits_rows: int
    """Logits rows; 0 for a chunk in the middle of a prompt, which is not sampled."""
    drafts: int
    """Drafts that the step makes for the row."""
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """Accesses that a step may make to the pages in play in one kind of layer."""

    poison_PK: Tensor
    """bool: the step may not read them, unless it has written them."""
    kept_PK: Tensor
    """bool: the step may not change them."""
    own_E: Tensor
    """int64, page * entries of a page + offset: a row's own, which the step may write; those in pages of this rank, by
    their local ids."""

    def to(self, device: torch.device) -> Entries:
        """Copy the entries to a device; on a GPU without waiting for it."""
        if device.type == "cpu":
            return self
        of_all = (self.poison_PK, self.kept_PK, self.own_E)
        return Entries(*(x.pin_memory().to(device, non_blocking=True) for x in of_all))


def pages_in_play(rows: Sequence[Row], unowned: Sequence[int]) -> list[int]:
    """The pages that no row owns, the null page first, then those of the rows."""
    return [*unowned, *(page for row in rows for page in row.pages)]


def target_entries(
    rows: Sequence[Row], unowned: Sequence[int], shards: Shards = WHOLE, tokens_of_entry: int = 1
) -> Entries:
    """Return the entries of the target's layers in which one stands for so many tokens. `unowned`: pages in play that
    no row owns, the null page first; so below."""
    return _entries(rows, unowned, shards, [(0, row.cached, row.cached, row.end) for row in rows], tokens_of_entry)


def draft_entries(rows: Sequence[Row], unowned: Sequence[int], shards: Shards = WHOLE) -> Entries:
    """Return the entries of the draft layer. Its entry j pairs the hidden state of position j - 1 with the token at j:
    entries lie one further than the target's, entry 0 does not exist, and writes are not suppressed. Behind the
    verified tokens it holds the drafts, but for the last one, which is never fed."""
    spans = [(1, row.start + 1, row.start + 1, row.end + max(row.drafts, 1)) for row in rows]
    return _entries(rows, unowned, shards, spans)


def _entries(
    rows: Sequence[Row],
    unowned: Sequence[int],
    shards: Shards,
    spans: Sequence[tuple[int, int, int, int]],
    tokens_of_entry: int = 1,
) -> Entries:
    """`spans`: of every row the positions from which to which entries are cached, and those that the step may write.
    An entry is cached, or written, with the last of its tokens. On the host, where finding the rows' own entries waits
    for nothing."""
    of_pages = [(0, 0, 0, 0, 0)] * len(unowned)
    for row, span in zip(rows, spans, strict=True):
        of_pages += [(PAGE_TOKENS * index, *span) for index in range(len(row.pages))]
    begin_P1, *span_P1 = torch.tensor(of_pages).unsqueeze(-1).unbind(1)
    own_tokens = min(tokens_of_entry, PAGE_TOKENS)  # of an entry, on its page
    offset_K = torch.arange(PAGE_TOKENS // own_tokens)
    last_PK = begin_P1 + (offset_K + 1) * own_tokens - 1
    whole_PK = (last_PK + 1) % tokens_of_entry == 0  # else the last of its tokens is on a page to come
    cached_PK, own_PK = (
        (last_PK >= from_P1) & (last_PK < to_P1) & whole_PK for from_P1, to_P1 in (span_P1[:2], span_P1[2:])
    )
    kept_PK = ~own_PK
    kept_PK[0] = False  # the null page is for everybody to write
    pages = pages_in_play(rows, unowned)
    first_P1 = len(offset_K) * torch.tensor([shards.local(page) for page in pages]).unsqueeze(1)
    here_P1 = torch.tensor([shards.owns(page) for page in pages]).unsqueeze(1)
    return Entries(~cached_PK, kept_PK, (first_P1 + offset_K)[own_PK & here_P1])
