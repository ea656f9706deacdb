"""The kernel's PTX, a rank after the other: each finds what the others would have written by then."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.one_shot import Inbox, launch, one_shot_sum
from kernels.one_shot.kernel import EMPTY
from tests.support.ptx import emulated

LANES, THREADS = 3, 128
WORDS = 4
"""Of a piece."""


class Ranks:
    """Their inboxes, in one piece of memory, which all can write."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        size = Inbox.nbytes(ranks)
        self.memory = torch.zeros(ranks * size // 4, dtype=torch.int32)
        owns = list(self.memory.view(torch.uint8).split(size))
        self.inboxes = [Inbox.of(own, [x.data_ptr() for x in owns], rank) for rank, own in enumerate(owns)]
        self.turn_L = self.inboxes[0].turn_L.clone()

    def places(self, source: int, pieces: int) -> tuple[Tensor, Tensor]:
        """Of a part of so many pieces from rank `source`: which of them stands where, by words of an inbox."""
        programs = min(LANES, math.ceil(pieces / THREADS))
        steps = 1 << math.ceil(math.log2(math.ceil(pieces / (programs * THREADS))))
        step, lane, thread = torch.meshgrid(*map(torch.arange, (steps, programs, THREADS)), indexing="ij")
        piece = (step * programs + lane) * THREADS + thread
        room = (self.turn_L[lane] % 2 * self.ranks + source) * (launch.MOST_BYTES // 4)
        place = room + ((lane * 4 + step) * THREADS + thread) * WORDS
        return piece.flatten(), place.flatten()[:, None] + torch.arange(WORDS)

    def arrive(self, at: int, source: int, part: Tensor) -> None:
        """At a rank's inbox, as rank `source` would write it."""
        _, place = self.places(source, part.nbytes // 16)
        self.words(at)[place] = self.sent(source, part)

    def sent(self, source: int, part: Tensor) -> Tensor:
        """What rank `source` writes to the places of its part."""
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
    """In the order of ranks."""
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
    monkeypatch.setattr(launch, "LANES", LANES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)])
def test_every_rank_gets_the_sum_and_leaves_its_inbox_empty(ranks: int, dtype: torch.dtype) -> None:
    """Calls of other sizes in turns, in place and not, dependent and not; the first ones' words are like no others."""
    every, random = Ranks(ranks), torch.Generator().manual_seed(ranks)
    for call, pieces in enumerate((1, THREADS + 3, LANES * THREADS, 3 * LANES * THREADS - 7, 2)):
        numbers = torch.randn(ranks, pieces * 16 // dtype.itemsize, generator=random) * 100
        parts = list(numbers.to(dtype))
        parts[0].view(torch.int32)[0] = EMPTY
        parts[1][-1], parts[-1][0] = -0.0, -torch.inf
        want = summed(parts)
        for rank, own in enumerate(parts):
            for other in range(rank + 1, ranks):
                every.arrive(rank, other, parts[other])
            part = own.clone()
            out = part if call % 2 else torch.full_like(part, 7)
            with emulated(seed=call) as names:
                one_shot_sum(part, every.inboxes[rank], out, dependent=call % 3 != 0)
            assert names == ["one_shot_sum"]
            assert alike(out, want)
            assert bool((every.words(rank) == EMPTY).all())
            _, place = every.places(rank, pieces)
            for other in range(ranks):
                if other != rank:
                    assert torch.equal(every.words(other)[place], every.sent(rank, own))
                if other < rank:  # it has read this, as the test wrote it
                    every.words(other)[place] = EMPTY
        assert bool((every.memory == EMPTY).all())
        every.next_call()


def test_calls_in_a_row_on_a_stream() -> None:
    """What the kernel before has written is read behind the wait, and from no stale line."""
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
    for part in (torch.zeros(7), torch.zeros(8, dtype=torch.float16), torch.zeros(launch.MOST_BYTES // 4 + 4)):
        with pytest.raises(ValueError, match="part"):
            one_shot_sum(part, inbox, part)
    with pytest.raises(ValueError, match="alike"):
        one_shot_sum(torch.zeros(8), inbox, torch.zeros(8, dtype=torch.bfloat16))
