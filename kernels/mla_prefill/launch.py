"""Launches the prefill attention kernels. Allocates nothing and waits for nothing; the grid follows from `max_q`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
from torch import Tensor

from kernels.mla_prefill import kernel
from kernels.mla_prefill.records import Features, Strides, Tile, TokenStrides
from kernels.runtime.hopper import is_hopper


@dataclass(frozen=True)
class PrefillTiling:
    """The static choices of one launch."""

    queries: int
    """Queries a program holds."""
    keys: int
    """Keys it works on at a time."""
    warps: int
    stages: int
    """Tiles of keys and values in flight."""
    path: Literal["triton", "hopper"] = "triton"
    """`kernel`, or `hopper`, whose other numbers are those of `HOPPER`."""


HOPPER: Final = PrefillTiling(128, 128, 9, 2, "hopper")
"""Tiling for compute capability 9.0 and bfloat16, of the features in `HOPPER_FEATURES`."""
HOPPER_FEATURES: Final = ((128, 64, 128), (64, 64, 128))
"""Features of a key, without and with rope, and of a value, that `hopper` takes."""
HOPPER_QUERIES: Final = 256
"""Fewest queries of the longest row for which `hopper` is the faster kernel where they attend to each other
(bench/prefill_attention.py). Over context it is the faster one for any number."""


def tiling(features: int, value: int, dtype: torch.dtype, max_q: int) -> PrefillTiling:
    """A tiling for keys of `features` and values of `value` features, padded to powers of two."""
    if dtype.itemsize > 2:
        return PrefillTiling(32, 32, 4, 1)
    if max_q <= 64:
        return PrefillTiling(64, 64 if value <= 128 else 32, 4, 2)
    wide = 128 if features + value <= 320 else 64 if features + value <= 512 else 32
    return PrefillTiling(128, wide, 8, 2)


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
    tiles: PrefillTiling | None = None,
) -> None:
    parts, out_part, lse_part = 1, 0, 0
    if out_THV.ndim == 4:
        assert not causal
        parts, out_part, lse_part = out_THV.shape[0], out_THV.stride(0), lse_TH.stride(0)
        out_THV, lse_TH = out_THV[0], lse_TH[0]
    heads, nope, rope, value = q_THD.shape[1], k_SHN.shape[2], k_SO.shape[1], v_SHV.shape[2]
    rows = cu_q_B1.shape[0] - 1
    if not q_THD.shape[0] or not max_q:
        return
    for tensor in (q_THD, k_SHN, k_SO, v_SHV, out_THV, lse_TH):
        assert tensor.stride(-1) == 1
    lanes = [max(16, triton.next_power_of_2(size)) for size in (nope, rope, value)]
    tensors = {"q_THD": q_THD, "k_SHN": k_SHN, "k_SO": k_SO, "v_SHV": v_SHV}
    if tiles is None:
        many = max_q >= HOPPER_QUERIES or not causal
        fast = many and is_hopper(q_THD.device) and not _not_for_hopper(tensors)
        tiles = HOPPER if fast else tiling(lanes[0] + lanes[1], lanes[2], q_THD.dtype, max_q)
    blocks = triton.cdiv(max_q, tiles.queries)
    grid = (blocks * rows * heads, parts)
    results = out_THV, lse_TH, scale * math.log2(math.e)
    bounds = (cu_q_B1, cu_k_B1, *results, heads, blocks, rows * heads, out_part, lse_part)
    strides = Strides(
        q_head=q_THD.stride(1),
        k_head=k_SHN.stride(1),
        v_head=v_SHV.stride(1),
        out_token=out_THV.stride(0),
        out_head=out_THV.stride(1),
        lse_token=lse_TH.stride(0),
    )
    if tiles.path == "hopper":
        if tiles != HOPPER:
            raise ValueError(f"this kernel has one tiling, {HOPPER}, not {tiles}")
        if problem := _not_for_hopper(tensors):
            raise ValueError(problem)
        from kernels.mla_prefill.hopper import attend_hopper, box

        attend_hopper[grid](
            box(q_THD, 64, nope),
            box(q_THD, 64, 64),
            box(k_SHN, 128, nope),
            box(k_SO, 128, 64),
            box(v_SHV, 128, 128),
            *bounds,
            NOPE=nope,
            STRIDES=strides,
            CAUSAL=causal,
            num_warps=4,
        )
        return
    kernel.attend[grid](
        q_THD,
        k_SHN,
        k_SO,
        v_SHV,
        *bounds,
        STRIDES=strides,
        TOKEN_STRIDES=TokenStrides(q=q_THD.stride(0), k=k_SHN.stride(0), k_rope=k_SO.stride(0), v=v_SHV.stride(0)),
        FEATURES=Features(
            nope=nope,
            nope_lanes=lanes[0],
            rope=rope,
            rope_lanes=lanes[1],
            v=value,
            v_lanes=lanes[2],
            precision="ieee" if q_THD.dtype == torch.float32 else "tf32",
        ),
        TILE=Tile(queries=tiles.queries, keys=tiles.keys),
        CAUSAL=causal,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _not_for_hopper(tensors: dict[str, Tensor]) -> str:
    """Return why `hopper` does not take these tensors; empty if it does."""
    sizes = tuple(tensors[name].shape[-1] for name in ("k_SHN", "k_SO", "v_SHV"))
    dtype = tensors["q_THD"].dtype
    if sizes not in HOPPER_FEATURES or dtype != torch.bfloat16:
        known = " or ".join(map(str, HOPPER_FEATURES))
        return f"this kernel takes bfloat16 with features {known}, not {dtype} with {sizes}"
    if not tensors["k_SHN"].shape[0]:
        return "this kernel cannot describe empty keys to the hardware: give at least one, of no row"
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16 or tensor.stride(0) % 8:
            return f"{name} must begin, and each of its tokens, at a multiple of 16 bytes"
    return ""
