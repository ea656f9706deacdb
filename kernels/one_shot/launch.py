"""Launches the exchange. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from kernels.one_shot import kernel
from kernels.one_shot.words import EMPTY, take

__all__ = ["EMPTY", "LANES", "MOST_BYTES", "PIECE_BYTES", "one_shot"]

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


def one_shot(
    what: str,
    part: Tensor,
    inbox: tuple[Tensor, Tensor, Tensor, int],
    out: Tensor,
    *,
    row_bytes: int = PIECE_BYTES,
    added: tuple[Tensor, Tensor, Tensor] | None = None,
    dependent: bool,
) -> None:
    """`kernel.one_shot`. `inbox`: the fields of an `Inbox`. `row_bytes`: of the rows of `part`. `added`: the residual,
    the norm's weights and the sums of squares."""
    if part.dtype not in (torch.bfloat16, torch.float32) or out.dtype != part.dtype:
        raise ValueError(f"parts and results are alike, in bf16 or fp32: {part.dtype} and {out.dtype}")
    own, address_R, turn_L, rank = inbox
    ranks, nbytes = address_R.shape[0], part.nbytes
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
        own,
        address_R,
        turn_L,
        out,
        pieces,
        rank,
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
