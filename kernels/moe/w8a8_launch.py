"""Launches the experts' products whose activations are rounded to FP8, as `launch` does the others.

Memory is that of the call's workspace: the tokens' numbers and scales lie where `down` leaves the pairs' results, for
by then nobody reads them any more; those of its inputs lie where they would lie in bf16.

Shape legend: T tokens, E features, Y sorted pairs, I intermediate features of one expert, G groups of 128 features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.matrix import BlockScaled
from kernels.moe.records import stored
from kernels.moe.schedule import W8A8_BLOCK, ExpertsShape, ExpertTiling, Workspace
from kernels.quantize import Fp8Rows, launch_quantize


def quantize(x_TE: Tensor, scratch: Workspace, shape: ExpertsShape, dependent: bool) -> None:
    """Round the tokens to FP8."""
    launch_quantize(x_TE, *tokens(scratch, shape), dependent=dependent)


def gate_up(
    matrix: BlockScaled,
    rounded: Fp8Rows | None,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
    dependent: bool,
) -> None:
    """Gate and up of the sorted pairs, rounded to FP8, of the tokens as they are `rounded`, or as `quantize` has left
    them."""
    read = tokens(scratch, shape) if rounded is None else rounded.of(shape.tokens)
    _product(matrix, read, inputs(scratch, shape), None, scratch, shape, tiling, dependent)


def down(matrix: BlockScaled, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling, dependent: bool) -> None:
    """Down of the sorted pairs."""
    read = inputs(scratch, shape)
    _product(matrix, read, read, scratch.partial_YGE, scratch, shape, tiling, dependent)


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
    dependent: bool,
) -> None:
    from kernels.moe import w8a8  # a machine without Hopper GPUs need not have Gluon

    gate = results is None
    product, planned = (tiling.gate_up, tiling.stored[0]) if gate else (tiling.down, tiling.stored[1])
    if (how := stored(matrix)) != planned:
        raise ValueError(f"the tiles are for weights that are stored as {planned}, not as {how}")
    features = shape.intermediate if gate else shape.hidden
    w8a8.product[(tiling.programs,)](
        *read,
        *read[1].stride(),
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
        DEPENDENT=dependent,
        num_warps=product.warps,
        **({"launch_pdl": True} if dependent else {}),
    )
