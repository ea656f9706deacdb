"""Sums over ranks in one exchange: every rank writes its part into all others' memory, and adds up what arrives, or
keeps it side by side.

A rank's *inbox* has room for one part of every rank, twice. Two calls in a row use different halves. An inbox is empty
where its words are `EMPTY`, which no part holds (a part's words of that value, which are NaN, are written as another
NaN), so data say themselves when they are there: nobody signals, and no fence orders anything. Whoever has read a word
empties it. A rank comes to the call after next only when it has everyone's part of the next one, which they write after
their whole kernel of this one: so by the time anybody writes to a half again, it is empty.

This is how NCCL's LL protocol and TensorRT-LLM's "Lamport" kernels exchange data, with the word itself as the flag.

Shape legend: R ranks, T tokens, E features, N rows, Y columns of a rank, L lanes. A lane is what the program of one
index has of all memory, in every call: so programs need not know of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.one_shot import launch
from kernels.one_shot.launch import EMPTY, MOST_BYTES, PIECE_BYTES
from kernels.pending_norm import PendingNorm

__all__ = ["MOST_BYTES", "PIECE_BYTES", "Inbox", "one_shot_add", "one_shot_gather", "one_shot_sum"]

BUFFERS: Final = 2


@dataclass(frozen=True)
class Inbox:
    """Inbox of one rank. Its calls are ordered by one stream."""

    own: Tensor
    """uint8 [`Inbox.nbytes`], which the other ranks can write; whole pieces, empty before anybody's first call."""
    address_R: Tensor
    """int64: where each rank's inbox begins, as this rank reaches it."""
    turn_L: Tensor
    """int32: calls so far of each lane; 0 at first."""
    rank: int

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Fields in their order."""
        return self.own, self.address_R, self.turn_L, self.rank

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the bytes of an inbox, for this number of ranks."""
        return BUFFERS * ranks * MOST_BYTES

    @staticmethod
    def of(own: Tensor, addresses: list[int], rank: int) -> Inbox:
        """Make an inbox over memory that becomes empty; every rank's has to be before anybody's first call."""
        own.view(torch.int32).fill_(EMPTY)
        address_R = torch.tensor(addresses, dtype=torch.int64, device=own.device)
        return Inbox(own, address_R, torch.zeros(launch.LANES, dtype=torch.int32, device=own.device), rank)


def one_shot_sum(part: Tensor, inbox: Inbox, out: Tensor, *, dependent: bool = False) -> None:
    """out = the sum over ranks of their `part`, added in fp32 in the order of ranks and rounded once.

    All ranks together, on GPUs that can write each other's memory. `part` and `out` are contiguous, of one size, of at
    most `MOST_BYTES`, and of one dtype, bf16 or fp32; whole pieces of `PIECE_BYTES`, and aligned to them. `out` may be
    `part`. All ranks get the same bits. It ends when every rank's part has arrived. `dependent`: programmatic dependent
    launch; it waits before it reads anything that changes.
    """
    launch.one_shot("sum", part, inbox.fields, out, dependent=dependent)


def one_shot_add(
    part_TE: Tensor, inbox: Inbox, residual_TE: Tensor, norm_E: Tensor, out: PendingNorm, *, dependent: bool = False
) -> None:
    """residual += the sum over ranks of `part_TE`, which is not rounded; `out` = its pending norm.

    As `one_shot_sum` and then `kernels.pending_norm.add`. bf16 but for the residual, which is fp32; all contiguous.
    """
    if not residual_TE.is_contiguous() or not out.x_TE.is_contiguous():
        raise ValueError("residual and norm are contiguous")
    dtypes = part_TE.dtype, norm_E.dtype, residual_TE.dtype
    if dtypes != (torch.bfloat16, torch.bfloat16, torch.float32):
        raise ValueError(f"parts and weights of the norm are in bf16, the residual in fp32: {dtypes}")
    added = residual_TE, norm_E, out.square_TP
    row_bytes = part_TE.shape[1] * part_TE.itemsize
    launch.one_shot("add", part_TE, inbox.fields, out.x_TE, row_bytes=row_bytes, added=added, dependent=dependent)


def one_shot_gather(part_NY: Tensor, inbox: Inbox, out_NRY: Tensor, *, dependent: bool = False) -> None:
    """out[n, r] = row n of rank r's part. Rows are whole pieces; else as `one_shot_sum`.

    NaN stay NaN, but words of `EMPTY` become others.
    """
    row_bytes = part_NY.shape[1] * part_NY.itemsize
    launch.one_shot("gather", part_NY, inbox.fields, out_NRY, row_bytes=row_bytes, dependent=dependent)
