"""Launches the experts' products with weights of 8 or 4 bits, as `launch` does those with plain ones."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.matrix import FourBits, Scaled
from kernels.moe import scaled, scaled_single
from kernels.moe.records import EIGHT_BITS, Stored, Tile, stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Product, Workspace, few_blocks
from kernels.pending_norm import PendingNorm
from kernels.runtime.carveout import leave_to_cache
from kernels.runtime.hopper import is_hopper

REGISTERS: Final = 168
"""Registers of a thread, where a multiprocessor is to have three programs of four warps."""
SINGLE_REGISTERS: Final = {3: 168, 4: 128}
"""Registers of a thread with which so many programs of a single token's products with weights of four bits fit on a
multiprocessor."""
SINGLE_INPUTS: Final = {3: 33 * 1024, 4: 0}
"""Bytes of shared memory for the inputs of such a program, at least: of three so many that a fourth finds no room
(`kernels.runtime.carveout.SHARED_BYTES`)."""
TILED_PROGRAMS: Final = {2: 4, 8: 1}
"""Programs of several tokens' products with weights of four bits, on a multiprocessor, by the pairs of a tile."""
TILED_REGISTERS: Final = 128
"""Registers of a thread with which that many programs fit."""
DOWN: Final = Product(8, 2048, 2, 4)
"""The tile of a single token's `down` of weights in FP8 on Hopper: rows of a program, features of a step, steps whose
weights are in registers (all but one of them on their way), warps."""
DOWN_PROGRAMS: Final = 3
"""Programs of it on a multiprocessor, at least: registers are limited to what lets them fit."""
REARRANGED: Final = 1024
"""Features of a program that brings tokens into another order."""


def gate_up(
    x_TE: Tensor, matrix: Scaled, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling, dependent: bool
) -> None:
    """Gate and up of the sorted pairs."""
    product, how = tiling.gate_up, _checked(matrix, tiling.stored[0])
    scaled.gate_up[(tiling.tiles(shape) * product.blocks(shape.intermediate),)](
        x_TE,
        *_weights(matrix, product),
        scratch.sorted_Y,
        scratch.table,
        scratch.act_YI,
        X_STRIDE=x_TE.stride(0),
        COLUMNS=shape.chosen,
        K=shape.hidden,
        FEATURES=shape.intermediate,
        LIMIT=shape.limit,
        STORED=how,
        TILE=_tile(tiling, product, shape),
        **_launched(product, dependent, tiling.rows),
    )


