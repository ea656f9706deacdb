"""Launches the products of groups of a few tokens with FP8 weights on Hopper. Allocates nothing and waits for nothing,
so it may be captured into a CUDA graph."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from kernels.gluon.stored import stored
from kernels.gluon.tiles import ROWS
from kernels.linear.fp8_launch import BLOCK, MOST_TOKENS, box, warps_of
from kernels.linear.launch import options
from kernels.linear.records import Size, Streams, Strides
from kernels.matrix import BlockScaled, Matrix
from kernels.runtime.hopper import is_hopper, multiprocessors


class GroupTiling(NamedTuple):
    """Division of a product of groups among programs and warps."""

    tiles: int
    """Times 16 weight rows of a program."""
    warps: int
    stages: int
    under_way: int
    """Stages that are asked for before the wait for the kernel before."""
    ahead: int
    """Chunks of tokens in registers."""
    registers: int = 255
    """Most registers of a thread."""


FEW: Final = GroupTiling(4, 8, 3, 2, 4)
"""For up to 8 tokens."""
SOME: Final = GroupTiling(4, 8, 3, 1, 4)
"""For up to 16 tokens."""

ALONE: Final = GroupTiling(2, 8, 6, 3, 4)
"""For up to 8 tokens and one matrix that is a group by itself."""
LONG_ALONE: Final = 4096
"""Fewest input features of such a matrix: with fewer, chunks are too few for a ring."""


def takes_alone(tokens: int, weight: Matrix) -> bool:
    """Whether `fp8_groups` multiplies so few tokens by a matrix as one group: where its programs are about as many as
    there are multiprocessors. One token took 10.4 us for 4096 x 8192 weights where `fp8_linear` took 13.6, behind a
    rounding of 2 (one H200)."""
    if not 0 < tokens <= MOST_TOKENS or not takes_groups(1, weight) or weight.shape[1] < LONG_ALONE:
        return False
    programs, places = weight.shape[0] // (ALONE.tiles * ROWS), multiprocessors(weight.device)
    return 3 * places <= 4 * programs <= 4 * places


def takes_groups(groups: int, weight: Matrix) -> bool:
    """Whether `fp8_groups` multiplies groups of this matrix: on Hopper, with scales for 128 features in whole blocks,
    of which none has rows of two programs or groups."""
    if not isinstance(weight, BlockScaled) or not is_hopper(weight.device):
        return False
    rows, features = weight.shape
    own = FEW.tiles * ROWS
    blocks = weight.features == BLOCK and weight.rows % own == 0 and features % BLOCK == 0
    return blocks and rows % (groups * weight.rows) == 0 and weight.data.data_ptr() % 16 == 0


def fp8_groups(
    x_TGE: Tensor,
    weight_FE: BlockScaled,
    out_TGU: Tensor,
    *,
    tiling: GroupTiling | None = None,
    dependent: bool = False,
) -> None:
    """`kernels.linear.group_linear` of up to 16 tokens in bf16, where `takes_groups` says so."""
    from kernels.linear import fp8_groups as kernels  # a machine without Hopper GPUs need not have Gluon

    (tokens, groups, features), rows = x_TGE.shape, out_TGU.shape[2]
    columns = 8 if tokens <= 8 else 16
    tiling = tiling or (FEW if columns == 8 else SOME)
    warps = warps_of(features, tiling.warps)
    chunks = -(-features // (warps * BLOCK))
    stages = min(tiling.stages, chunks)
    kernels.fp8_groups[(rows // (tiling.tiles * ROWS), groups)](
        x_TGE,
        box(weight_FE.data, [features // BLOCK, groups * rows, BLOCK], [BLOCK, features, 1], [warps, ROWS, BLOCK]),
        weight_FE.scales,
        out_TGU,
        tokens,
        STORED=stored(weight_FE)[2],
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x_TGE.stride(0),
            features,
            out_TGU.stride(0),
            x_head=x_TGE.stride(1),
            out_head=out_TGU.stride(1),
        ),
        STREAMS=Streams(columns, BLOCK, warps, stages),
        TILES=tiling.tiles,
        UNDER_WAY=min(tiling.under_way, stages),
        AHEAD=min(tiling.ahead, chunks),
        DEPENDENT=dependent,
        num_warps=warps,
        maxnreg=tiling.registers,
        **options(dependent),
    )
