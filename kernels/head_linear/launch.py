"""Launches the kernels of the absorbed form. Allocates nothing and waits for nothing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gluon.stored import PLAIN
from kernels.gluon.tiles import ROWS
from kernels.head_linear import kernel, merge
from kernels.head_linear.records import AbsorbCut, Attended, Features, Matrices, MergeCut, Projected
from kernels.latent_entry import entry_of
from kernels.linear.launch import MOST_STREAMED, Streaming, options
from kernels.mla_decode.schedule import Workspace
from kernels.page import PAGE_TOKENS

_GROUP = 16
"""Heads a program rotates."""
_ENOUGH = 96
"""Programs that keep most of the multiprocessors busy."""
_APART = 128
"""Programs that have a multiprocessor each."""


def rope_absorb(
    q_THD: Tensor,
    kv_TC: Tensor,
    weight_HNL: Tensor,
    norm_L: Tensor,
    rotation_PO: Tensor,
    position_T: Tensor,
    cache_slot_T: Tensor,
    out_THC: Tensor,
    cache_PKC: Tensor,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    tokens, *parts, heads, _ = q_THD.shape
    nope, latent = weight_HNL.shape[1:]
    rope = rotation_PO.shape[1]
    if not tokens:
        return
    if not out_THC.is_contiguous() or not rotation_PO.is_contiguous() or q_THD.stride(-1) != 1:
        raise ValueError("a head's features lie side by side, the absorbed query and the rotations are contiguous")
    if q_THD.shape[-1] != nope + rope:
        raise ValueError(f"a query of {nope} features and {rope} roped ones does not have {q_THD.shape[-1]}")
    if kv_TC.shape[:-1] != (tokens, *parts):
        raise ValueError(f"queries {tuple(q_THD.shape)} and latents {tuple(kv_TC.shape)} are not as many parts")
    if not position_T.is_contiguous() or not cache_slot_T.is_contiguous():
        raise ValueError("positions and cache slots are contiguous")
    if weight_HNL.stride(2) != 1 or cache_PKC.stride(0) != PAGE_TOKENS * cache_PKC.stride(1):
        raise ValueError("weight rows are contiguous and cache entries equally spaced")
    cut, box = _cut(tokens, weight_HNL, bool(parts), out_THC.dtype)
    programs = _products(cut, tokens, heads, latent) + tokens * (1 + triton.cdiv(heads, cut.group))
    kernel.rope_absorb[(programs,)](
        q_THD,
        kv_TC,
        weight_HNL,
        weight_HNL if box is None else box,
        norm_L,
        rotation_PO,
        position_T,
        cache_slot_T,
        out_THC,
        cache_PKC,
        tokens,
        cache_PKC.shape[0] * PAGE_TOKENS,
        eps,
        QUERY=_projected(q_THD, parts, head=q_THD.stride(-2)),
        LATENTS=_projected(kv_TC, parts),
        WEIGHT=_matrices(weight_HNL),
        CACHE_STRIDE=cache_PKC.stride(1),
        FEATURES=_features(weight_HNL, rope),
        ENTRY=entry_of(cache_PKC, latent, rope, out_THC.dtype),
        CUT=cut,
        DEPENDENT=dependent,
        num_warps=8 if parts else 4,  # parts of all features of a token's head are on their way at once
        **options(dependent),
    )


def absorb(q_THD: Tensor, weight_HNL: Tensor, out_THC: Tensor, *, dependent: bool = False) -> None:
    tokens, heads, features = q_THD.shape
    nope, latent = weight_HNL.shape[1:]
    if not tokens:
        return
    if not out_THC.is_contiguous() or q_THD.stride(-1) != 1 or weight_HNL.stride(2) != 1:
        raise ValueError("a head's features lie side by side, the absorbed query and weight rows are contiguous")
    cut, _ = _cut(tokens, weight_HNL, False, out_THC.dtype)
    programs = _products(cut, tokens, heads, latent) + tokens * triton.cdiv(heads, cut.group)
    kernel.absorb[(programs,)](
        q_THD,
        weight_HNL,
        out_THC,
        tokens,
        QUERY=_projected(q_THD, [], head=q_THD.stride(-2)),
        WEIGHT=_matrices(weight_HNL),
        FEATURES=_features(weight_HNL, features - nope),
        CUT=cut,
        DEPENDENT=dependent,
        num_warps=4,
    )


def _cut(tokens: int, weight_HNL: Tensor, parts: bool, dtype: torch.dtype) -> tuple[AbsorbCut, TensorDescriptor | None]:
    """Choose how the queries of `tokens` tokens are absorbed, and the descriptor with which the copy engine fetches the
    weights, if it does. `parts`: whether the queries are partial sums."""
    heads, _, latent = weight_HNL.shape
    wide = dtype == torch.float32
    if parts:
        tile, columns = 16, _columns_of_parts(tokens, heads, latent)
    elif tokens <= MOST_STREAMED:
        tile, columns = 16, 64 if heads <= 32 else 128
    else:
        tile, columns = 64, 64
    if wide:  # larger tiles spill registers
        tile, columns = min(tile, 32), 16
    columns = max(16, min(columns, triton.next_power_of_2(latent)))
    box = _box(weight_HNL, columns) if parts else None
    group = min(_GROUP, triton.next_power_of_2(heads))
    return AbsorbCut(tile, columns, group, "ieee" if wide else "tf32", boxed=box is not None), box


def _products(cut: AbsorbCut, tokens: int, heads: int, latent: int) -> int:
    """Programs that multiply."""
    return int(heads * triton.cdiv(latent, cut.columns) * triton.cdiv(tokens, cut.tokens))


def _features(weight_HNL: Tensor, rope: int) -> Features:
    """Return the features of heads with these W_UK and this number of rope features."""
    heads, nope, latent = weight_HNL.shape
    return Features(
        heads=heads,
        nope=nope,
        nope_block=max(16, triton.next_power_of_2(nope)),
        latent=latent,
        latent_block=triton.next_power_of_2(latent),
        rope=rope,
        rope_block=triton.next_power_of_2(rope),
    )


def _projected(x: Tensor, parts: list[int], head: int = 0) -> Projected:
    """Describe where a product has left `x`: its strides and number of parts, if any."""
    part = (x.stride(1), parts[0]) if parts else (0, 0)
    return Projected(x.stride(0), head, *part)


def _matrices(weight_HNL: Tensor) -> Matrices:
    """Describe where one weight matrix per head is."""
    return Matrices(head=weight_HNL.stride(0), row=weight_HNL.stride(1))


def _box(weight_HNL: Tensor, columns: int) -> TensorDescriptor | None:
    """Make the descriptor with which the copy engine fetches `columns` of a head's weights; None where it cannot."""
    heads, nope, latent = weight_HNL.shape
    apart, row, _ = weight_HNL.stride()
    pieces = weight_HNL.itemsize == 2 and row % 8 == 0 and weight_HNL.data_ptr() % 16 == 0
    if not pieces or apart % row or nope not in (16, 32, 64, 128, 256):
        return None
    rows = (heads - 1) * (apart // row) + nope
    return TensorDescriptor(weight_HNL, [rows, latent], [row, 1], [nope, columns])


def _columns_of_parts(tokens: int, heads: int, latent: int) -> int:
    """Latent features of a program: every program reads parts of its tokens' queries, 16 bytes per feature or more, so
    few programs should share a token's head; but they should be enough for the multiprocessors."""
    columns = 256
    while columns > 64 and heads * triton.cdiv(latent, columns) * triton.cdiv(tokens, 16) < _ENOUGH:
        columns //= 2
    return columns


def merge_up(
    attended_RWHL: Tensor,
    workspace: Workspace,
    weight_HVL: Tensor,
    out_THV: Tensor,
    *,
    columns: int = 32,
    dependent: bool = False,
) -> None:
    """Launch `merge_up`. `columns`: pieces that are multiplied at once."""
    shape = workspace.shape
    heads, value, latent = weight_HVL.shape
    tokens = shape.rows * shape.width
    if workspace.shape.invariant:
        raise ValueError("pieces of invariant mode are merged by mla_decode")
    if out_THV.stride()[1:] != (value, 1) or not attended_RWHL.is_contiguous() or weight_HVL.stride(2) != 1:
        raise ValueError("heads of the output, attention and weight rows are contiguous")
    if tokens > MOST_STREAMED:
        _merge_tiles(attended_RWHL, workspace, weight_HVL, out_THV, dependent)
        return
    cut = Streaming.of(latent)
    merge.merge_up[(heads * triton.cdiv(value, ROWS), tokens)](
        workspace.partial_SQL,
        workspace.partial_lse_SQ,
        attended_RWHL,
        workspace.metadata,
        weight_HVL,
        out_THV,
        workspace.tiling.ctas,
        STORED=PLAIN,
        SIZES=Attended(width=shape.width, heads=heads, latent=latent, value_features=value),
        WEIGHT=_matrices(weight_HVL),
        OUT_TOKEN=out_THV.stride(0),
        COLUMNS=columns,
        WIDTH=cut.width,
        WARPS=cut.warps,
        DEPENDENT=dependent,
        num_warps=cut.warps,
        **options(dependent),
    )


def _merge_tiles(
    attended_RWHL: Tensor, workspace: Workspace, weight_HVL: Tensor, out_THV: Tensor, dependent: bool
) -> None:
    """`merge_up` for many tokens."""
    shape, wide = workspace.shape, attended_RWHL.dtype == torch.float32
    heads, value, latent = weight_HVL.shape
    if attended_RWHL.dtype != workspace.partial_SQL.dtype:
        raise ValueError(f"attention is {attended_RWHL.dtype}, its pieces are {workspace.partial_SQL.dtype}")
    tokens = shape.rows * shape.width
    # As many pieces as a row has where rows are about equally long; a product has 64 rows, as wgmma wants it. All rows
    # up to a power of two have the kernel of that many, so that no number of them compiles one under load.
    most = triton.next_power_of_2(shape.rows)
    share = workspace.tiling.ctas / most
    pieces = 1 if share <= 1 else min(16, triton.next_power_of_2(max(2, int(share))))
    rows, columns = 32 if wide else 64, 64
    products = triton.cdiv(most * shape.width * pieces, rows) * heads
    if wide or products * triton.cdiv(value, columns) < _APART:
        columns = 32  # too few programs for the multiprocessors
    # Programs that share a multiprocessor should leave each other shared memory.
    stages = 8 if products * triton.cdiv(value, columns) <= _APART else 4
    tiles = triton.cdiv(tokens * pieces, rows)
    block_k = min(32 if wide else 64, max(16, triton.next_power_of_2(latent)))
    kernel.merge_tile[(tiles * triton.cdiv(value, columns), heads)](
        workspace.partial_SQL,
        workspace.partial_lse_SQ,
        attended_RWHL,
        workspace.metadata,
        weight_HVL,
        out_THV,
        tokens,
        workspace.tiling.ctas,
        SIZES=Attended(width=shape.width, heads=heads, latent=latent, value_features=value),
        WEIGHT=_matrices(weight_HVL),
        OUT_TOKEN=out_THV.stride(0),
        CUT=MergeCut(
            tokens=rows // pieces,
            pieces=pieces,
            columns=columns,
            block_k=block_k,
            stages=3 if wide else min(stages, triton.cdiv(latent, block_k)),
            precision="ieee" if wide else "tf32",
        ),
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )
