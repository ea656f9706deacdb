"""Exchanges of decode rows between ranks that share out the pages of one latent cache: queries go to all of them, and
what they attended to goes to the rank of each head, which merges it.

As in `kernels.one_shot`, ranks write into each other's memory, and data say themselves when they are there. A rank's
*inbox* has a slot for each other shard, twice: two calls in a row use different halves. Both kinds of calls use one
inbox; all ranks make the same calls in the same order.

Shape legend: D shards, T tokens, Y numbers of a token, H heads of a rank, L latent features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.one_shot.words import EMPTY
from kernels.shard_exchange import launch
from kernels.shard_exchange.launch import LANES, PIECE_BYTES

__all__ = ["Inbox", "gather_shards", "merge_shards"]

BUFFERS: Final = 2
MOST_BYTES: Final = 1 << 24
"""Bytes of the slots of a half, and of one that is not there. What needs more is exchanged in several calls."""


@dataclass(frozen=True)
class Inbox:
    """Inbox of one shard. Its calls are ordered by one stream."""

    own: Tensor
    """uint8 [`Inbox.nbytes`], which the other shards can write; empty before anybody's first call."""
    address_D: Tensor
    """int64: where each shard's inbox begins, as this rank reaches it."""
    turn_L: Tensor
    """int32: calls so far of each lane; 0 at first."""
    index: int
    """Number of this shard."""

    @property
    def fields(self) -> launch.Fields:
        """Fields in their order, and the bytes of a slot."""
        return self.own, self.address_D, self.turn_L, self.index, MOST_BYTES // len(self.address_D)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a slot that the program of one index has, in every call."""
        return MOST_BYTES // len(self.address_D) // LANES

    @staticmethod
    def nbytes(shards: int) -> int:
        """Return the bytes of an inbox, for this number of shards."""
        return BUFFERS * (shards - 1) * (MOST_BYTES // shards)

    @staticmethod
    def of(own: Tensor, addresses: list[int], index: int) -> Inbox:
        """Make an inbox over memory that becomes empty; every shard's has to be before anybody's first call."""
        own.view(torch.int32).fill_(EMPTY)
        address_D = torch.tensor(addresses, dtype=torch.int64, device=own.device)
        return Inbox(own, address_D, torch.zeros(LANES, dtype=torch.int32, device=own.device), index)


def gather_shards(part_TY: Tensor, inbox: Inbox, out_TDY: Tensor, *, dependent: bool = False) -> None:
    """out[t, d] = row t of shard d's part.

    All shards together, on GPUs that can write each other's memory. bf16 or fp32, contiguous, rows of whole pieces of
    `PIECE_BYTES`. NaN stay NaN, but words of `EMPTY` become others. It ends when every shard's part has arrived.
    `dependent`: programmatic dependent launch; it waits before it reads anything that changes. ValueError for what does
    not fit.
    """
    _check(part_TY, out_TDY, part_TY.shape[1])
    if out_TDY.shape != (part_TY.shape[0], len(inbox.address_D), part_TY.shape[1]):
        raise ValueError(f"parts of {tuple(part_TY.shape)} side by side, not {tuple(out_TDY.shape)}")
    for some in launch.calls(part_TY.shape[0], part_TY.shape[1] * part_TY.itemsize // PIECE_BYTES, inbox.lane_bytes):
        launch.gather(part_TY[some], inbox.fields, out_TDY[some], dependent=dependent)


def merge_shards(
    part_TDHL: Tensor,
    lse_TDH: Tensor,
    inbox: Inbox,
    out_THL: Tensor,
    out_lse_TH: Tensor,
    *,
    tree: bool = False,
    dependent: bool = False,
) -> None:
    """out, out_lse = attention of this shard's heads to the entries of all shards, and its log-sum-exp (fp32).

    `part_TDHL`, `lse_TDH` (fp32, natural logarithm): attention of the heads of every shard to the entries of this one.
    What others have of this shard's heads arrives, and the parts are weighted by the exponentials of their
    log-sum-exps, in fp32. A part of log-sum-exp -inf has output 0 and counts for nothing; where all are so, the result
    is 0. NaN in an output stays, whatever the log-sum-exp. `tree`: parts are those of `kernels.strands`, in fp32 with
    log-sum-exps to the base 2, and merged as the tree of that. Otherwise as `gather_shards`.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    tokens, heads, latent = out_THL.shape
    _check(part_TDHL, out_THL, latent)
    if tree and out_THL.dtype != torch.float32:
        raise ValueError(f"parts of strands are merged in fp32, not in {out_THL.dtype}")
    if part_TDHL.shape != (tokens, len(inbox.address_D), heads, latent) or not lse_TDH.is_contiguous():
        raise ValueError(f"parts of {tuple(part_TDHL.shape)} for a result of {tuple(out_THL.shape)}")
    if out_lse_TH.shape != (tokens, heads) or out_lse_TH.dtype != torch.float32 or not out_lse_TH.is_contiguous():
        raise ValueError(f"log-sum-exps are fp32 {(tokens, heads)}, not {tuple(out_lse_TH.shape)}")
    if lse_TDH.shape != part_TDHL.shape[:3] or lse_TDH.dtype != torch.float32:
        raise ValueError(f"log-sum-exps are fp32 {tuple(part_TDHL.shape[:3])}, not {tuple(lse_TDH.shape)}")
    places = launch.places_of(out_THL)
    items = launch.MANY_THREADS // places
    for some in launch.calls(tokens, heads * places, inbox.lane_bytes, items=items):
        found = out_THL[some], out_lse_TH[some]
        launch.merge(part_TDHL[some], lse_TDH[some], inbox.fields, *found, tree=tree, dependent=dependent)


def _check(part: Tensor, out: Tensor, columns: int) -> None:
    """ValueError unless the kernels can take these tensors, of whose rows of so many numbers they see pieces."""
    if part.dtype not in (torch.bfloat16, torch.float32) or out.dtype != part.dtype:
        raise ValueError(f"parts and results are alike, in bf16 or fp32: {part.dtype} and {out.dtype}")
    if not part.is_contiguous() or not out.is_contiguous() or columns * part.itemsize % PIECE_BYTES:
        raise ValueError(f"contiguous parts of whole pieces of {PIECE_BYTES} bytes, not rows of {columns} numbers")
