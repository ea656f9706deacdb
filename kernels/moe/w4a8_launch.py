"""Launches the experts' products with activations in FP8 and weights in MXFP4, as `launch` does the others.

Memory is that of the call's workspace. Where `down` leaves the pairs' results lie, before that, the tokens' numbers and
scales in the order of the sorted pairs and, behind them, those of the tokens as they are rounded. Its inputs lie where
they would lie in bf16.

Shape legend: T tokens, E features, Y sorted pairs, I intermediate features of one expert, G groups of 128 features.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from kernels.matrix import MicroScaled4
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Workspace
from kernels.moe.w8a8_launch import in_memory
from kernels.quantize import launch_quantize

GATHERED: Final = 32768
"""Bytes of tokens that a program gathers, for several places of pairs: in 8 warps a thread has 128 on their way."""


def quantize(x_TE: Tensor, scratch: Workspace, shape: ExpertsShape) -> None:
    """Round the tokens to FP8."""
    launch_quantize(x_TE, *tokens(scratch, shape))


def gather(rounded: tuple[Tensor, Tensor] | None, scratch: Workspace, shape: ExpertsShape) -> None:
    """Bring the tokens, as they are `rounded` or as `quantize` has left them, into the order of the sorted pairs."""
    from kernels.moe import w4a8  # a machine without Hopper GPUs need not have Gluon

    number, scale = rounded or tokens(scratch, shape)
    to, scale_to = sorted_tokens(scratch, shape)
    block = triton.next_power_of_2(shape.hidden)
    places = max(GATHERED // block, 1)
    w4a8.gather[(triton.cdiv(shape.pairs, places),)](
        number.view(torch.uint8),
        scale,
        scratch.sorted_Y,
        scratch.table,
        to.view(torch.uint8),
        scale_to,
        scale_to.shape[1],
        COLUMNS=shape.chosen,
        K=shape.hidden,
        BLOCK=block,
        PLACES=places,
        num_warps=8,
    )


def gate_up(matrix: MicroScaled4, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling) -> None:
    """Gate and up of the sorted pairs, rounded to FP8."""
    _product(matrix, sorted_tokens(scratch, shape), inputs(scratch, shape), scratch, shape, tiling)


def down(matrix: MicroScaled4, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling) -> None:
    """Down of the sorted pairs."""
    _product(matrix, inputs(scratch, shape), None, scratch, shape, tiling)


def sorted_tokens(scratch: Workspace, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """The numbers [Y, E] and scales [G, Y] of the sorted pairs' tokens."""
    return _by_group(scratch.partial_YGE, shape.pairs, shape.hidden)


def inputs(scratch: Workspace, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """The numbers [Y, I] and scales [G, Y] of the sorted pairs' inputs of `down`."""
    return _by_group(scratch.act_YI, shape.pairs, shape.intermediate)


def _by_group(memory: Tensor, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """Numbers [rows, features] in FP8 at the front of memory, and behind them their scales, those of a group side by
    side: a tile's are asked for at once."""
    number, scale = in_memory(memory, rows, features)
    return number, scale.view(-1, rows)


def tokens(scratch: Workspace, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """The tokens' numbers [T, E] and scales [T, G]."""
    taken = sum(tensor.nbytes for tensor in sorted_tokens(scratch, shape))
    behind = scratch.partial_YGE.view(-1).view(torch.uint8)[taken:]
    return in_memory(behind, shape.tokens, shape.hidden)


def _product(
    matrix: MicroScaled4,
    read: tuple[Tensor, Tensor],
    rounded: tuple[Tensor, Tensor] | None,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
) -> None:
    """`rounded`: where results in FP8 go; without it they are the pairs'."""
    from kernels.moe import w4a8, w4a8_weights  # a machine without Hopper GPUs need not have Gluon

    gate = rounded is not None
    product, planned = (tiling.gate_up, tiling.stored[0]) if gate else (tiling.down, tiling.stored[1])
    if (how := stored(matrix)) != planned or matrix.least is None:
        raise ValueError(f"the tiles are for weights that are stored as {planned}, not as {how}")
    features = shape.intermediate if gate else shape.hidden
    number, scale = read
    out, out_scale = rounded or (scratch.partial_YGE, scale)
    w4a8.product[(tiling.programs,)](
        w4a8.input_box(number),
        scale,
        w4a8_weights.word_box(matrix, gate),
        w4a8_weights.scale_box(matrix, gate),
        matrix.least,
        scratch.sorted_Y,
        scratch.table,
        out,
        out_scale,
        scale.shape[1],
        GATE=gate,
        K=number.shape[1],
        FEATURES=features,
        BLOCKS=product.blocks(features),
        GROUP=product.group,
        STAGES=product.stages,
        LIMIT=shape.limit,
        num_warps=product.warps,
    )
