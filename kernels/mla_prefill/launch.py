"""Launches the Triton prefill attention. Allocates nothing and waits for nothing; the grid follows from `max_q`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.mla_prefill import kernel


@dataclass(frozen=True)
class Tiling:
    """The static choices of one launch."""

    queries: int
    """Queries a program holds."""
    keys: int
    """Keys it works on at a time."""
    warps: int
    stages: int
    """Tiles of keys and values in flight."""


def tiling(features: int, value: int, dtype: torch.dtype, max_q: int) -> Tiling:
    """A tiling for keys of `features` and values of `value` features, padded to powers of two."""
    if dtype.itemsize > 2:
        return Tiling(32, 32, 4, 1)
    if max_q <= 64:
        return Tiling(64, 64 if value <= 128 else 32, 4, 2)
    wide = 128 if features + value <= 320 else 64 if features + value <= 512 else 32
    return Tiling(128, wide, 8, 2)


def mla_prefill(
    q_THD: Tensor,
    k_SHN: Tensor,
    k_SO: Tensor,
    v_SHV: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    *,
    scale: float,
    causal: bool,
    max_q: int,
    tiles: Tiling | None = None,
) -> None:
    """See `kernels.mla_prefill.mla_prefill`."""
    heads, nope, rope, value = q_THD.shape[1], k_SHN.shape[2], k_SO.shape[1], v_SHV.shape[2]
    rows = cu_q_B1.shape[0] - 1
    if not q_THD.shape[0] or not max_q:
        return
    for tensor in (q_THD, k_SHN, k_SO, v_SHV, out_THV, lse_TH):
        assert tensor.stride(-1) == 1
    lanes = [max(16, triton.next_power_of_2(size)) for size in (nope, rope, value)]
    tiles = tiles or tiling(lanes[0] + lanes[1], lanes[2], q_THD.dtype, max_q)
    blocks = triton.cdiv(max_q, tiles.queries)
    kernel.attend[(blocks * rows * heads,)](
        q_THD,
        k_SHN,
        k_SO,
        v_SHV,
        cu_q_B1,
        cu_k_B1,
        out_THV,
        lse_TH,
        scale * math.log2(math.e),
        heads,
        blocks,
        rows * heads,
        Q_ROW=q_THD.stride(0),
        Q_HEAD=q_THD.stride(1),
        K_ROW=k_SHN.stride(0),
        K_HEAD=k_SHN.stride(1),
        ROPE_ROW=k_SO.stride(0),
        V_ROW=v_SHV.stride(0),
        V_HEAD=v_SHV.stride(1),
        OUT_ROW=out_THV.stride(0),
        OUT_HEAD=out_THV.stride(1),
        LSE_ROW=lse_TH.stride(0),
        NOPE=nope,
        ROPE=rope,
        VALUE=value,
        NOPE_LANES=lanes[0],
        ROPE_LANES=lanes[1],
        VALUE_LANES=lanes[2],
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        CAUSAL=causal,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
