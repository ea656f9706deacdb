"""Exchanges of decode rows between ranks that share out the pages of one latent cache: queries go to all of them, and
what they attended to goes to the rank of each head, which merges it.

As in `kernels.one_shot`, ranks write into each other's memory, and data say themselves when they are there. A rank's
*inbox* has a slot for each other shard, twice: two calls in a row use different halves. Both kinds of calls use one
inbox; all ranks make the same calls in the same order.

Shape legend: D shards, T tokens, Y numbers of a token, H heads of a rank, L latent features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor

from kernels.one_shot.words import EMPTY, take
from kernels.shard_exchange import kernel

BUFFERS: Final = 2
MOST_BYTES: Final = 1 << 24
"""Bytes of the slots of a half, and of one that is not there. What needs more is exchanged in several calls."""
PIECE_BYTES: Final = 16
"""Bytes that a thread handles at a time."""
LANES: Final = 128
"""Most programs. Each waits for those of its own index alone, so all go on where not all run at once."""
FEW_THREADS, MANY_THREADS = 128, 512
"""Threads of a program: few, so that little is shared by many programs, and many, so that much takes few steps."""

_take = cache(take)


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
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return MOST_BYTES // len(self.address_D)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a slot that the program of one index has, in every call."""
        return self.slot_bytes // LANES

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
    for some in _calls(part_TY.shape[0], part_TY.shape[1] * part_TY.itemsize // PIECE_BYTES, inbox.lane_bytes):
        _gather(part_TY[some], inbox, out_TDY[some], dependent=dependent)


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
    places = _places_of(out_THL)
    items = MANY_THREADS // places
    for some in _calls(tokens, heads * places, inbox.lane_bytes, items=items):
        found = out_THL[some], out_lse_TH[some]
        _merge(part_TDHL[some], lse_TDH[some], inbox, *found, tree=tree, dependent=dependent)


def merge_parts(out_DTHL: Tensor, lse_DTH: Tensor, into_THL: Tensor) -> Tensor:
    """Merge attention to disjoint sets of entries, in plain torch: sums of exp(lse) out and of exp(lse), whose quotient
    goes to `into_THL`; returned is the log-sum-exp of all, [T, H]. They are balanced trees in the order of the shards,
    so all ranks have the same bits.

    A part of log-sum-exp -inf has output 0 and counts for nothing; where all are so, the result is 0. NaN in an output
    stays, whatever the log-sum-exp.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    top_TH = lse_DTH.amax(0)
    # A finite shift: exp(-inf - 0) is the 0 that is wanted, and -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_DTH = torch.exp(lse_DTH - top_TH)
    weight_DTH1 = weight_DTH.unsqueeze(-1)
    total_TH = _tree_sum(weight_DTH)
    sum_THL = _tree_sum(weight_DTH1 * out_DTHL)
    into_THL.copy_(sum_THL / total_TH.masked_fill(total_TH == 0, 1.0).unsqueeze(-1))
    return top_TH + torch.log(total_TH)


def _tree_sum(x_DX: Tensor) -> Tensor:
    """Sum along the first axis as a balanced binary tree."""
    while (count := x_DX.shape[0]) > 1:
        even = count - count % 2
        x_DX = torch.cat([x_DX[0:even:2] + x_DX[1:even:2], x_DX[even:]])
    return x_DX[0]


def _check(part: Tensor, out: Tensor, columns: int) -> None:
    """ValueError unless the kernels can take these tensors, of whose rows of so many numbers they see pieces."""
    if part.dtype not in (torch.bfloat16, torch.float32) or out.dtype != part.dtype:
        raise ValueError(f"parts and results are alike, in bf16 or fp32: {part.dtype} and {out.dtype}")
    if not part.is_contiguous() or not out.is_contiguous() or columns * part.itemsize % PIECE_BYTES:
        raise ValueError(f"contiguous parts of whole pieces of {PIECE_BYTES} bytes, not rows of {columns} numbers")


def _threads(pieces: int) -> int:
    return FEW_THREADS if pieces <= 2 * LANES * FEW_THREADS else MANY_THREADS


def _places_of(out_THL: Tensor) -> int:
    """Threads of an item, of which some may have no piece."""
    return int(triton.next_power_of_2(out_THL.shape[2] * out_THL.itemsize // PIECE_BYTES))


def _calls(tokens: int, pieces: int, lane_bytes: int, *, items: int = 0) -> Iterator[slice]:
    """The tokens of each call, of which as many as lanes have room for are exchanged at a time. `pieces`: of a token;
    `items`: items of `MANY_THREADS` pieces. ValueError where there is no room for one token."""
    steps = lane_bytes // ((MANY_THREADS + items) * PIECE_BYTES)
    most = steps * LANES * MANY_THREADS // pieces
    if most < 1:
        raise ValueError(f"a token of {pieces} pieces does not fit into {LANES} lanes of {lane_bytes} bytes")
    for begin in range(0, tokens, most):
        yield slice(begin, min(begin + most, tokens))


def _gather(part_TY: Tensor, inbox: Inbox, out_TDY: Tensor, *, dependent: bool) -> None:
    """Launch `kernel.gather_shards`, in one call. Like `_merge` it allocates nothing and waits for nothing, so it may
    be captured into a CUDA graph."""
    row = part_TY.shape[1] * part_TY.itemsize // PIECE_BYTES
    pieces = part_TY.shape[0] * row
    programs, steps, common = _common(inbox, pieces, _threads(pieces), dependent)
    memory = inbox.own, inbox.address_D, inbox.turn_L
    kernel.gather_shards[(programs,)](part_TY, *memory, out_TDY, pieces, steps, inbox.index, ROW=row, **common)


def _merge(
    part_TDHL: Tensor,
    lse_TDH: Tensor,
    inbox: Inbox,
    out_THL: Tensor,
    out_lse_TH: Tensor,
    *,
    tree: bool,
    dependent: bool,
) -> None:
    """Launch `kernel.merge_shards`, in one call."""
    tokens, heads, latent = out_THL.shape
    pieces = latent * out_THL.itemsize // PIECE_BYTES
    places = _places_of(out_THL)
    items = tokens * heads
    threads = max(_threads(items * places), places)
    programs, steps, common = _common(inbox, items * places, threads, dependent)
    kernel.merge_shards[(programs,)](
        part_TDHL,
        lse_TDH,
        inbox.own,
        inbox.address_D,
        inbox.turn_L,
        out_THL,
        out_lse_TH,
        items,
        steps,
        heads,
        inbox.index,
        PIECES=pieces,
        PLACES=places,
        FP32=out_THL.itemsize == 4,
        TREE=tree,
        # Who leaves it to the compiler which products and sums are one operation gets another answer elsewhere.
        enable_fp_fusion=not tree,
        **common,
    )


def _common(inbox: Inbox, pieces: int, threads: int, dependent: bool) -> tuple[int, int, dict[str, Any]]:
    """(programs, steps of each, what both kernels are compiled for)."""
    shards, slot_bytes = len(inbox.address_D), inbox.slot_bytes
    programs = min(LANES, triton.cdiv(pieces, threads))
    asm, constraints = _take(shards - 1, slot_bytes)
    return (
        programs,
        triton.cdiv(pieces, programs * threads),
        {
            "SHARDS": shards,
            "BLOCK": threads,
            "LANE_BYTES": inbox.lane_bytes,
            "SLOT_BYTES": slot_bytes,
            "TAKE": asm,
            "CONSTRAINTS": constraints,
            "DEPENDENT": dependent,
            "num_warps": threads // 32,
            "maxnreg": 128,
            "launch_pdl": dependent,
        },
    )
