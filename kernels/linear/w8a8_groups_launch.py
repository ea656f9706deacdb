"""Products of groups of input features with FP8 weights of their own on Hopper, of activations that are rounded to FP8.
Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

Shape legend: T tokens, G groups, E input features of a group, U its output features, K = G E, F = G U, S = K / 128
scales of a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.linear.launch import options
from kernels.linear.w8a8 import w8a8_reference
from kernels.matrix import BlockScaled
from kernels.runtime.hopper import is_hopper, multiprocessors

BLOCK: Final = 128
"""Weight rows and input features that share a scale."""
TILE: Final = 128
"""Tokens of an item."""
STAGES: Final = {64: 8, 128: 6, 256: 4}
"""Stages of a ring, by the weight rows of an item: 192 KiB."""


def takes_w8a8_groups(device: torch.device, groups: int, weight_FE: BlockScaled) -> bool:
    """Whether `w8a8_group_linear` runs on a device and takes groups of this matrix: on Hopper's, for blocks of
    128 x 128, of which none is cut or has rows of two groups."""
    rows, features = weight_FE.shape
    whole = rows % (groups * BLOCK) == 0 and features % BLOCK == 0
    return is_hopper(device) and whole and (weight_FE.rows, weight_FE.features) == (BLOCK, BLOCK)


def w8a8_group_linear(
    x_TK: Tensor, scale_TS: Tensor, weight_FE: BlockScaled, out_TGU: Tensor, *, dependent: bool = False
) -> None:
    """out[t, g] = weight[g] · x[t, g], with weight[g] the g-th of G equal groups of neighbouring rows and x[t, g] of
    neighbouring features, of activations as `kernels.quantize` leaves them: every 128 products are summed by the tensor
    cores, multiplied by the scales of both, and added up in fp32; then rounded once to the dtype of `out_TGU`.

    `x_TK` is float8_e4m3fn and contiguous; columns of `scale_TS` (fp32) are contiguous and lie side by side. The last
    dimension of `out_TGU` is contiguous, the others are in whole 16-byte pieces. A token's result does not depend on
    the other tokens. For matrices that `takes_w8a8_groups` takes. `dependent`: programmatic dependent launch, which is
    always safe. ValueError for other shapes and strides. Source: DeepSeek-V4 (2026), section 2.3.1.
    """
    (tokens, groups, rows), features = out_TGU.shape, weight_FE.shape[1]
    if x_TK.shape != (tokens, groups * features) or weight_FE.shape[0] != groups * rows:
        raise ValueError(f"{tuple(x_TK.shape)} do not become {tuple(out_TGU.shape)} with a matrix {weight_FE.shape}")
    if not x_TK.is_contiguous() or scale_TS.stride() != (1, tokens) or out_TGU.stride(2) != 1:
        raise ValueError("scales lie column by column, activations and results row by row")
    if not tokens:
        return
    if x_TK.is_cuda:
        launch_w8a8_groups(x_TK, scale_TS, weight_FE, out_TGU, dependent=dependent)
        return
    for group in range(groups):
        own, blocks = slice(group * rows, (group + 1) * rows), rows // BLOCK
        weight = BlockScaled(weight_FE.data[own], weight_FE.scales[group * blocks : (group + 1) * blocks])
        scales = scale_TS[:, group * features // BLOCK : (group + 1) * features // BLOCK]
        w8a8_reference(x_TK[:, group * features : (group + 1) * features], scales, weight, out_TGU[:, group])


def launch_w8a8_groups(
    x_TK: Tensor,
    scale_TS: Tensor,
    weight_FE: BlockScaled,
    out_TGU: Tensor,
    *,
    programs: int | None = None,
    stages: int | None = None,
    own: int | None = None,
    dependent: bool = False,
) -> None:
    """`w8a8_group_linear` as a kernel. `own`: weight rows of an item, 64, 128 or 256."""
    from kernels.linear import w8a8_groups as kernels  # a machine without Hopper GPUs need not have Gluon

    (tokens, groups, rows), features = out_TGU.shape, weight_FE.shape[1]
    programs = programs or multiprocessors(out_TGU.device)
    blocks = -(-tokens // TILE) * groups * (rows // BLOCK)
    own = own or _rows_of_item(blocks, rows, programs)
    width = min(own, BLOCK)
    kernels.multiply_groups[(min(programs, blocks * BLOCK // own),)](
        kernels.box(x_TK, TILE // 2),
        scale_TS,
        kernels.box(weight_FE.data, width),
        weight_FE.scales,
        out_TGU,
        tokens,
        GROUPS=groups,
        F=rows,
        K=features,
        OUT_TOKEN=out_TGU.stride(0),
        OUT_GROUP=out_TGU.stride(1),
        WIDTH=width,
        BLOCKS=own // width,
        STAGES=stages or STAGES[own],
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def _rows_of_item(blocks: int, rows: int, programs: int) -> int:
    """Weight rows of an item, of a product that has so many blocks of 128 for all tiles of tokens: half a block where
    there are programs for all halves. A turn of the programs with two blocks, which read the tokens once, takes five
    thirds of one with one block."""
    if 2 * blocks <= programs:
        return BLOCK // 2
    pays = 5 * -(-blocks // (2 * programs)) < 3 * -(-blocks // programs)
    return 2 * BLOCK if rows % (2 * BLOCK) == 0 and pays else BLOCK
