"""Launches the products. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe where
every kernel before waits for its own predecessor, as all kernels here do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gluon.stored import stored
from kernels.gluon.tiles import NORMED, RESIDUAL, ROWS, STORE
from kernels.linear import kernel, ring, stream
from kernels.linear.records import Epilogue, Pieces, Size, Streams, Strides
from kernels.matrix import BlockScaled, Matrix
from kernels.pending_norm import PendingNorm
from kernels.runtime.carveout import leave_to_cache
from kernels.runtime.hopper import multiprocessors

MOST_STREAMED = 16
"""Most tokens `stream` is used for."""
RESIDENT_BYTES = 64 * 1024
"""Most bytes of 16 token columns that stay in a program's shared memory."""
RESIDENT_BYTES_OF_8 = 112 * 1024
"""The same of 8, beside which six tiles of weights fit: 129280 x 7168 weights took one token 408 us so and 445 in
programs that end, on one H200 (bytes at 4.2 TB/s: 441)."""

LEAST_FEATURES = 16
"""Fewest output features of a tile of invariant mode where there are few programs; 64 switches narrow tiles off. Of 8
Triton makes another instruction, and so other bits."""
SMALL = 1 << 24
"""Most numbers of a matrix that up to 16 tokens are streamed by, whether or not they stay there."""


