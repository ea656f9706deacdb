"""Launches the kernels of the absorbed form. Allocates nothing and waits for nothing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.head_linear import kernel, merge
from kernels.linear.launch import MOST_STREAMED, Streaming, options
from kernels.linear.stream import ROWS
from kernels.mla_decode.schedule import Workspace
from kernels.page import PAGE_TOKENS

_GROUP = 16
"""Heads a program rotates."""


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
    """See `kernels.head_linear.rope_absorb`."""
    tokens, heads, _ = q_THD.shape
    nope, latent = weight_HNL.shape[1:]
    rope = rotation_PO.shape[1]
    if not 0 < tokens <= MOST_STREAMED:
        raise ValueError(f"{tokens} tokens; at most {MOST_STREAMED} are absorbed in one launch")
    if not out_THC.is_contiguous() or not rotation_PO.is_contiguous() or q_THD.stride()[1:] != (nope + rope, 1):
        raise ValueError("queries have contiguous heads, the absorbed query and the rotations are contiguous")
    if not position_T.is_contiguous() or not cache_slot_T.is_contiguous():
        raise ValueError("positions and cache slots are contiguous")
    if weight_HNL.stride(2) != 1 or cache_PKC.stride(0) != PAGE_TOKENS * cache_PKC.stride(1):
        raise ValueError("weight rows are contiguous and cache entries equally spaced")
    group = min(_GROUP, triton.next_power_of_2(heads))
    per_head = 64 if heads <= 32 else 128
    columns = min(per_head, triton.next_power_of_2(latent))
    programs = heads * triton.cdiv(latent, columns) + tokens * (1 + triton.cdiv(heads, group))
    kernel.rope_absorb[(programs,)](
        q_THD,
        kv_TC,
        weight_HNL,
        norm_L,
        rotation_PO,
        position_T,
        cache_slot_T,
        out_THC,
        cache_PKC,
        tokens,
        cache_PKC.shape[0] * PAGE_TOKENS,
        eps,
        Q_TOKEN=q_THD.stride(0),
        KV_TOKEN=kv_TC.stride(0),
        CACHE_STRIDE=cache_PKC.stride(1),
        W_HEAD=weight_HNL.stride(0),
        W_ROW=weight_HNL.stride(1),
        HEADS=heads,
        NOPE=nope,
        NOPE_BLOCK=max(16, triton.next_power_of_2(nope)),
        LATENT=latent,
        LATENT_BLOCK=triton.next_power_of_2(latent),
        COLUMNS=max(16, columns),
        ROPE=rope,
        ROPE_BLOCK=triton.next_power_of_2(rope),
        GROUP=group,
        TOKENS=16,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def merge_up(
    attended_RWHL: Tensor,
    workspace: Workspace,
    weight_HVL: Tensor,
    out_THV: Tensor,
    *,
    columns: int = 32,
    dependent: bool = False,
) -> None:
    """See `kernels.head_linear.merge_up`. `columns`: pieces that are multiplied at once."""
    shape = workspace.shape
    heads, value, latent = weight_HVL.shape
    tokens = shape.rows * shape.width
    if workspace.shape.invariant:
        raise ValueError("pieces of invariant mode are merged by mla_decode")
    if out_THV.stride()[1:] != (value, 1) or not attended_RWHL.is_contiguous() or weight_HVL.stride(2) != 1:
        raise ValueError("heads of the output, attention and weight rows are contiguous")
    cut = Streaming.of(latent)
    merge.merge_up[(heads * triton.cdiv(value, ROWS), tokens)](
        workspace.partial_SQL,
        workspace.partial_lse_SQ,
        attended_RWHL,
        workspace.plan,
        weight_HVL,
        out_THV,
        workspace.tiling.workers,
        WIDTH_TOKENS=shape.width,
        HEADS=heads,
        LATENT=latent,
        F=value,
        W_HEAD=weight_HVL.stride(0),
        W_STRIDE=weight_HVL.stride(1),
        OUT_STRIDE=out_THV.stride(0),
        COLUMNS=columns,
        WIDTH=cut.width,
        WARPS=cut.warps,
        DEPENDENT=dependent,
        num_warps=cut.warps,
        **options(dependent),
    )