def down(matrix: Scaled, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling, dependent: bool) -> None:
    """Down of the sorted pairs."""
    product, how = tiling.down, _checked(matrix, tiling.stored[1])
    scaled.down[(tiling.tiles(shape) * product.blocks(shape.hidden) * (shape.parts // tiling.walked),)](
        scratch.act_YI,
        *_weights(matrix, product),
        scratch.sorted_Y,
        scratch.table,
        scratch.partial_YGE,
        K=shape.intermediate,
        FEATURES=shape.hidden,
        GROUPS=shape.parts,
        WALK=tiling.walked,
        STORED=how,
        TILE=_tile(tiling, product, shape),
        **_launched(product, dependent, tiling.rows),
    )


def gate_up_singly(
    x_TE: Tensor,
    id_TK: Tensor,
    matrix: Scaled,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
    dependent: bool,
) -> None:
    """Gate and up, pair by pair, of weights in FP8."""
    product, how = tiling.gate_up, _in_bytes(matrix, tiling.stored[0])
    scaled_single.gate_up[(shape.pairs * product.blocks(shape.intermediate),)](
        x_TE,
        matrix.data.view(torch.uint8),
        matrix.scales,
        id_TK,
        scratch.act_YI,
        X_STRIDE=x_TE.stride(0),
        COLUMNS=shape.chosen,
        EXPERTS=shape.experts,
        K=shape.hidden,
        FEATURES=shape.intermediate,
        LIMIT=shape.limit,
        STORED=how,
        BLOCK=product.block,
        BLOCK_K=product.block_k,
        NATIVE=is_hopper(matrix.device),
        **_launched(product, dependent),
    )


def down_singly(
    id_TK: Tensor,
    weight_TK: Tensor,
    matrix: Scaled,
    out_TE: Tensor,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
    dependent: bool,
    before_TE: Tensor | None,
) -> None:
    """Down of weights in FP8, pair by pair, and the weighted sum, with what comes before it."""
    product, how = tiling.down, _in_bytes(matrix, tiling.stored[1])
    before = out_TE if before_TE is None else before_TE
    tensors = matrix.scales, id_TK, weight_TK, before, out_TE
    sizes = {
        "BEFORE_STRIDE": 0 if before_TE is None else before.stride(0),
        "OUT_STRIDE": out_TE.stride(0),
        "COLUMNS": shape.chosen,
        "EXPERTS": shape.experts,
        "K": shape.intermediate,
        "FEATURES": shape.hidden,
        "ADD": before_TE is not None,
        "STORED": how,
    }
    if is_hopper(matrix.device) and shape.dtype == torch.bfloat16:
        from kernels.moe import scaled_down  # a machine without Hopper GPUs need not have Gluon

        scaled_down.down[(shape.tokens * DOWN.blocks(shape.hidden),)](
            scratch.act_YI.view(torch.int64),
            matrix.data.view(torch.int32),
            *tensors,
            **sizes,
            BLOCK=DOWN.block,
            PIECES=min(DOWN.block_k, triton.next_power_of_2(shape.intermediate)) // 16,
            AHEAD=DOWN.stages - 1,
            WARPS=DOWN.warps,
            maxnreg=min(255, 65536 // (DOWN_PROGRAMS * DOWN.warps * 32) // 8 * 8),
            **_launched(DOWN, dependent),
        )
        return
    scaled_single.down[(shape.tokens * product.blocks(shape.hidden),)](
        scratch.act_YI,
        matrix.data.view(torch.uint8),
        *tensors,
        **sizes,
        BLOCK=product.block,
        BLOCK_K=product.block_k,
        **_launched(product, dependent),
    )


def four_bit_singly(
    x: Tensor | PendingNorm,
    id_TK: Tensor,
    matrix: FourBits,
    out_YF: Tensor,
    shape: ExpertsShape,
    tiling: ExpertTiling,
    dependent: bool,
    *,
    settled: bool,
) -> None:
    """One of the products of a single token with weights of four bits, on Hopper: of `x`, the token [1, E] for gate and
    up, the pairs' activations [Y, I] for down. `x` may be a pending norm. `settled`: the choice of experts was there
    when the kernel before let this one start."""
    from kernels.moe import four_bit_single  # a machine without Hopper GPUs need not have Gluon

    pending, x = _pending(x)
    gate = len(x) < shape.pairs
    _checked(matrix, tiling.stored[0 if gate else 1])
    product = tiling.gate_up if gate else tiling.down
    pieces = shape.pairs * (2 if gate else 1) * out_YF.shape[-1] // product.block
    programs = 3 if few_blocks(pieces, tiling.programs) else 4
    kernel = four_bit_single.product[(min(programs * tiling.programs, pieces),)](
        x,
        x if pending is None else pending.square_TP,
        matrix.data.view(torch.int16),
        matrix.scales,
        id_TK,
        out_YF,
        0.0 if pending is None else pending.eps,
        FORMAT=tiling.stored[0].format,
        GATE=gate,
        CHOSEN=shape.chosen,
        EXPERTS=shape.experts,
        K=x.shape[-1],
        FEATURES=out_YF.shape[-1],
        PIECES=0 if pending is None else pending.square_TP.shape[1],
        AHEAD=product.stages,
        INPUTS=max(x.shape[-1], SINGLE_INPUTS[programs] // 2),
        LIMIT=shape.limit,
        SETTLED=settled,
        DEPENDENT=dependent,
        num_warps=product.warps,
        maxnreg=SINGLE_REGISTERS[programs],
        **({"launch_pdl": True} if dependent else {}),
    )
    leave_to_cache(kernel)


def four_bit_tiled(
    x: Tensor | PendingNorm,
    matrix: FourBits,
    out_YF: Tensor,
    scratch: Workspace,
    shape: ExpertsShape,
    tiling: ExpertTiling,
    dependent: bool,
    *,
    settled: bool,
) -> None:
    """One of the products of several tokens with weights of four bits, on Hopper: of `x`, the tokens [T, E] for gate
    and up, the sorted pairs' activations [Y, I] for down. `x` may be a pending norm. `settled`: the tiles were there
    when the kernel before let this one start."""
    from kernels.moe import four_bit_tiles  # a machine without Hopper GPUs need not have Gluon

    pending, x = _pending(x)
    gate = matrix.shape[-2] == 2 * out_YF.shape[-1]
    _checked(matrix, tiling.stored[0 if gate else 1])
    product, programs = tiling.gate_up if gate else tiling.down, TILED_PROGRAMS[tiling.rows] * tiling.programs
    pieces = tiling.tiles(shape) * (2 if gate else 1) * out_YF.shape[-1] // product.block
    kernel = four_bit_tiles.product[(min(programs, pieces),)](
        x,
        x if pending is None else pending.square_TP,
        matrix.data.view(torch.int16),
        matrix.scales,
        scratch.sorted_Y,
        scratch.table,
        out_YF,
        0.0 if pending is None else pending.eps,
        X_STRIDE=x.stride(0),
        FORMAT=tiling.stored[0].format,
        GATE=gate,
        CHOSEN=shape.chosen,
        K=x.shape[-1],
        FEATURES=out_YF.shape[-1],
        PIECES=0 if pending is None else pending.square_TP.shape[1],
        PAIRS=tiling.rows,
        AHEAD=product.stages,
        WARPS=product.warps,
        LIMIT=shape.limit,
        SETTLED=settled,
        DEPENDENT=dependent,
        num_warps=product.warps,
        maxnreg=TILED_REGISTERS,
        **({"launch_pdl": True} if dependent else {}),
    )
    leave_to_cache(kernel)


def tokens(scratch: Workspace, shape: ExpertsShape) -> Tensor:
    """The tokens [T, E] in the order of `four_bit_grouped`. They lie where `down` leaves the pairs' results, for by
    then nobody reads them any more."""
    return scratch.partial_YGE.view(-1)[: shape.tokens * shape.hidden].view(shape.tokens, shape.hidden)


def rearrange(x_TE: Tensor, scratch: Workspace, shape: ExpertsShape) -> None:
    """Bring the tokens into that order."""
    from kernels.moe import four_bit_grouped  # a machine without Hopper GPUs need not have Gluon

    grid = (shape.tokens, triton.cdiv(shape.hidden, REARRANGED))
    four_bit_grouped.rearrange[grid](
        x_TE,
        tokens(scratch, shape),
        X_STRIDE=x_TE.stride(0),
        K=shape.hidden,
        BLOCK=REARRANGED,
        num_warps=4,
    )


def four_bit_grouped(
    x: Tensor, matrix: FourBits, out_YF: Tensor, scratch: Workspace, shape: ExpertsShape, tiling: ExpertTiling
) -> None:
    """One of the products of many tokens with weights of four bits, on Hopper: of `x` in its order, the tokens [T, E]
    for gate and up, the sorted pairs' activations [Y, I] for down."""
    from kernels.moe import four_bit_grouped  # a machine without Hopper GPUs need not have Gluon

    gate = matrix.shape[-2] == 2 * out_YF.shape[-1]
    how = _checked(matrix, tiling.stored[0 if gate else 1]).format
    product, features = tiling.gate_up if gate else tiling.down, out_YF.shape[-1]
    four_bit_grouped.product[(tiling.programs,)](
        x,
        four_bit_grouped.word_box(matrix),
        four_bit_grouped.scale_box(matrix, how),
        scratch.sorted_Y,
        scratch.table,
        out_YF,
        x.shape[-1] // (four_bit_grouped.turn_of(how) * product.block_k),
        FORMAT=how,
        GATE=gate,
        COLUMNS=shape.chosen,
        K=x.shape[-1],
        FEATURES=features,
        BLOCKS=product.blocks(features),
        GROUP=product.group,
        ROWS=tiling.rows,
        STAGES=product.stages,
        LIMIT=shape.limit,
        num_warps=product.warps,
    )


def _pending(x: Tensor | PendingNorm) -> tuple[PendingNorm | None, Tensor]:
    """The norm that is pending, if any is, and its rows."""
    return (x, x.x_TE) if isinstance(x, PendingNorm) else (None, x)


def _checked(matrix: Scaled, planned: Stored) -> Stored:
    """Return the storage of the matrices; ValueError where the tiles were made for another."""
    how = stored(matrix)
    if how != planned:
        raise ValueError(f"the tiles are for weights that are stored as {planned}, not as {how}")
    return how


def _in_bytes(matrix: Scaled, planned: Stored) -> Stored:
    """Return the storage of matrices that must have a number in a byte."""
    how = _checked(matrix, planned)
    if how.format not in EIGHT_BITS:
        raise ValueError(f"a single token without tiles takes plain weights or those of eight bits, not {how}")
    return how


def _weights(matrix: Scaled, product: Product) -> tuple[Tensor, Tensor | TensorDescriptor, Tensor]:
    """The bytes, what the copy engine needs to know to fetch a tile of the experts' rows, laid end to end, scales."""
    data = matrix.data.view(torch.uint8)
    if not product.tma:
        return data, data, matrix.scales
    width = product.block_k * matrix.data.shape[-1] // matrix.shape[-1]
    return data, TensorDescriptor.from_tensor(data.flatten(0, 1), [product.block, width]), matrix.scales


def _tile(tiling: ExpertTiling, product: Product, shape: ExpertsShape) -> Tile:
    precision = "ieee" if shape.dtype == torch.float32 else "tf32"
    return Tile(tiling.rows, product.block, product.block_k, product.stages, product.group, product.tma, precision)


def _launched(product: Product, dependent: bool, rows: int = 0) -> dict[str, Any]:
    """The launch attribute exists on CUDA only, and the interpreter knows none. Of tiles of 64 three programs are to
    stand on a multiprocessor, which ptxas at times misses by a register. `rows`: of a tile; 0 where there are as many
    programs as fit."""
    how: dict[str, Any] = {"DEPENDENT": dependent, "num_warps": product.warps}
    if rows == 64 and product.warps == 4:
        how["maxnreg"] = REGISTERS
    return how | ({"launch_pdl": True} if dependent else {})
