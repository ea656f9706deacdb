"""Launches the products of a few tokens with FP8 weights on Hopper. Allocates nothing and waits for nothing, so it may
be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch. It is always safe where every kernel before waits for its own
predecessor, as all kernels here do.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from kernels.fp16_scaled import Fp16Scaled
from kernels.gluon.stored import stored
from kernels.gluon.tiles import NORMED, RESIDUAL, ROWS, STORE
from kernels.linear.launch import options, pieces
from kernels.linear.records import Epilogue, Size, Streams, Strides
from kernels.matrix import BlockScaled, Matrix
from kernels.pending_norm import PIECE, PendingNorm
from kernels.runtime.hopper import is_hopper, multiprocessors

MOST_TOKENS: Final = 8
"""Columns of a tile of the tensor cores."""
BLOCK: Final = 128
"""Features of a block of scales, which a warp multiplies at a time."""
WIDEST_KEPT: Final = 7168
"""Features of several tokens that stay in shared memory: with more, what a program knows of them spills registers."""
MOST_BYTES: Final = 224 * 1024
"""Most bytes of a program's shared memory for tokens and weights."""
WHOLE_BYTES: Final = 144 * 1024
"""Most of these bytes for the weights of a program of `fp8_whole` and its token."""
BESIDE: Final = 6 * 1024
"""Other bytes of such a program: the warps' sums, squares of a norm, and those that the driver keeps for itself."""
ASKED_BYTES: Final = 80 * 1024
"""Bytes of weights that the programs of `fp8_whole` on a multiprocessor ask for at once. Tokens come behind what has
been asked for before them: with all of 115 KB they came 4 us after the kernel before had ended."""
LEAST_STAGES: Final = 3
"""Fewest stages: with fewer the stream of weights would run dry."""


def fetched(tokens: int, weight: Matrix) -> bool:
    """Whether `fp8` multiplies so many tokens by this matrix (or these experts): on Hopper, with scales for 128
    features, in whole blocks."""
    return (
        isinstance(weight, BlockScaled)
        and 0 < tokens <= MOST_TOKENS
        and weight.features == BLOCK
        and weight.shape[-1] % BLOCK == 0
        and weight.data.data_ptr() % 16 == 0
        and is_hopper(weight.device)
    )


def kept(tokens: int, weight: Matrix) -> bool:
    """Whether it does so with all of the tokens in shared memory."""
    features = weight.shape[-1]
    narrow = tokens == 1 or features <= WIDEST_KEPT
    return narrow and fetched(tokens, weight) and kept_stages(tokens, features) >= LEAST_STAGES


def whole(tokens: int, weight: Matrix, *, normed: bool = False) -> bool:
    """Whether `fp8_whole` multiplies so many tokens by this matrix: where all programs stand at once, each with its
    weights in shared memory. Behind a norm (`normed`) one token is multiplied by it as well where some programs have to
    wait for others."""
    if not fetched(tokens, weight) or len(weight.shape) != 2:
        return False
    rows, features = weight.shape
    own = whole_bytes(tokens, features)
    at_once = _beside(rows, multiprocessors(weight.device)) * (own + BESIDE) <= MOST_BYTES
    return own <= WHOLE_BYTES and (at_once or (normed and tokens == 1))


def whole_warps(tokens: int, features: int) -> int:
    """Warps of a program of `fp8_whole`. Of several tokens, which every warp makes fp16 for itself, as many as there
    are blocks where that is not too many."""
    blocks = features // BLOCK
    return warps_of(features, 16 if tokens > 1 and blocks <= 16 else 8)


