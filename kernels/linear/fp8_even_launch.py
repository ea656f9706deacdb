"""Launches products of one token with FP8 weights on Hopper whose rows are dealt out evenly. Allocates nothing and
waits for nothing, so it may be captured. `dependent`: as in `fp8_launch`."""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from kernels.gluon import tiles
from kernels.gluon.stored import stored
from kernels.linear.fp8_launch import BLOCK, box, fetched
from kernels.linear.launch import options
from kernels.linear.records import Epilogue, Size, Streams, Units
from kernels.matrix import BlockScaled, Matrix
from kernels.runtime.hopper import multiprocessors

ROWS: Final = 8
"""Rows of a block, of which a program has some."""
MOST_BLOCKS: Final = 16
"""Most blocks of a program: as many rows as share a scale, so that they lie in at most two blocks of scales."""
LONG_ROWS: Final = 16384
"""Fewest features of a matrix."""
LONG_EXPERTS: Final = 2048
"""Fewest of an expert, of which a token has several."""
WARPS: Final = 8
"""Warps of a program, which share the features, 256 at a time."""
PROGRAMS: Final = 2
"""Programs on a multiprocessor. With larger programs one would be enough, but two would run on some multiprocessors and
none on others unless their shared memory keeps a second one away: with one of 6 stages a step of one row of six layers
of DeepSeek-V3 took 1.540 ms on an H200, with one of 8 stages 1.459, with two of 3 stages 1.454, without this kernel
1.476 (medians of six measurements in one run; in another run two of 3 stages took 1.470, without it 1.497)."""
STAGES: Final = 3
"""Stages of a program's ring, each a block's features of all warps."""


def even(tokens: int, weight: Matrix) -> bool:
    """Whether `fp8_even` multiplies so many tokens by this matrix (or these experts): one, by long rows, in whole
    pieces of a norm's sums of squares."""
    return (
        tokens == 1
        and isinstance(weight, BlockScaled)
        and fetched(tokens, weight)
        and weight.rows >= ROWS * MOST_BLOCKS
        and weight.shape[-2] % tiles.ROWS == 0
        and weight.shape[-1] >= (LONG_ROWS if len(weight.shape) == 2 else LONG_EXPERTS)
    )


def blocks_of(rows: int, programs: int) -> int:
    """Blocks of a program when so many programs share so many rows."""
    return min(max(-(-rows // (ROWS * programs)), 2), MOST_BLOCKS)


def fp8_even(
    x_UK: Tensor,
    weight: BlockScaled,
    out_1F: Tensor,
    residual_1F: Tensor | None = None,
    norm_F: Tensor | None = None,
    square_1P: Tensor | None = None,
    units: tuple[Tensor, Tensor, int, Units] | None = None,
    *,
    dependent: bool = False,
) -> None:
    """x · weight^T of one token in bf16, stored or added to a residual: as `kernels.linear.launch.stream_linear`.

    `units`: the list of chosen experts, where they stand in it, its slots, and who is chosen: see
    `kernels.few_experts`; the token has a row for each of them then.
    """
    from kernels.linear import fp8_even as kernel  # a machine without Hopper GPUs need not have Gluon

    rows, features = weight.shape[-2:]
    per = blocks_of(rows, PROGRAMS * multiprocessors(weight.device))
    slot, place, slots, records = (out_1F, out_1F, 0, Units()) if units is None else units
    kernel.fp8_even[(triton.cdiv(rows, ROWS * per),)](
        x_UK,
        box(
            weight.data,
            [weight.shape[0] if units else 1, features // BLOCK, rows, BLOCK],
            [rows * features, BLOCK, features, 1],
            [1, 2 * WARPS, ROWS, BLOCK],
        ),
        weight.scales,
        slot,
        place,
        out_1F,
        out_1F if residual_1F is None else residual_1F,
        out_1F if norm_F is None else norm_F,
        out_1F if square_1P is None else square_1P,
        slots,
        STORED=stored(weight)[2],
        SIZE=Size(rows, features),
        UNITS=records,
        EPILOGUE=(
            Epilogue(tiles.STORE)
            if residual_1F is None or square_1P is None
            else Epilogue(tiles.RESIDUAL, rows, square_1P.shape[1])
        ),
        STREAMS=Streams(1, 2 * BLOCK, WARPS, STAGES),
        PER=per,
        DEPENDENT=dependent,
        num_warps=WARPS,
        **options(dependent),
    )
