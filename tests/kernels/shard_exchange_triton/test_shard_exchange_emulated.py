"""The kernels' PTX, a shard after the other: each finds what the others would have written by then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import shard_exchange
from kernels.mla_decode.strands import merge_strands
from kernels.one_shot.words import EMPTY
from kernels.shard_exchange import Inbox, gather_shards, merge_parts, merge_shards
from kernels.strands import merge_tree
from tests.support.ptx import emulated

LANES = 4
WORDS = 4
"""Words of a piece."""


class AllShards:
    """Inboxes of all shards, in one piece of memory, which all can write."""

    def __init__(self, count: int) -> None:
        self.count = count
        shard_exchange.MOST_BYTES = count << 16
        size = Inbox.nbytes(count)
        memory = torch.zeros(count * size // 4, dtype=torch.int32)
        owns = list(memory.view(torch.uint8).split(size))
        self.inboxes = [Inbox.of(own, [x.data_ptr() for x in owns], index) for index, own in enumerate(owns)]

    def words(self, at: int) -> Tensor:
        return self.inboxes[at].own.view(torch.int32)

    def in_turns(self, call: Callable[[int, Inbox], None]) -> None:
        """Make a call on every shard. What a shard has sent is found out by letting it call with inboxes in which all
        that it waits for is there already, as zeros; then all call again, and find what was sent."""
        sent: list[list[Tensor]] = []
        turns = [inbox.turn_L.clone() for inbox in self.inboxes]
        for index, inbox in enumerate(self.inboxes):
            self.words(index).fill_(0)
            with emulated(seed=index):
                call(index, inbox)
            sent.append([self.words(other).clone() for other in range(self.count)])
            for other in range(self.count):
                self.words(other).fill_(EMPTY)
        for inbox, turn_L in zip(self.inboxes, turns, strict=True):
            inbox.turn_L.copy_(turn_L)
        for index, inbox in enumerate(self.inboxes):
            for source in range(self.count):
                if source != index:
                    arrived = sent[source][index]
                    self.words(index).copy_(torch.where(arrived == EMPTY, self.words(index), arrived))
            assert bool((self.words(index) != EMPTY).any())
            with emulated(seed=10 + index):
                call(index, inbox)
            assert bool((self.words(index) == EMPTY).all()), "all that has arrived was taken"
            for other in range(self.count):
                self.words(other).fill_(EMPTY)
        assert all(torch.equal(inbox.turn_L, self.inboxes[0].turn_L) for inbox in self.inboxes)


@pytest.fixture(autouse=True)
def few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that some sizes below need several calls for."""
    monkeypatch.setattr(shard_exchange, "LANES", LANES)
    monkeypatch.setattr(shard_exchange, "MANY_THREADS", 256)
    monkeypatch.setattr(shard_exchange, "MOST_BYTES", 0)  # `AllShards` says how many


COUNTS = [2, *(pytest.param(count, marks=pytest.mark.long) for count in (4, 8))]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@DTYPES
@pytest.mark.parametrize("count", COUNTS)
def test_every_shard_gets_all_parts_side_by_side(count: int, dtype: torch.dtype) -> None:
    """Calls of other sizes in turns: one piece, less than a program, several steps, several calls."""
    every, random = AllShards(count), torch.Generator().manual_seed(count)
    for tokens, columns in ((1, 16), (3, 88), (7, 576), (40, 512)):
        parts = torch.randn(count, tokens, columns, generator=random).to(dtype)
        parts[1, 0, 0] = torch.nan
        parts[0].view(torch.int32)[0, 0] = EMPTY
        seen: list[Tensor] = []

        def call(index: int, inbox: Inbox, parts: Tensor = parts, seen: list[Tensor] = seen) -> None:
            out = torch.full((parts.shape[1], count, parts.shape[2]), 7.0, dtype=dtype)
            gather_shards(parts[index], inbox, out, dependent=True)
            seen.append(out)

        every.in_turns(call)
        for out in seen[count:]:
            torch.testing.assert_close(out, parts.transpose(0, 1).contiguous(), rtol=0, atol=0, equal_nan=True)


def merged(part_SDHL: Tensor, lse_SDH: Tensor) -> Tensor:
    """One token's heads of one shard, from what all have: by one formula, in fp64."""
    weight = lse_SDH.double().softmax(0).nan_to_num(0.0).unsqueeze(-1)
    return torch.where(weight > 0, weight * part_SDHL.double(), 0.0).sum(0)


@DTYPES
@pytest.mark.parametrize("count", COUNTS)
def test_heads_come_to_their_shard_and_are_weighted(count: int, dtype: torch.dtype) -> None:
    """Planted faults that this finds: log-sum-exps to the base of 2; -inf less -inf; another head's part."""
    every, random = AllShards(count), torch.Generator().manual_seed(count)
    for tokens, heads, latent in ((1, 1, 8), (3, 2, 24), (5, 4, 64), (10, 3, 512)):
        part = torch.randn(count, tokens, count, heads, latent, generator=random).to(dtype)
        lse = 4 * torch.randn(count, tokens, count, heads, generator=random)
        empty = torch.rand(lse.shape, generator=random) < 0.4
        empty[:, 0, :, 0] = True
        lse.masked_fill_(empty, -torch.inf)
        part.masked_fill_(empty.unsqueeze(-1), 0.0)
        seen: list[Tensor] = []
        totals: list[Tensor] = []
        drawn = part, lse, seen, totals

        def call(index: int, inbox: Inbox, drawn: Any = drawn) -> None:
            part, lse, seen, totals = drawn
            out = torch.full((part.shape[1], *part.shape[3:]), 7.0, dtype=dtype)
            total = torch.full((part.shape[1], part.shape[3]), 7.0)
            merge_shards(part[index], lse[index], inbox, out, total, dependent=True)
            totals.append(total)
            seen.append(out)

        every.in_turns(call)
        for index, out in enumerate(seen[count:]):
            want = merged(part[:, :, index], lse[:, :, index])
            assert bool((out[0, 0] == 0).all())
            close = 2**-8 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(out.double(), want, atol=close, rtol=close)
            total = lse[:, :, index].double().logsumexp(0)
            torch.testing.assert_close(totals[count + index].double(), total, atol=1e-5, rtol=1e-5)