@dataclass(frozen=True)
class Streaming:
    """Division of the features of a streamed product. It is a function of their number alone: with it a token's result
    does not depend on the other tokens."""

    warps: int
    width: int
    """Features of a warp at a time."""
    chunks: int
    """Times that all warps take `width` features."""

    @property
    def depth(self) -> int:
        """Chunks that are on their way at once."""
        return self.chunks if self.chunks <= 4 else 6

    def token_bytes(self, tokens: int) -> int:
        """Return the bytes of shared memory for all features of the token columns."""
        return 2 * columns(tokens) * self.warps * self.width * self.chunks

    @staticmethod
    def of(features: int) -> Streaming:
        """Make the division of this number of input features."""
        warps = 8
        while warps > 1 and warps * 64 >= 2 * features:
            warps //= 2
        return Streaming(warps, 64, -(-features // (warps * 64)))


def streamable(x_TE: Tensor, weight: Matrix) -> bool:
    """Whether `stream` can multiply these: few tokens in bf16, weights in bf16 or FP8, all in rows of whole 16-byte
    pieces."""
    few = x_TE.shape[0] <= MOST_STREAMED and x_TE.dtype == torch.bfloat16 and _in_pieces(x_TE)
    if isinstance(weight, BlockScaled):
        return few and weight.shape[-1] % 16 == 0 and weight.data.data_ptr() % 16 == 0
    return few and isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and _in_pieces(weight)


def served(x_TE: Tensor, weight_FE: Tensor) -> bool:
    """Whether `stream_linear` is the best for a product by itself. More than 8 tokens it reads in tiles of 16 columns:
    where those do not stay in a program's shared memory, cuBLAS is faster (16 tokens and 129280 x 7168 weights: 433 us
    in place of 616 on one H200), but of small matrices, whose sums it leaves in parts for a second kernel: 16 tokens
    and 1024 x 4096 weights took it 8.5 us in two launches that start late, 2048 x 4096 ones 10."""
    tokens, features = x_TE.shape
    if not streamable(x_TE, weight_FE):
        return False
    return columns(tokens) <= 8 or weight_FE.numel() <= SMALL or _stays(Streaming.of(features), tokens)


def _in_pieces(x: Tensor) -> bool:
    return (
        x.stride(-1) == 1
        and x.shape[-1] % 8 == 0
        and x.data_ptr() % 16 == 0
        and all(s % 8 == 0 for s in x.stride()[:-1])
    )


def columns(tokens: int) -> int:
    """Token columns of a streamed product."""
    if not 0 < tokens <= MOST_STREAMED:
        raise ValueError(f"{tokens} tokens cannot be streamed, at most {MOST_STREAMED} can")
    return max(8, int(triton.next_power_of_2(tokens)))


def pieces(pending: PendingNorm | None) -> Pieces:
    """The constants that describe the sums of squares."""
    count = 1 if pending is None else pending.square_TP.shape[1]
    return Pieces(pending is not None, count, max(128, int(triton.next_power_of_2(count))))


def stream_linear(
    x_TE: Tensor,
    weight_FE: Matrix,
    out_TF: Tensor,
    *,
    pending: PendingNorm | None = None,
    residual_TF: Tensor | None = None,
    norm: Tensor | None = None,
    next: PendingNorm | None = None,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Launch one product with few tokens; `kernels.linear` says which of the options go together."""
    tokens, features = x_TE.shape
    rows = weight_FE.shape[0]
    cut = Streaming.of(features)
    alone = pending is None and residual_TF is None and next is None
    if alone and isinstance(weight_FE, Tensor) and _many_rows(rows, cut, x_TE):
        _ring_linear(x_TE, weight_FE, out_TF, cut, dependent)
        return
    epilogue, norm_features, out_pieces = STORE, 0, 1
    if residual_TF is not None:
        epilogue, norm_features = RESIDUAL, rows
    elif next is not None:
        epilogue, norm_features = NORMED, next.x_TE.shape[1]
    square, (data, scales, how) = out_TF, stored(weight_FE)
    if next is not None:
        square = next.square_TP
        out_pieces = square.shape[1]
    kernel = stream.stream_linear[(triton.cdiv(rows, ROWS), 1)](
        x_TE,
        x_TE if pending is None else pending.square_TP,
        data,
        scales,
        out_TF,
        residual_TF if residual_TF is not None else out_TF if scale_T is None else scale_T,
        out_TF if norm is None else norm,
        square,
        tokens,
        0.0 if pending is None else pending.eps,
        STORED=how,
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x_TE.stride(0),
            data.stride(0),
            out_TF.stride(0),
            residual=0 if residual_TF is None else residual_TF.stride(0),
        ),
        NORM=pieces(pending),
        EPILOGUE=Epilogue(epilogue, norm_features, out_pieces, scale_T is not None),
        EARLY=True,
        **cut_up(cut, tokens, dependent),
    )
    leave_to_cache(kernel)


def _many_rows(rows: int, cut: Streaming, x_TE: Tensor) -> bool:
    """Whether programs that stay serve a product best: each with several blocks of rows, and room for the tokens."""
    blocks = triton.cdiv(rows, ROWS)
    return blocks >= 4 * multiprocessors(x_TE.device) and _stays(cut, x_TE.shape[0])


def _stays(cut: Streaming, tokens: int) -> bool:
    """Whether the tokens stay in a program's shared memory."""
    return cut.token_bytes(tokens) <= (RESIDENT_BYTES_OF_8 if columns(tokens) <= 8 else RESIDENT_BYTES)


def _ring_linear(
    x_TE: Tensor,
    weight_FE: Tensor,
    out_TF: Tensor,
    cut: Streaming,
    dependent: bool,
) -> None:
    rows, features = weight_FE.shape
    ring.ring_linear[(min(triton.cdiv(rows, ROWS), multiprocessors(x_TE.device)),)](
        x_TE,
        weight_FE,
        out_TF,
        x_TE.shape[0],
        SIZE=Size(rows, features),
        STRIDES=Strides(x_TE.stride(0), weight_FE.stride(0), out_TF.stride(0)),
        **ring_of(cut, x_TE.shape[0], 6 if x_TE.shape[0] <= 8 else 5, dependent),
    )


def stream_heads(x_THN: Tensor, weight_FN: Matrix, out_THF: Tensor, *, dependent: bool = False) -> None:
    """Launch one product a head with few tokens; the heads' rows of the weight lie one behind the other, and of FP8
    weights with several heads they are whole blocks. A plain weight may be [H, F, N], strided from head to head."""
    tokens, heads, features = x_THN.shape
    rows, (data, scales, how) = out_THF.shape[2], stored(weight_FN)
    weight_head, weight_row = data.stride()[:2] if data.dim() == 3 else (rows * data.stride(0), data.stride(0))
    kernel = stream.stream_linear[(triton.cdiv(rows, ROWS), heads)](
        *(x_THN, x_THN, data, scales, out_THF, out_THF, out_THF, out_THF),
        tokens,
        0.0,
        STORED=how,
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x_THN.stride(0), weight_row, out_THF.stride(0), x_THN.stride(1), weight_head, out_THF.stride(1)
        ),
        NORM=pieces(None),
        EPILOGUE=Epilogue(STORE),
        EARLY=True,
        **cut_up(Streaming.of(features), tokens, dependent),
    )
    leave_to_cache(kernel)


def stream_gate_up(
    pending: PendingNorm, weight_FE: Matrix, out_TI: Tensor, *, early: bool = True, dependent: bool = False
) -> None:
    """Gated activations of few tokens. `early`: see `kernels.linear.gated_linear`."""
    tokens, features = pending.x_TE.shape
    intermediate, (data, scales, how) = weight_FE.shape[0] // 2, stored(weight_FE)
    kernel = stream.stream_gate_up[(triton.cdiv(intermediate, ROWS // 2),)](
        pending.x_TE,
        pending.square_TP,
        data,
        scales,
        out_TI,
        tokens,
        pending.eps,
        STORED=how,
        SIZE=Size(intermediate, features),
        STRIDES=Strides(pending.x_TE.stride(0), data.stride(0), out_TI.stride(0)),
        NORM=pieces(pending),
        EARLY=early,
        **cut_up(Streaming.of(features), tokens, dependent),
    )
    leave_to_cache(kernel)


def cut_up(cut: Streaming, tokens: int, dependent: bool) -> dict[str, Any]:
    """The constants and options of a streamed product."""
    return ring_of(cut, tokens, cut.depth, dependent)


def ring_of(cut: Streaming, tokens: int, stages: int, dependent: bool) -> dict[str, Any]:
    """The constants and options of a kernel whose weights stream through a ring of so many stages.

    They should cover the memory's latency, and leave the kernels that start early room beside them.
    """
    streams = Streams(columns(tokens), cut.width, cut.warps, stages)
    return {"STREAMS": streams, "DEPENDENT": dependent, "num_warps": cut.warps, **options(dependent)}


def invariant_tile(programs: int, rows: int, features: int, most: int) -> tuple[int, int, int]:
    """(output features, input features, stages) of a tile of invariant mode in 16-bit floats, where there are so many
    tiles of tokens, all heads together: 64, 64 and 4, or fewer output features with more input features on their way,
    as long as no more than `most` programs come of that.

    Every result has the same bits on Hopper: a program's wgmma has 64 tokens by some output features, and sums 16 input
    features at a time, in their order. How many output features it has, and after how many input features a program
    waits, does not matter. Input features that are no multiple of a wider step keep the steps of 64.
    """
    block = 64
    while block > LEAST_FEATURES and programs * triton.cdiv(rows, block // 2) <= most:
        block //= 2
    if block == 64:
        return 64, 64, 4
    step = 64
    while step < (256 if block <= 16 else 128) and features % (2 * step) == 0:
        step *= 2
    return block, step, {64: 8, 128: 6, 256: 5}[step]


def tiled(
    x_THN: Tensor,
    weight_HFN: Tensor,
    out_THF: Tensor,
    *,
    invariant: bool,
    few: bool = False,
    behind: int = 0,
    dependent: bool = False,
) -> None:
    """One product a head, of any number of tokens. `invariant`: the same bits whatever their number. `few`, for Hopper:
    then programs may have fewer features (`invariant_tile`), for which kernels are compiled anew. `behind`, a power of
    two: so many features that lie behind those of `x_THN` in memory are copied to behind those of `out_THF`."""
    tokens, heads, features = x_THN.shape
    rows = weight_HFN.shape[1]
    if not tokens:
        return
    wide = x_THN.dtype == torch.float32
    if invariant or tokens > 32:
        block_t, block_f, block_k, warps, stages = 64, 32 if wide else 64, 32 if wide else 64, 4, 3 if wide else 4
        if invariant and few and x_THN.dtype.itemsize == 2:
            programs = triton.cdiv(tokens, block_t) * heads
            block_f, block_k, stages = invariant_tile(programs, rows, features, multiprocessors(x_THN.device))
    else:
        block_t, block_f, block_k, warps, stages = 16 if tokens <= 16 else 32, 32, 64, 4, 3
    if not invariant:
        block_k = min(block_k, max(16, triton.next_power_of_2(features)))
    kernel.tiled_linear[(triton.cdiv(tokens, block_t) * triton.cdiv(rows, block_f), heads)](
        x_THN,
        weight_HFN,
        out_THF,
        tokens,
        F=rows,
        K=features,
        X_TOKEN=x_THN.stride(0),
        X_HEAD=x_THN.stride(1),
        W_HEAD=weight_HFN.stride(0),
        W_ROW=weight_HFN.stride(1),
        W_COLUMN=weight_HFN.stride(2),
        OUT_TOKEN=out_THF.stride(0),
        OUT_HEAD=out_THF.stride(1),
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_K=block_k,
        STAGES=stages,
        BEHIND=behind,
        PRECISION="ieee" if wide else "tf32",
        DEPENDENT=dependent,
        num_warps=warps,
        **options(dependent),
    )


def options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
