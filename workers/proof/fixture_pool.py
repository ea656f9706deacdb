"""One rank's slots and cache as the pool of a proof's fixtures: what they are drawn from, and what is left behind."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields

import torch

from kernels.page import NULL_PAGE, PIECE_PAGES, Shards
from workers.models.selecting import BEYOND, selects_from
from workers.proof.rows import Row
from workers.proof.step_fixture import StepFixture
from workers.protocol.plan import Admission, SamplingParams
from workers.step.parts import StepParts


class FreePages:
    """Pages that the rows of a fixture may take. In invariant mode rows' pieces go round the ranks that share out the
    cache, as they do in service: attention has no memory for rows that lie otherwise."""

    def __init__(self, pages: Sequence[int], shards: Shards, *, in_pieces: bool) -> None:
        """`pages`: global ids, in the order in which they are taken. `in_pieces`: whether pieces go round `shards`."""
        self._shards = shards if in_pieces else Shards()
        self._of = [[page for page in pages if self._shards.owner(page) == one] for one in range(self._shards.count)]

    def __len__(self) -> int:
        return sum(map(len, self._of))

    def fits(self, count: int) -> bool:
        """Whether a row of so many pages can be taken."""
        return max(self._left_over(count)) >= 0

    def most(self) -> int:
        """Pages of the longest row that can be taken."""
        return bisect_left(range(1, len(self) + 1), True, key=lambda count: not self.fits(count))

    def take(self, count: int) -> tuple[int, ...]:
        """Take the pages of a row; they must fit. It begins with the shard with which most is left of every one's."""
        left = self._left_over(count)
        assert max(left) >= 0, f"no row of {count} pages can be taken"
        first = left.index(max(left))
        owners = [(first + column // PIECE_PAGES) % self._shards.count for column in range(count)]
        return tuple(self._of[owner].pop(0) for owner in owners)

    def _left_over(self, count: int) -> list[int]:
        """The fewest pages that are left of any shard's, for each shard with which a row of so many pages may begin."""
        have, shards = list(map(len, self._of)), self._shards
        needed = [shards.in_turns(first, 0, count) for first in range(shards.count)]
        return [min(some - taken for some, taken in zip(have, one, strict=True)) for one in needed]


class FixturePool:
    """Pool of memory for fixtures, which are set on it one after the other, by draws that are the same on every
    rank."""

    def __init__(self, parts: StepParts, seed: int, pages: int, granted: Sequence[int] | None = None) -> None:
        """`pages`: as many as the rows of one fixture may take, and one for former tenants. Equal seeds give equal
        fixtures on every rank. `granted`: global ids of the only pages that may be overwritten; None: all may."""
        self._parts = parts
        self._in_pieces = parts.model.paths.invariant and parts.state.shards.count > 1
        self._host = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(parts.device).manual_seed(seed)
        # From the whole pool, so that large addresses occur; few, so that a CPU need not back all of it with memory.
        there = range(NULL_PAGE + 1, parts.state.shards.pages(parts.cache.pages)) if granted is None else granted
        if self._in_pieces:  # of each shard its share of the rows' pieces
            pages += PIECE_PAGES * parts.state.shards.count
        self._pool = random.Random(seed).sample(there, min(len(there), pages))
        if not self._pool:
            raise RuntimeError("the self-test needs a pool of at least 2 pages, the null page included")

    def beyond_selection(self, longest: int) -> int:
        """A random length at which attention selects, where it is sparse: 0 where it never does, or where rows of so
        many tokens at most are all attended to."""
        least = selects_from(self._parts.model.config)
        return self.number(least, min(least + BEYOND, longest)) if 0 < least <= longest else 0

    def number(self, low: int, high: int) -> int:
        """A random one, both ends included."""
        return int(torch.randint(low, high + 1, (1,), generator=self._host))

    def numbers(self, count: int, end: int) -> list[int]:
        """Draw `count` random numbers below `end`."""
        return torch.randint(0, end, (count,), generator=self._host).tolist()

    def order(self, count: int) -> list[int]:
        """The numbers below `count` in random order."""
        return torch.randperm(count, generator=self._host).tolist()

    def pages(self) -> tuple[list[int], FreePages]:
        """A former tenant's page, none where the pool has but one, and those that rows may take."""
        pool = [self._pool[index] for index in self.order(len(self._pool))]
        former = pool[:1] if len(pool) > 1 else []
        return former, FreePages(pool[len(former) :], self._parts.state.shards, in_pieces=self._in_pieces)

    def fixture(self, rows: Sequence[Row], former: Sequence[int]) -> StepFixture:
        """Write these rows to slots and cache."""
        # Every other row samples, and so hot that its noise decides.
        hot = self.number(0, 1)
        sampling = [
            SamplingParams(100, temperature=2.0 * ((hot + index) % 2), seed=self.number(0, 2**40))
            for index in range(len(rows))
        ]
        return StepFixture(self._parts, rows, sampling, former, self._host, self._noise)

    def clear(self) -> None:
        """Leave nothing of any fixture behind in slots, rings and pages: not a NaN, not a page id, not a parameter."""
        parts, tensors = self._parts, self._parts.state.tensors
        for field in fields(tensors):
            getattr(tensors, field.name).zero_()
        parts.cache.zero_fill([NULL_PAGE, *self._pool])
        for ring_XLC in parts.cache.rings:
            ring_XLC.zero_()
        parts.cache.out_of_bounds_count_1.zero_()
        if parts.sampling is not None:
            greedy = SamplingParams(1, temperature=0.0)
            parts.sampling.admit([Admission(slot, greedy) for slot in range(parts.state.slots)])
            parts.sampling.fault_1.zero_()
