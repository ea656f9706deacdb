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
from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from kernels.one_shot import kernel
from kernels.one_shot.words import EMPTY, take
from kernels.pending_norm import PendingNorm

BUFFERS: Final = 2
PIECE_BYTES: Final = 16
"""Bytes that a thread handles at a time."""
LANES: Final = 128
"""Most programs: so many that all of them run at once on any GPU."""
_THREADS: Final = 128
_MOST_STEPS: Final = 4
"""Most pieces of a thread."""
_LANE_BYTES: Final = _MOST_STEPS * _THREADS * PIECE_BYTES
MOST_BYTES: Final = LANES * _LANE_BYTES
"""Largest part."""

_take = cache(take)


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

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the bytes of an inbox, for this number of ranks."""
        return BUFFERS * ranks * MOST_BYTES

    @staticmethod
    def of(own: Tensor, addresses: list[int], rank: int) -> Inbox:
        """Make an inbox over memory that becomes empty; every rank's has to be before anybody's first call."""
        own.view(torch.int32).fill_(EMPTY)
        address_R = torch.tensor(addresses, dtype=torch.int64, device=own.device)
        return Inbox(own, address_R, torch.zeros(LANES, dtype=torch.int32, device=own.device), rank)


def one_shot_sum(part: Tensor, inbox: Inbox, out: Tensor, *, dependent: bool = False) -> None:
    """out = the sum over ranks of their `part`, added in fp32 in the order of ranks and rounded once.

    All ranks together, on GPUs that can write each other's memory. `part` and `out` are contiguous, of one size, of at
    most `MOST_BYTES`, and of one dtype, bf16 or fp32; whole pieces of `PIECE_BYTES`, and aligned to them. `out` may be
    `part`. All ranks get the same bits. It ends when every rank's part has arrived. `dependent`: programmatic dependent
    launch; it waits before it reads anything that changes.
    """
    _launch("sum", part, inbox, out, dependent=dependent)


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
    _launch("add", part_TE, inbox, out.x_TE, row_bytes=row_bytes, added=added, dependent=dependent)


def one_shot_gather(part_NY: Tensor, inbox: Inbox, out_NRY: Tensor, *, dependent: bool = False) -> None:
    """out[n, r] = row n of rank r's part. Rows are whole pieces; else as `one_shot_sum`.

    NaN stay NaN, but words of `EMPTY` become others.
    """
    row_bytes = part_NY.shape[1] * part_NY.itemsize
    _launch("gather", part_NY, inbox, out_NRY, row_bytes=row_bytes, dependent=dependent)


def _launch(
    what: str,
    part: Tensor,
    inbox: Inbox,
    out: Tensor,
    *,
    row_bytes: int = PIECE_BYTES,
    added: tuple[Tensor, Tensor, Tensor] | None = None,
    dependent: bool,
) -> None:
    """Launch `kernel.one_shot`. `row_bytes`: of the rows of `part`. `added`: the residual, the norm's weights and the
    sums of squares. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph."""
    if part.dtype not in (torch.bfloat16, torch.float32) or out.dtype != part.dtype:
        raise ValueError(f"parts and results are alike, in bf16 or fp32: {part.dtype} and {out.dtype}")
    ranks, nbytes = inbox.address_R.shape[0], part.nbytes
    if out.nbytes != nbytes * (ranks if what == "gather" else 1):
        raise ValueError(f"a part of {nbytes} bytes, and a result of {out.nbytes}")
    if not 0 < nbytes <= MOST_BYTES or nbytes % PIECE_BYTES or row_bytes % PIECE_BYTES:
        raise ValueError(
            f"a part of {nbytes} bytes in rows of {row_bytes}: at most {MOST_BYTES}, in pieces of {PIECE_BYTES}"
        )
    pieces = nbytes // PIECE_BYTES
    programs = min(LANES, triton.cdiv(pieces, _THREADS))
    asm, constraints = _take(ranks, MOST_BYTES)
    residual, norm, square = (part, part, part) if added is None else added
    kernel.one_shot[(programs,)](
        part,
        inbox.own,
        inbox.address_R,
        inbox.turn_L,
        out,
        pieces,
        inbox.rank,
        residual,
        norm,
        square,
        RANKS=ranks,
        ROW=row_bytes // PIECE_BYTES,
        STEPS=triton.next_power_of_2(triton.cdiv(pieces, programs * _THREADS)),
        BLOCK=_THREADS,
        LANE_BYTES=_LANE_BYTES,
        RANK_BYTES=MOST_BYTES,
        TAKE=asm,
        CONSTRAINTS=constraints,
        WHAT=what,
        FP32=part.dtype == torch.float32,
        DEPENDENT=dependent,
        num_warps=_THREADS // 32,
        launch_pdl=dependent,
    )
