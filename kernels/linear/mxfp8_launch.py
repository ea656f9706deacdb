"""Launches the products of up to 128 tokens with MXFP8 weights on Hopper. Allocates nothing and waits for nothing, so
it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch, as elsewhere.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from kernels.linear import pieces as adding
from kernels.linear.launch import options
from kernels.linear.records import Blocks
from kernels.linear.stream_k_launch import BLOCK, FEWEST_ADDING, NARROW, WIDE
from kernels.matrix import Matrix, MicroScaled
from kernels.runtime.hopper import is_hopper, multiprocessors

MOST_STREAMED: Final = 0
"""Most tokens that these kernels multiply; MOST_TOKENS is what they can. 0: none, `micro_scaled` takes all."""
MOST_TOKENS: Final = 128
"""Columns of a step's sums."""
FEWEST_FEATURES: Final = 1024
"""Input features of a matrix: with fewer, a block of rows has too few steps to be shared out."""
MOST_OF_FOUR_GROUPS: Final = 64
"""Most tokens that four groups of warps multiply: the sums of more do not fit the registers of as many."""
CHUNK: Final = 64
"""Weight rows of a wgmma."""
RING_BYTES: Final = 208 * 1024
"""Most bytes of the stages."""
FULL: Final = 0.9
"""Share of a GPU's multiprocessors that is enough for a product, if its blocks need not be shared out then."""
MOST_ADDED: Final = 8
"""Most pieces of a block that are added up for 16 tokens at a time: these are 64 KiB. Programs that add up more of them
have fewer tokens. By arithmetic, with what `stream_k_launch.NARROW` says of its own."""
MOST_STAGES: Final = 8
"""Most stages."""


def columns(tokens: int) -> int:
    """Token columns of a step: 16, 32, 64 or 128."""
    return max(16, 1 << (tokens - 1).bit_length())


def tiling_of(tokens: int, groups: int | None = None, chunks: int | None = None) -> Blocks:
    """Make the division for so many tokens; `groups` and `chunks` are for measurements."""
    groups = groups or (4 if tokens <= MOST_OF_FOUR_GROUPS else 2)
    chunks = chunks or 4 // groups
    stage = BLOCK * (CHUNK * groups * chunks + 2 * columns(tokens))
    return Blocks(groups, chunks, min(MOST_STAGES, RING_BYTES // stage))


def _rows(tiling: Blocks) -> int:
    return CHUNK * tiling.groups * tiling.chunks


def tiling_for(tokens: int, weight_FE: MicroScaled) -> Blocks:
    """Make the division of a product: in blocks of 128 rows where each can have a program of its own, which leaves no
    pieces."""
    blocks = -(-weight_FE.shape[0] // BLOCK)
    alone = _each_alone(blocks, multiprocessors(weight_FE.device))
    return tiling_of(tokens, 2, 1) if alone else tiling_of(tokens)


def programs_of(weight_FE: MicroScaled, block: int) -> int:
    """Programs of a product: one for each block where these fill a GPU, else as many as there are multiprocessors."""
    rows, features = weight_FE.shape
    blocks, most = -(-rows // block), multiprocessors(weight_FE.device)
    return blocks if _each_alone(blocks, most) else min(most, blocks * (features // BLOCK))


def _each_alone(blocks: int, most: int) -> bool:
    return FULL * most <= blocks <= most


def mxfp8_pieces(x_TE: Tensor, weight_FE: Matrix, out_TF: Tensor) -> tuple[int, int, int] | None:
    """Sizes of the fp32 memory that `mxfp8_linear` needs for parts of the sums of this product, if it takes it: of at
    most MOST_STREAMED tokens in bf16, in rows of whole 16-byte pieces, with a matrix of whole steps of 128 features, on
    Hopper. None where other kernels are to make it."""
    few = 0 < x_TE.shape[0] <= min(MOST_STREAMED, MOST_TOKENS) and x_TE.dtype == torch.bfloat16
    if not few or not isinstance(weight_FE, MicroScaled) or not is_hopper(weight_FE.device):
        return None
    return pieces(x_TE.shape[0], weight_FE) if _fits(x_TE, weight_FE, out_TF) else None


def _fits(x_TE: Tensor, weight_FE: MicroScaled, out_TF: Tensor) -> bool:
    features = weight_FE.shape[1]
    aligned = x_TE.data_ptr() % 16 == weight_FE.data.data_ptr() % 16 == weight_FE.scales.data_ptr() % 4 == 0
    whole = x_TE.stride(1) == 1 and x_TE.stride(0) % 8 == 0 and features % BLOCK == 0 and features >= FEWEST_FEATURES
    return aligned and whole and out_TF.is_contiguous()


def pieces(
    tokens: int, weight_FE: MicroScaled, programs: int | None = None, tiling: Blocks | None = None
) -> tuple[int, int, int]:
    """Sizes of the fp32 memory that a product needs."""
    block = _rows(tiling or tiling_for(tokens, weight_FE))
    blocks, programs = -(-weight_FE.shape[0] // block), programs or programs_of(weight_FE, block)
    return block // BLOCK * (blocks + programs), columns(tokens), BLOCK


def mxfp8_linear(
    x_TE: Tensor,
    weight_FE: MicroScaled,
    out_TF: Tensor,
    piece_PTB: Tensor,
    *,
    programs: int | None = None,
    tiling: Blocks | None = None,
    dependent: bool = False,
) -> None:
    """out = x · weight^T, summed in fp32 and rounded once to the dtype of `out_TF`, which is contiguous. `piece_PTB`:
    of the sizes that `mxfp8_pieces` says. A token's result depends on the number of tokens, but not on what the others
    hold. `programs` and `tiling` are for measurements. ValueError for other memory."""
    from kernels.linear import mxfp8, stream_k  # a machine without Hopper GPUs need not have Gluon

    (tokens, features), rows, wide = x_TE.shape, weight_FE.shape[0], columns(x_TE.shape[0])
    tiling = tiling or tiling_for(tokens, weight_FE)
    block = _rows(tiling)
    programs = programs or programs_of(weight_FE, block)
    if tuple(piece_PTB.shape) != pieces(tokens, weight_FE, programs, tiling):
        raise ValueError(f"pieces {tuple(piece_PTB.shape)} are not those of {tokens} tokens and {programs} programs")
    mxfp8.mxfp8_multiply[(programs,)](
        mxfp8.token_box(x_TE, wide),
        stream_k.box(weight_FE.data.view(torch.uint8), block),
        weight_FE.scales.view(torch.int32),
        out_TF,
        piece_PTB,
        tokens,
        ROWS=rows,
        K=features,
        COLUMNS=wide,
        GROUPS=tiling.groups,
        CHUNKS=tiling.chunks,
        STAGES=tiling.stages,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )
    blocks, most = triton.cdiv(rows, BLOCK), adding.most_pieces(rows, features, programs, block)
    if most == 1:
        return
    own = WIDE if blocks * wide // WIDE >= FEWEST_ADDING and most <= MOST_ADDED else NARROW
    adding.add_pieces[(blocks, wide // own)](
        piece_PTB,
        out_TF,
        tokens,
        ROWS=rows,
        K=features,
        COLUMNS=wide,
        PROGRAMS=programs,
        WIDE=own,
        MOST=most,
        BATCH=-(-most // -(-most // 12)),
        DEPENDENT=dependent,
        TIMES=block // BLOCK,
        num_warps=8 if own == WIDE else 4,
        **options(dependent),
    )
