"""Launches the products of groups of a few tokens with FP8 weights on Hopper. Allocates nothing and waits for nothing,
so it may be captured into a CUDA graph."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from kernels.gluon.stored import stored
from kernels.gluon.tiles import ROWS
from kernels.linear.fp8_launch import BLOCK, MOST_TOKENS, box, warps_of
from kernels.linear.launch import options, pieces
from kernels.linear.records import Size, Streams, Strides
from kernels.matrix import BlockScaled, Matrix
from kernels.pending_norm import PendingNorm
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
    """Chunks of tokens that are asked for ahead."""
    kept: bool = False
    """Whether those are in shared memory, not in registers."""


FEW: Final = GroupTiling(4, 8, 3, 2, 4)
"""For up to 8 tokens. 8 times 1,024 x 4,096 weights took an H200 8.9 us for one and 10.1 for eight; with one stage or
three under way before the wait, one took half a microsecond longer."""
SOME: Final = GroupTiling(4, 8, 3, 1, 4)
"""For up to 16 tokens: 12.5 us for 16, and 13.1 with two stages under way."""
NORMED: Final = GroupTiling(4, 8, 3, 2, 2, kept=True)
"""For 2 to 8 tokens whose norm is pending. A thread that loads what it multiplies asks for each 32 bytes of the tokens
twice, so those that are copied to shared memory take half as much from L2. For groups, whose tokens have more features,
nobody has measured that; their programs would leave no shared memory to those of the kernel before."""
ALONE: Final = GroupTiling(2, 8, 6, 3, 4)
"""For a token and one matrix that is a group by itself."""
FEW_ALONE: Final = GroupTiling(2, 8, 4, 3, 2, kept=True)
"""The same for up to 8 tokens."""
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


def takes_normed(tokens: int, weight: Matrix) -> bool:
    """Whether `fp8_groups` multiplies so few tokens, whose norm is pending, by a matrix as one group: one that has at
    least as many programs as most multiprocessors, of few input features, which one chunk or two have."""
    if not 0 < tokens <= MOST_TOKENS or not takes_groups(1, weight) or weight.shape[1] > 2 * FEW.warps * BLOCK:
        return False
    return 4 * (weight.shape[0] // (FEW.tiles * ROWS)) >= 3 * multiprocessors(weight.device)


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
    pending: PendingNorm | None = None,
    tiling: GroupTiling | None = None,
    dependent: bool = False,
) -> None:
    """`kernels.linear.group_linear` of up to 16 tokens in bf16, where `takes_groups` says so. `pending`: the norm of
    the tokens of the only group, where it is to be finished."""
    from kernels.linear import fp8_groups as kernels  # a machine without Hopper GPUs need not have Gluon

    (tokens, groups, features), rows = x_TGE.shape, out_TGU.shape[2]
    columns = 8 if tokens <= 8 else 16
    tiling = tiling or (SOME if columns > 8 else FEW if tokens == 1 or pending is None else NORMED)
    warps = warps_of(features, tiling.warps)
    chunks = -(-features // (warps * BLOCK))
    stages = min(tiling.stages, chunks)
    kernels.fp8_groups[(rows // (tiling.tiles * ROWS), groups)](
        x_TGE,
        x_TGE if pending is None else pending.square_TP,
        box(weight_FE.data, [features // BLOCK, groups * rows, BLOCK], [BLOCK, features, 1], [warps, ROWS, BLOCK]),
        weight_FE.scales,
        out_TGU,
        tokens,
        0.0 if pending is None else pending.eps,
        STORED=stored(weight_FE)[2],
        SIZE=Size(rows, features),
        STRIDES=Strides(
            x_TGE.stride(0),
            features,
            out_TGU.stride(0),
            x_head=x_TGE.stride(1),
            out_head=out_TGU.stride(1),
        ),
        NORM=pieces(pending),
        STREAMS=Streams(columns, BLOCK, warps, stages),
        TILES=tiling.tiles,
        UNDER_WAY=min(tiling.under_way, stages),
        AHEAD=min(tiling.ahead, chunks),
        KEPT=tiling.kept,
        DEPENDENT=dependent,
        num_warps=warps,
        **options(dependent),
    )
