"""The kernel's PTX, a rank after the other: each finds what the others would have written by then."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import one_shot, pending_norm
from kernels.one_shot import MOST_BYTES, Inbox, one_shot_add, one_shot_gather, one_shot_sum
from kernels.one_shot.words import EMPTY
from kernels.pending_norm import PendingNorm
from tests.support.ptx import emulated

LANES, THREADS = 3, 128
WORDS = 4
"""Words of a piece."""


class Ranks:
    """Inboxes of all ranks, in one piece of memory, which all can write."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        size = Inbox.nbytes(ranks)
        self.memory = torch.zeros(ranks * size // 4, dtype=torch.int32)
        owns = list(self.memory.view(torch.uint8).split(size))
        self.inboxes = [Inbox.of(own, [x.data_ptr() for x in owns], rank) for rank, own in enumerate(owns)]
        self.turn_L = self.inboxes[0].turn_L.clone()

    def places(self, source: int, pieces: int) -> tuple[Tensor, Tensor]:
        """Return which of `pieces` pieces from rank `source` stands where, by words of an inbox."""
        programs = min(LANES, math.ceil(pieces / THREADS))
        steps = 1 << math.ceil(math.log2(math.ceil(pieces / (programs * THREADS))))
        step, lane, thread = torch.meshgrid(*map(torch.arange, (steps, programs, THREADS)), indexing="ij")
        piece = (step * programs + lane) * THREADS + thread
        room = (self.turn_L[lane] % 2 * self.ranks + source) * (MOST_BYTES // 4)
        place = room + ((lane * 4 + step) * THREADS + thread) * WORDS
        return piece.flatten(), place.flatten()[:, None] + torch.arange(WORDS)

    def arrive(self, at: int, source: int, part: Tensor) -> None:
        """Let a part arrive at a rank's inbox, as rank `source` would write it."""
        _, place = self.places(source, part.nbytes // 16)
        self.words(at)[place] = self.sent(source, part)

    def sent(self, source: int, part: Tensor) -> Tensor:
        """Return what rank `source` writes to the places of its part."""
        piece, _ = self.places(source, part.nbytes // 16)
        words = part.view(torch.int32).flatten().view(-1, WORDS)[piece.clamp(max=part.nbytes // 16 - 1)]
        words = words.where(words != EMPTY, 0x7FFF7FFF)
        return words.where((piece < part.nbytes // 16)[:, None], 0)

    def words(self, at: int) -> Tensor:
        """A rank's inbox."""
        return self.inboxes[at].own.view(torch.int32)

    def next_call(self) -> None:
        """All have made the last one."""
        self.turn_L = self.inboxes[0].turn_L.clone()
        assert all(torch.equal(inbox.turn_L, self.turn_L) for inbox in self.inboxes)


def summed(parts: list[Tensor]) -> Tensor:
    """Add up in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def alike(one: Tensor, other: Tensor) -> bool:
    """The same numbers, the same signs of zero, NaN in the same places."""
    nan = one.isnan()
    bits = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return torch.equal(nan, other.isnan()) and torch.equal(one.view(bits)[~nan], other.view(bits)[~nan])


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "LANES", LANES)


def in_turns(every: Ranks, parts: list[Tensor], call: Callable[[int, Inbox, Tensor], None]) -> None:
    """Make one call on every rank: of the rank, its inbox and its part."""
    for rank, own in enumerate(parts):
        for other in range(rank + 1, every.ranks):
            every.arrive(rank, other, parts[other])
        with emulated(seed=rank) as names:
            call(rank, every.inboxes[rank], own.clone())
        assert names == ["one_shot"]
        assert bool((every.words(rank) == EMPTY).all())
        _, place = every.places(rank, own.nbytes // 16)
        for other in range(every.ranks):
            if other != rank:
                assert torch.equal(every.words(other)[place], every.sent(rank, own))
            if other < rank:  # it has read this, as the test wrote it
                every.words(other)[place] = EMPTY
    assert bool((every.memory == EMPTY).all())
    every.next_call()


SOME_RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 8))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_every_rank_gets_the_sum_and_leaves_its_inbox_empty(ranks: int, dtype: torch.dtype) -> None:
    """Calls of other sizes in turns, in place and not, dependent and not, of words like no others."""
    every, random = Ranks(ranks), torch.Generator().manual_seed(ranks)
    for call, pieces in enumerate((1, THREADS + 3, LANES * THREADS, 3 * LANES * THREADS - 7, 2)):
        numbers = torch.randn(ranks, pieces * 16 // dtype.itemsize, generator=random) * 100
        parts = list(numbers.to(dtype))
        parts[0].view(torch.int32)[0] = EMPTY
        parts[1][-1], parts[-1][0] = -0.0, -torch.inf
        want = summed(parts)

        def sum(rank: int, inbox: Inbox, part: Tensor, call: int = call, want: Tensor = want) -> None:
            out = part if call % 2 else torch.full_like(part, 7)
            one_shot_sum(part, inbox, out, dependent=call % 3 != 0)
            assert alike(out, want)

        in_turns(every, parts, sum)


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_every_rank_gets_all_parts_side_by_side(ranks: int) -> None:
    every, random = Ranks(ranks), torch.Generator().manual_seed(ranks)
    for rows, columns in ((1, 4), (3, 44), (5, 4 * THREADS)):
        parts = list(torch.randn(ranks, rows, columns, generator=random))
        parts[1][0, 0] = torch.nan
        want = torch.stack(parts, dim=1)

        def gather(rank: int, inbox: Inbox, part: Tensor, want: Tensor = want) -> None:
            out = torch.full_like(want, 7)
            one_shot_gather(part, inbox, out, dependent=True)
            assert alike(out, want)

        in_turns(every, parts, gather)


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_the_sum_enters_the_residual(ranks: int) -> None:
    """Rows that programs share, or of which a program has several."""
    every, random = Ranks(ranks), torch.Generator().manual_seed(ranks)
    for tokens, features in ((1, 16), (3, 2048), (5, 48)):
        parts = list(torch.randn(ranks, tokens, features, generator=random).bfloat16())
        before = torch.randn(tokens, features, generator=random)
        norm = torch.randn(features, generator=random).bfloat16()
        want = before + torch.stack(parts).float().sum(0)

        def add(rank: int, inbox: Inbox, part: Tensor, shown: tuple[Tensor, ...] = (before, norm, want)) -> None:
            before, norm, want = shown
            residual = before.clone()
            out = PendingNorm.empty(*before.shape, 1e-6, torch.bfloat16, torch.zeros)
            one_shot_add(part, inbox, residual, norm, out, dependent=rank % 2 == 0)
            assert torch.allclose(residual, want, rtol=0, atol=2e-6)
            expected = PendingNorm.empty(*before.shape, 1e-6, torch.bfloat16, torch.empty)
            pending_norm.write(residual, norm, expected)
            assert torch.equal(out.x_TE, expected.x_TE)
            assert torch.allclose(out.square_TP, expected.square_TP, rtol=1e-6)

        in_turns(every, parts, add)


def test_calls_in_a_row_on_a_stream() -> None:
    """The output of the kernel before is read behind the wait, and from no stale line."""
    every = Ranks(2)
    parts = [torch.randn(2, 1024).bfloat16() for _ in range(2)]
    out = torch.empty(1024, dtype=torch.bfloat16)
    with emulated(seed=3, consecutive=True):
        for call in range(2):
            every.arrive(0, 1, parts[1][call])
            one_shot_sum(parts[0][call], every.inboxes[0], out, dependent=True)
            assert alike(out, summed([parts[0][call], parts[1][call]]))
            every.turn_L = every.inboxes[0].turn_L.clone()


def test_what_does_not_fit_is_refused() -> None:
    inbox = Ranks(2).inboxes[0]
    for part in (torch.zeros(7), torch.zeros(8, dtype=torch.float16), torch.zeros(MOST_BYTES // 4 + 4)):
        with pytest.raises(ValueError, match="part"):
            one_shot_sum(part, inbox, part)
    for out in (torch.zeros(16), torch.zeros(4)):
        with pytest.raises(ValueError, match="a result of"):
            one_shot_sum(torch.zeros(8), inbox, out)
    with pytest.raises(ValueError, match="in rows of 24"):
        one_shot_gather(torch.zeros(2, 6), inbox, torch.zeros(2, 2, 6))
    norm = PendingNorm.empty(2, 16, 1e-6, torch.bfloat16, torch.empty)
    with pytest.raises(ValueError, match="contiguous"):
        one_shot_add(torch.zeros(2, 16).bfloat16(), inbox, torch.zeros(2, 32)[:, :16], torch.zeros(16), norm)
    with pytest.raises(ValueError, match="weights of the norm are in bf16"):
        one_shot_add(torch.zeros(2, 16).bfloat16(), inbox, torch.zeros(2, 16), torch.zeros(16), norm)
    with pytest.raises(ValueError, match="alike"):
        one_shot_sum(torch.zeros(8), inbox, torch.zeros(8, dtype=torch.bfloat16))
