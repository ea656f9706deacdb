"""Launches the sum. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from kernels.one_shot import kernel
from kernels.one_shot.kernel import EMPTY

__all__ = ["EMPTY", "LANES", "MOST_BYTES", "PIECE_BYTES", "one_shot_sum"]

PIECE_BYTES: Final = 16
"""What a thread has at a time."""
LANES: Final = 128
"""Most programs: so many that all of them run at once on any GPU."""
_THREADS: Final = 128
_MOST_STEPS: Final = 4
"""Most pieces of a thread."""
_LANE_BYTES: Final = _MOST_STEPS * _THREADS * PIECE_BYTES
MOST_BYTES: Final = LANES * _LANE_BYTES
"""Largest part."""

_take = cache(kernel.take)


def one_shot_sum(
    part: Tensor, inbox: Tensor, address_R: Tensor, turn_L: Tensor, rank: int, out: Tensor, *, dependent: bool
) -> None:
    """See `kernels.one_shot.one_shot_sum` and `Inbox`."""
    nbytes = part.nbytes
    if part.dtype not in (torch.bfloat16, torch.float32) or (out.dtype, out.nbytes) != (part.dtype, nbytes):
        raise ValueError(f"parts and sums are alike, in bf16 or fp32: {part.dtype} of {nbytes} bytes and {out.dtype}")
    if not 0 < nbytes <= MOST_BYTES or nbytes % PIECE_BYTES:
        raise ValueError(f"a part of {nbytes} bytes: at most {MOST_BYTES}, in pieces of {PIECE_BYTES}")
    pieces = nbytes // PIECE_BYTES
    ranks, programs = address_R.shape[0], min(LANES, triton.cdiv(pieces, _THREADS))
    asm, constraints = _take(ranks, MOST_BYTES)
    kernel.one_shot_sum[(programs,)](
        part,
        inbox,
        address_R,
        turn_L,
        out,
        pieces,
        rank,
        RANKS=ranks,
        STEPS=triton.next_power_of_2(triton.cdiv(pieces, programs * _THREADS)),
        BLOCK=_THREADS,
        LANE_BYTES=_LANE_BYTES,
        RANK_BYTES=MOST_BYTES,
        TAKE=asm,
        CONSTRAINTS=constraints,
        FP32=part.dtype == torch.float32,
        DEPENDENT=dependent,
        num_warps=_THREADS // 32,
        launch_pdl=dependent,
    )