def whole_bytes(tokens: int, features: int) -> int:
    """Return the bytes of a program of `fp8_whole`: 16 rows of `features` weights, and one token in two forms."""
    chunk = whole_warps(tokens, features) * BLOCK
    return -(-features // chunk) * chunk * (ROWS + 2)


def under_way(tokens: int, rows: int, features: int, multiprocessors: int) -> int:
    """Chunks that a program of `fp8_whole` asks for at once."""
    chunk = whole_warps(tokens, features) * BLOCK * ROWS
    chunks = -(-features * ROWS // chunk)
    return min(max(ASKED_BYTES // (_beside(rows, multiprocessors) * chunk), 1), chunks)


def _beside(rows: int, multiprocessors: int) -> int:
    """Programs of 16 rows on a multiprocessor, at most."""
    return -(-rows // (ROWS * multiprocessors))


def kept_stages(tokens: int, features: int) -> int:
    """Stages of a kernel that keeps so many tokens in shared memory, with the sums of squares of their norm; fewer than
    LEAST_STAGES where they do not fit."""
    warps = warps_of(features, 8)
    chunk = warps * BLOCK
    squares = 4 * columns(tokens) * max(128, int(triton.next_power_of_2(features // PIECE)))
    kept = 2 * columns(tokens) * chunk * -(-features // chunk) + squares
    return min(6, (MOST_BYTES - kept) // (ROWS * chunk))


def warps_of(features: int, most: int) -> int:
    """Warps that share so many features: at most so many, and fewer where they would not divide a short row."""
    warps, blocks = most, features // BLOCK
    while warps > 1 and (warps > blocks or (blocks % warps and blocks < 4 * warps)):
        warps //= 2
    return warps


def columns(tokens: int) -> int:
    """Token columns in shared memory."""
    return 1 if tokens == 1 else MOST_TOKENS


def box(data: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Make the descriptor with which the copy engine fetches FP8 weights."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kernels.linear.fp8 import BOXES  # a machine without Hopper GPUs need not have Gluon

    return TensorDescriptor(data.view(torch.uint8), shape, strides, block, BOXES[len(shape)])


def fp8_linear(
    x: Fp16Scaled,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    *,
    residual_TF: Tensor | None = None,
    norm: Tensor | None = None,
    next: PendingNorm | None = None,
    dependent: bool = False,
) -> None:
    """One product with few tokens, stored or added to a residual: as `kernels.linear.launch.stream_linear`."""
    from kernels.linear import fp8

    (tokens, features), rows = x.fp16_TF.shape, weight_FE.shape[0]
    square = out_TF if next is None else next.square_TP
    warps, most = (warps_of(features, 4), 6) if tokens == 1 else (warps_of(features, 8), 3)
    stages = min(most, triton.cdiv(features, warps * BLOCK))  # empty ones would keep programs away
    fp8.fp8_linear[(triton.cdiv(rows, ROWS),)](
        x.fp16_TF,
        x.unit_T,
        box(weight_FE.data, [features // BLOCK, rows, BLOCK], [BLOCK, features, 1], [warps, ROWS, BLOCK]),
        weight_FE.scales,
        out_TF,
        out_TF if residual_TF is None else residual_TF,
        out_TF if norm is None else norm,
        square,
        tokens,
        STORED=stored(weight_FE)[2],
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x.fp16_TF.stride(0),
            features,
            out_TF.stride(0),
            residual=0 if residual_TF is None else residual_TF.stride(0),
        ),
        EPILOGUE=(Epilogue(STORE) if residual_TF is None else Epilogue(RESIDUAL, rows, square.shape[1])),
        **ring_of(tokens, warps, stages, dependent),
    )


def fp8_whole(
    x: PendingNorm | Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    *,
    residual_TF: Tensor | None = None,
    norm: Tensor | None = None,
    next: PendingNorm | None = None,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """One product with few tokens, where `whole` says so: as `kernels.linear.launch.stream_linear`, with the norm
    before it where `x` is pending."""
    from kernels.linear import fp8_whole as kernel

    rows, features = weight_FE.shape
    x_TE, pending = (x.x_TE, x) if isinstance(x, PendingNorm) else (x, None)
    epilogue = Epilogue(STORE)
    square = out_TF if next is None else next.square_TP
    if residual_TF is not None:
        epilogue = Epilogue(RESIDUAL, rows, square.shape[1])
    elif next is not None:
        epilogue = Epilogue(NORMED, next.x_TE.shape[1], square.shape[1], scale_T is not None)
    warps = whole_warps(x_TE.shape[0], features)
    kernel.fp8_whole[(triton.cdiv(rows, ROWS),)](
        x_TE,
        x_TE if pending is None else pending.square_TP,
        box(weight_FE.data, [features // BLOCK, rows, BLOCK], [BLOCK, features, 1], [warps, ROWS, BLOCK]),
        weight_FE.scales,
        out_TF,
        residual_TF if residual_TF is not None else out_TF if scale_T is None else scale_T,
        out_TF if norm is None else norm,
        square,
        x_TE.shape[0],
        0.0 if pending is None else pending.eps,
        STORED=stored(weight_FE)[2],
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x_TE.stride(0),
            features,
            out_TF.stride(0),
            residual=0 if residual_TF is None else residual_TF.stride(0),
        ),
        NORM=pieces(pending),
        EPILOGUE=epilogue,
        UNDER_WAY=under_way(x_TE.shape[0], rows, features, multiprocessors(weight_FE.device)),
        **ring_of(x_TE.shape[0], warps, triton.cdiv(features, warps * BLOCK), dependent),
    )


def fp8_gate_up(pending: PendingNorm, weight_FE: BlockScaled, out_TI: Tensor, *, dependent: bool = False) -> None:
    """Gated activations of few tokens."""
    from kernels.linear import fp8

    tokens, features = pending.x_TE.shape
    intermediate, half = weight_FE.shape[0] // 2, ROWS // 2
    warps = warps_of(features, 8)
    fp8.fp8_gate_up[(min(triton.cdiv(intermediate, half), multiprocessors(weight_FE.device)),)](
        pending.x_TE,
        pending.square_TP,
        box(
            weight_FE.data,
            [features // BLOCK, 2, intermediate, BLOCK],
            [BLOCK, intermediate * features, features, 1],
            [warps, 2, half, BLOCK],
        ),
        weight_FE.scales,
        out_TI,
        tokens,
        pending.eps,
        STORED=stored(weight_FE)[2],
        SIZE=Size(intermediate, features),
        STRIDES=Strides(pending.x_TE.stride(0), features, out_TI.stride(0)),
        NORM=pieces(pending),
        **ring_of(tokens, warps, kept_stages(tokens, features), dependent),
    )


def ring_of(tokens: int, warps: int, stages: int, dependent: bool) -> dict[str, Any]:
    """The constants and options of a kernel whose weights stream through a ring of so many stages."""
    streams = Streams(columns(tokens), BLOCK, warps, stages)
    return {"STREAMS": streams, "DEPENDENT": dependent, "num_warps": warps, **options(dependent)}
