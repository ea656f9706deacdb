"""Products with one weight matrix per head: W_UK into the query, W_UV out of the attended latent.

Shape legend: T tokens, H heads, N input features, L output features; O rope features, D = N + O, C = L + O, V value
features, S parts, P pages, K = 64 entries per page, R rows, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.head_linear import launch
from kernels.latent_entry import rope_cache_reference
from kernels.linear import launch as linear_launch
from kernels.linear.reference import invariant_groups
from kernels.mla_decode.schedule import Workspace
from kernels.parts import added

__all__ = ["absorb", "head_linear", "merge_up", "rope_absorb", "rope_absorb_reference"]


def head_linear(
    x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor, *, invariant: bool = False, dependent: bool = False
) -> None:
    """out[t, h] = x[t, h] · weight[h], summed in fp32 and rounded once. All of one dtype.

    Any of the three may be a strided view, `weight_HNL` a transposed one; `out_THL` overlaps neither input.
    `invariant`: a token's result is bitwise the same in any call, its sums in an order that depends on N alone.
    `dependent`: programmatic dependent launch.
    """
    if not x_THN.is_cuda:
        if invariant:
            invariant_groups(x_THN, weight_HNL.transpose(1, 2), out_THL)
        else:
            out_THL.copy_(torch.bmm(x_THN.transpose(0, 1), weight_HNL).transpose(0, 1))
        return
    if x_THN.stride(2) != 1 or out_THL.stride(2) != 1:
        raise ValueError("the features of a head are contiguous")
    weight_HLN = weight_HNL.transpose(1, 2)
    if not invariant and x_THN.shape[0] and linear_launch.streamable(x_THN, weight_HLN):
        linear_launch.stream_heads(x_THN, weight_HLN, out_THL, dependent=dependent)
    else:
        linear_launch.tiled(x_THN, weight_HLN, out_THL, invariant=invariant, dependent=dependent)


def absorb(
    q_THD: Tensor, weight_HNL: Tensor, out_THC: Tensor, *, invariant: bool = False, dependent: bool = False
) -> None:
    """Convert roped queries to the absorbed form that attention reads, in one launch: out[..., :L] = q[..., :N] ·
    weight; out[..., L:] = q[..., N:].

    All of one dtype; tokens and heads of `q_THD` may be strided, `out_THC` is contiguous. `dependent`:
    the kernel behind is launched dependently. This one is not: it starts when all before it has ended. `invariant`: as
    of `head_linear`, whose kernel it is then, launched dependently itself.
    """
    nope, latent = weight_HNL.shape[1:]
    rope = q_THD.shape[2] - nope
    if q_THD.is_cuda and invariant and rope & (rope - 1) == 0:
        if q_THD.stride(2) != 1 or out_THC.stride(2) != 1:
            raise ValueError("the features of a head are contiguous")
        linear_launch.tiled(
            q_THD[..., :nope],
            weight_HNL.transpose(1, 2),
            out_THC[..., :latent],
            invariant=True,
            behind=rope,
            dependent=dependent,
        )
        return
    if q_THD.is_cuda and not invariant:
        launch.absorb(q_THD, weight_HNL, out_THC, dependent=dependent)
        return
    head_linear(q_THD[..., :nope], weight_HNL, out_THC[..., :latent], invariant=invariant, dependent=dependent)
    out_THC[..., latent:] = q_THD[..., nope:]


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
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Convert the projections to the absorbed queries and cache entries that attention reads, in one launch.

    out[..., :L] = q[..., :N] · weight; out[..., L:] = q[..., N:] rotated. Cache entry of every token: its latent
    `kv_TC`[:, :L] normed with `norm_L`, then its key `kv_TC`[:, L:] rotated. The pairs are features (2i, 2i + 1).

    - `q_THD` and `kv_TC` may both be parts in fp32, [T, S, H, D] and [T, S, C], as `kernels.linear.part_linear` leaves
      them: they are added in their order, and the sum is rounded to the dtype of the output.
    - `rotation_PO`: fp32, of every position, (cos, sin) of the i-th angle at (2i, 2i + 1).
    - `cache_slot_T`: int64 index into the flattened cache [pages * 64]; padding points into the null page. A slot
      outside the cache is the caller's error and never written (on a CPU it raises).
    - `cache_PKC`: entries in the dtype of the output, or FP8 entries as bytes (`kernels.latent_entry`).
    - `dependent`: programmatic dependent launch, safe when positions and slots were written before the kernel before.
      The kernel lets its successor start only after its own wait, as early reads of attention want it.
    """
    tensors = (q_THD, kv_TC, weight_HNL, norm_L, rotation_PO, position_T, cache_slot_T, out_THC, cache_PKC)
    if q_THD.is_cuda:
        launch.rope_absorb(*tensors, eps, dependent=dependent)
    else:
        rope_absorb_reference(*tensors, eps)


def rope_absorb_reference(
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
) -> None:
    """`rope_absorb` in plain torch."""
    latent = weight_HNL.shape[2]
    if kv_TC.dim() == 3:
        q_THD, kv_TC = (added(x, out_THC.dtype) for x in (q_THD, kv_TC))
    nope = weight_HNL.shape[1]
    out_THC[..., :latent] = torch.bmm(q_THD[..., :nope].transpose(0, 1), weight_HNL).transpose(0, 1)
    out_THC[..., latent:] = q_THD[..., nope:]
    rope_cache_reference(
        out_THC[..., latent:],
        kv_TC,
        norm_L,
        rotation_PO[position_T],
        cache_slot_T,
        torch.empty_like(kv_TC, memory_format=torch.contiguous_format),
        cache_PKC,
        eps,
    )


def merge_up(
    attended_RWHL: Tensor, workspace: Workspace, weight_HVL: Tensor, out_THV: Tensor, *, dependent: bool = False
) -> None:
    """out = weight · what `mla_decode.launch.attend` left in `workspace` and `attended_RWHL`, in place of its merge.

    On a GPU; of at most 16 tokens as bf16 alone, as the products of `kernels.linear` for so few. `dependent`: safe when
    the plan was written before the kernel before, see `merge`.
    """
    launch.merge_up(attended_RWHL, workspace, weight_HVL, out_THV, dependent=dependent)
