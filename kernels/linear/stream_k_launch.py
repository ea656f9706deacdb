"""Launches the products of up to 64 FP8 (W8A8) activations with weights in FP8 on Hopper. Allocates nothing and waits
for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch, as elsewhere.
"""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from kernels.linear.launch import options
from kernels.matrix import BlockScaled
from kernels.runtime.hopper import multiprocessors

MOST_TOKENS: Final = 64
"""Columns of a step's sums: with more, two registers for each of a thread's numbers would not do."""
FEWEST_FEATURES: Final = 1024
"""Input features of a matrix. With fewer, a block of rows has too few steps to be shared out; with one step Triton's
compiler of Gluon fails."""
SHALLOW: Final = 2048
"""Input features below which more than 16 tokens are cuBLAS's: of 24,576 x 1,536 it made 32 in 15.6 us and 64 in 15.4,
on an H200, these kernels in 17.3 and 21.0 (`python bench/fp8_linear.py --tokens 32,64 --shapes 24576x1536`)."""
BLOCK: Final = 128
"""Weight rows and input features of a step."""
STAGES: Final = 8
"""Steps under way in a program. Of 64 tokens they take 192 KiB."""
WIDE: Final = 16
"""Tokens of a program that adds pieces up."""


def takes(tokens: int, features: int) -> bool:
    """Whether these kernels are the faster ones for so many tokens and input features."""
    return 0 < tokens <= MOST_TOKENS and features >= (FEWEST_FEATURES if tokens <= WIDE else SHALLOW)


def columns(tokens: int) -> int:
    """Token columns of a step: 16, 32 or 64."""
    return max(16, 1 << (tokens - 1).bit_length())


def pieces(tokens: int, weight_FE: BlockScaled, programs: int | None = None) -> tuple[int, int, int]:
    """Sizes of the fp32 memory that a product needs."""
    blocks = -(-weight_FE.shape[0] // BLOCK)
    return blocks + (programs or _programs(weight_FE)), BLOCK, columns(tokens)


def stream_k(
    x_TE: Tensor,
    scale_TG: Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    piece_PBT: Tensor,
    *,
    programs: int | None = None,
    stages: int = STAGES,
    dependent: bool = False,
) -> None:
    """out = x · weight^T. `x_TE` and `scale_TG` may have more rows than `out_TF`, which nobody reads."""
    from kernels.linear import stream_k as kernels  # a machine without Hopper GPUs need not have Gluon

    (tokens, rows), features = out_TF.shape, weight_FE.shape[1]
    programs, wide = programs or _programs(weight_FE), columns(tokens)
    kernels.multiply[(programs,)](
        kernels.box(x_TE, wide),
        scale_TG,
        kernels.box(weight_FE.data, BLOCK),
        weight_FE.scales,
        out_TF,
        piece_PBT,
        tokens,
        scale_TG.stride(1),
        ROWS=rows,
        K=features,
        COLUMNS=wide,
        STAGES=stages,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )
    kernels.add_pieces[(triton.cdiv(rows, BLOCK), wide // WIDE)](
        piece_PBT,
        out_TF,
        tokens,
        ROWS=rows,
        K=features,
        COLUMNS=wide,
        PROGRAMS=programs,
        WIDE=WIDE,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def _programs(weight_FE: BlockScaled) -> int:
    rows, features = weight_FE.shape
    return min(multiprocessors(weight_FE.device), -(-rows // BLOCK) * (features // BLOCK))
