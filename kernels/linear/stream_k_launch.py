"""Launches the products of up to 64 FP8 (W8A8) activations with weights in FP8 on Hopper. Allocates nothing and waits
for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch, as elsewhere.
"""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from kernels.linear import pieces as adding
from kernels.linear.launch import options
from kernels.linear.records import BehindPieces
from kernels.matrix import BlockScaled
from kernels.quantize import Fp8Rows
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
NARROW: Final = 4
"""The same where matrices have so few rows that such programs would leave most of a GPU idle: one read 50 KB of pieces
in 1.4 us, but 270 KB in 6.8 (512 x 4096 weights, whose blocks have 32 pieces, on one H200)."""
FEWEST_ADDING: Final = 64
"""Programs that are enough to add pieces up."""
MOST_NORMED: Final = 10
"""Most pieces of a block that are added up by the kernel that norms them: it has a program for a token alone. Of 17, of
1024 x 4096 weights, it took 8.1 us, where to add pieces up takes 1.5 and a norm 1."""


def takes(tokens: int, features: int) -> bool:
    """Whether these kernels are the faster ones for so many tokens and input features."""
    return 0 < tokens <= MOST_TOKENS and features >= (FEWEST_FEATURES if tokens <= WIDE else SHALLOW)


def columns(tokens: int) -> int:
    """Token columns of a step: 16, 32 or 64."""
    return max(16, 1 << (tokens - 1).bit_length())


def pieces(tokens: int, weight_FE: BlockScaled, programs: int | None = None) -> tuple[int, int, int]:
    """Sizes of the fp32 memory that a product needs."""
    blocks = -(-weight_FE.shape[0] // BLOCK)
    return blocks + (programs or _programs(weight_FE)), columns(tokens), BLOCK


def stream_k(
    x_TE: Tensor,
    scale_TG: Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    piece_PTB: Tensor,
    *,
    programs: int | None = None,
    stages: int = STAGES,
    dependent: bool = False,
) -> None:
    """out = x · weight^T. `x_TE` and `scale_TG` may have more rows than `out_TF`, which nobody reads."""
    programs = programs or _programs(weight_FE)
    _multiply(x_TE, scale_TG, weight_FE, out_TF, piece_PTB, programs, stages, dependent)
    (tokens, rows), wide = out_TF.shape, columns(out_TF.shape[0])
    blocks = triton.cdiv(rows, BLOCK)
    own = WIDE if blocks * wide // WIDE >= FEWEST_ADDING else NARROW
    adding.add_pieces[(blocks, wide // own)](
        piece_PTB,
        out_TF,
        tokens,
        WIDE=own,
        **_pieces(weight_FE, wide, programs),
        DEPENDENT=dependent,
        num_warps=8 if own == WIDE else 4,
        **options(dependent),
    )


def norms_pieces(weight_FE: BlockScaled, programs: int | None = None) -> bool:
    """Whether `stream_k_norm` is better than `stream_k` and a norm behind it."""
    return adding.most_pieces(*weight_FE.shape, programs or _programs(weight_FE)) <= MOST_NORMED


def stream_k_norm(
    x_TE: Tensor,
    scale_TG: Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    piece_PTB: Tensor,
    norm_A: Tensor,
    normed_TA: Tensor,
    rounded: Fp8Rows,
    eps: float,
    scale_T: Tensor | None = None,
    *,
    residual_TF: Tensor | None = None,
    programs: int | None = None,
    stages: int = STAGES,
    dependent: bool = False,
) -> None:
    """`stream_k`, and `kernels.rounded_norm.rounded_norm` of the first A columns of what it makes, by the kernel that
    adds up the pieces. With a residual, to which all columns are added first, `out_TF` does not keep the product, and
    `normed_TA` may be the same."""
    (tokens, rows), features = out_TF.shape, norm_A.shape[0]
    if residual_TF is not None and features != rows:
        raise ValueError(f"a residual of {rows} features does not have a norm of {features}")
    programs = programs or _programs(weight_FE)
    _multiply(x_TE, scale_TG, weight_FE, out_TF, piece_PTB, programs, stages, dependent)
    blocks = triton.next_power_of_2(triton.cdiv(rows, BLOCK))
    adding.pieces_norm[(tokens,)](
        piece_PTB,
        out_TF,
        out_TF if residual_TF is None else residual_TF,
        norm_A,
        norm_A if scale_T is None else scale_T,
        normed_TA,
        rounded.number_RK,
        rounded.scale_RG,
        rounded.scale_RG if rounded.by_token_TG is None else rounded.by_token_TG,
        eps,
        rounded.scale_RG.stride(1),
        FEATURES=features,
        BLOCKS=blocks,
        **_pieces(weight_FE, columns(tokens), programs),
        BEHIND=BehindPieces(
            residual_TF is not None,
            0 if residual_TF is None else residual_TF.stride(0),
            scale_T is not None,
            rounded.by_token_TG is not None,
        ),
        DEPENDENT=dependent,
        num_warps=min(max(blocks // 2, 1), 16),
        **options(dependent),
    )


def _pieces(weight_FE: BlockScaled, wide: int, programs: int) -> dict[str, int]:
    """Options of the kernels that add pieces up. A thread has 8 numbers of a piece: of 12 they fit into registers."""
    rows, features = weight_FE.shape
    most = adding.most_pieces(rows, features, programs)
    return {
        "ROWS": rows,
        "K": features,
        "COLUMNS": wide,
        "PROGRAMS": programs,
        "MOST": most,
        "BATCH": -(-most // -(-most // 12)),
    }


def _multiply(
    x_TE: Tensor,
    scale_TG: Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    piece_PTB: Tensor,
    programs: int,
    stages: int,
    dependent: bool,
) -> None:
    """The product, where one program has a whole block of it, and pieces of the others."""
    from kernels.linear import stream_k as kernels  # a machine without Hopper GPUs need not have Gluon

    (tokens, rows), features, wide = out_TF.shape, weight_FE.shape[1], columns(out_TF.shape[0])
    kernels.multiply[(programs,)](
        kernels.box(x_TE, wide),
        scale_TG,
        kernels.box(weight_FE.data, BLOCK),
        weight_FE.scales,
        out_TF,
        piece_PTB,
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


def _programs(weight_FE: BlockScaled) -> int:
    rows, features = weight_FE.shape
    return min(multiprocessors(weight_FE.device), -(-rows // BLOCK) * (features // BLOCK))
