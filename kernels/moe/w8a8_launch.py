"""Launches the experts' products whose activations are rounded to FP8, as `launch` does the others.

Memory is that of the call's workspace: the tokens' numbers and scales lie where `down` leaves the pairs' results, for
by then nobody reads them any more; those of its inputs lie where they would lie in bf16.

Shape legend: T tokens, E features, Y sorted pairs, I intermediate features of one expert, G groups of 128 features.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.matrix import BlockScaled
from kernels.moe.records import stored
from kernels.moe.schedule import W8A8_BLOCK, ExpertsShape, ExpertTiling, Workspace
from kernels.quantize import launch_quantize

MOST_UNCLAIMED: Final = 256
"""Most tokens whose programs do not claim items of `down`. Of an eighth of DeepSeek-V3 and 16 tokens it takes 52 us so,
and 58 with claims; of 64 tokens 108 and 123 (one H200, `bench/share.py --layers 8 --timeline`)."""


def quantize(x_TE: Tensor, scratch: Workspace, shape: ExpertsShape) -> None:
    """Round the tokens to FP8."""
    launch_quantize(x_TE, *tokens(scratch, shape))


def gate_up(
    matrix: BlockScaled,
    rounded: tuple[Tensor, Tensor] | None,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
) -> None:
    """Gate and up of the sorted pairs, rounded to FP8, of the tokens as they are `rounded`, or as `quantize` has left
    them."""
    read = rounded or tokens(scratch, shape)
    _product(matrix, read, inputs(scratch, shape), None, scratch, shape, tiling)


def down(matrix: BlockScaled, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling) -> None:
    """Down of the sorted pairs."""
    read = inputs(scratch, shape)
    _product(matrix, read, read, scratch.partial_YGE, scratch, shape, tiling)


def tokens(scratch: Workspace, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """The tokens' numbers [T, E] and scales [T, G]."""
    return _quantized(scratch.partial_YGE, shape.tokens, shape.hidden)


def inputs(scratch: Workspace, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """The numbers [Y, I] and scales [Y, G] of the sorted pairs' inputs of `down`."""
    return _quantized(scratch.act_YI, shape.pairs, shape.intermediate)


def _quantized(memory: Tensor, rows: int, features: int) -> tuple[Tensor, Tensor]:
    groups, size = features // W8A8_BLOCK, rows * features
    bytes_ = memory.view(-1).view(torch.uint8)
    numbers = bytes_[:size].view(torch.float8_e4m3fn).view(rows, features)
    return numbers, bytes_[size : size + 4 * rows * groups].view(torch.float32).view(rows, groups)


def _product(
    matrix: BlockScaled,
    read: tuple[Tensor, Tensor],
    inputs_of_down: tuple[Tensor, Tensor],
    results: Tensor | None,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
) -> None:
    from kernels.moe import w8a8  # a machine without Hopper GPUs need not have Gluon

    gate = results is None
    product, planned = (tiling.gate_up, tiling.stored[0]) if gate else (tiling.down, tiling.stored[1])
    if (how := stored(matrix)) != planned:
        raise ValueError(f"the tiles are for weights that are stored as {planned}, not as {how}")
    features = shape.intermediate if gate else shape.hidden
    w8a8.product[(tiling.programs,)](
        *read,
        w8a8.box(inputs_of_down[0], tiling.rows // 2),
        w8a8.box(matrix.data.flatten(0, 1), W8A8_BLOCK),
        matrix.scales,
        scratch.sorted_Y,
        scratch.table,
        inputs_of_down[0] if results is None else results,
        inputs_of_down[1],
        GATE=gate,
        COLUMNS=shape.chosen,
        K=shape.hidden if gate else shape.intermediate,
        FEATURES=features,
        BLOCKS=product.blocks(features),
        GROUP=product.group,
        STAGES=product.stages,
        LIMIT=shape.limit,
        CLAIMED=gate or shape.tokens > MOST_UNCLAIMED,
        num_warps=product.warps,
    )