def in_one_kernel(part_DXL: Tensor, lse_DX: Tensor) -> tuple[Tensor, Tensor]:
    """The tree over parts as the kernel has it that merges the strands of a whole row: as if each part were a piece of
    a strand of its own."""
    (count, vectors, latent), out = part_DXL.shape, torch.full(part_DXL.shape[1:], 7.0)
    lse, record = torch.full((vectors,), 7.0), torch.tensor([0, 0, count, 0], dtype=torch.int32)
    with emulated(seed=1):
        merge_strands[(1, vectors, 1)](
            *(part_DXL.contiguous(), lse_DX.contiguous(), record, out, lse, vectors, 0),
            LATENT=latent,
            COLUMNS=latent,
            STRANDS=count,
            LAST=True,
            FINEST=1,
            DEPENDENT=False,
            enable_fp_fusion=False,
        )
    return out, lse


@pytest.mark.parametrize("count", COUNTS)
def test_strands_are_merged_with_the_bits_of_one_rank(count: int) -> None:
    """Whatever rank merges. Planted faults that this finds: strands rotated, so that others are merged first; the
    log-sum-exp of a shard without entries."""
    every, random = AllShards(count), torch.Generator().manual_seed(count)
    tokens, heads, latent = 5, 3, 64
    part = torch.randn(count, tokens, count, heads, latent, generator=random)
    lse = 4 * torch.randn(count, tokens, count, heads, generator=random)
    lse[:, 1] = lse[:1, 1].clone()  # equal ones
    empty = torch.rand(lse.shape, generator=random) < 0.3
    empty[:, 0, :, 0] = True
    lse.masked_fill_(empty, -torch.inf)
    part.masked_fill_(empty.unsqueeze(-1), 0.0)
    part[0, 4, :, 2, 7] = torch.nan
    seen: list[tuple[Tensor, Tensor]] = []

    def call(index: int, inbox: Inbox) -> None:
        out, total = torch.full((tokens, heads, latent), 7.0), torch.full((tokens, heads), 7.0)
        merge_shards(part[index], lse[index], inbox, out, total, tree=True, dependent=True)
        seen.append((out, total))

    every.in_turns(call)
    for index, (out, total) in enumerate(seen[count:]):
        whole = in_one_kernel(part[:, :, index].flatten(1, 2), lse[:, :, index].flatten(1, 2))
        torch.testing.assert_close(out.flatten(0, 1), whole[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(total.flatten(), whole[1], rtol=0, atol=0)
        assert out[4, 2, 7].isnan()
        natural = lse[:, :, index] * math.log(2)
        want = merged(part[:, :, index].nan_to_num(), natural)
        torch.testing.assert_close(out.nan_to_num().double()[:4], want[:4], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(total.double(), natural.double().logsumexp(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
def test_non_finite_rows_stay_so(tree: bool) -> None:
    """Whether it is the log-sum-exp that says so, or the output alone, as attention leaves them where all that a shard
    has of a row lies beside a NaN; and of no other row. Planted faults that this finds: weight 0 takes nothing,
    whatever it weights; the larger of a number and NaN is the number."""
    every = AllShards(2)
    part, lse = torch.randn(2, 4, 2, 1, 8), torch.randn(2, 4, 2, 1)
    lse[1, 0] = torch.nan
    lse[1, 1], part[1, 1] = -torch.inf, torch.nan
    lse[:, 2], part[:, 2], part[0, 2, :, 0, 3] = -torch.inf, 0.0, torch.nan
    outs: list[Tensor] = []

    def call(index: int, inbox: Inbox) -> None:
        outs.append(torch.zeros(4, 1, 8))
        merge_shards(part[index], lse[index], inbox, outs[-1], torch.zeros(4, 1), tree=tree)

    every.in_turns(call)
    for index, out in enumerate(outs[2:]):
        in_torch = torch.zeros(4, 1, 8)
        if tree:
            in_torch = merge_tree(list(zip(part[:, :, index], lse[:, :, index], strict=True)))[0]
        else:
            merge_parts(part[:, :, index], lse[:, :, index], in_torch)
        for found in (out, in_torch):
            assert bool(found[:2].isnan().all())
            assert found[2, 0].isnan().tolist() == [column == 3 for column in range(8)]
            assert bool(found[3].isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    inbox = AllShards(2).inboxes[0]
    with pytest.raises(ValueError, match="in bf16 or fp32"):
        gather_shards(torch.zeros(1, 8).half(), inbox, torch.zeros(1, 2, 8).half())
    with pytest.raises(ValueError, match="whole pieces of 16 bytes"):
        gather_shards(torch.zeros(1, 6), inbox, torch.zeros(1, 2, 6))
    with pytest.raises(ValueError, match="side by side"):
        gather_shards(torch.zeros(1, 8), inbox, torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="for a result of"):
        merge_shards(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2), inbox, torch.zeros(1, 1, 8), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="log-sum-exps are fp32"):
        merge_shards(
            torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1).half(), inbox, torch.zeros(1, 1, 8), torch.zeros(1, 1)
        )
    with pytest.raises(ValueError, match="does not fit into 4 lanes"):
        gather_shards(torch.zeros(1, 1 << 16), inbox, torch.zeros(1, 2, 1 << 16))
